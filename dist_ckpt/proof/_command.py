"""The user's command as each scenario runs it. Pure, but for looking at the file it names."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from dist_ckpt.errors import UsageError

__all__ = ["for_ranks", "resolve_command", "run_option", "with_run_dir"]

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHERS = ("torchrun", "dist-ckpt")


def resolve_command(words: Sequence[str]) -> list[str]:
    """Return the command with the interpreter that runs this program where it names none by path.

    ``python``, a script that isn't executable and ``dist-ckpt`` are run by it: a scenario must use
    the very package that judges it.

    Raises:
        UsageError: There is no command, or none of that name.
    """
    if not words:
        raise UsageError(
            "There is no command to prove.",
            next_step="Write it behind two dashes: dist-ckpt prove -- python train.py --lr 0.1",
        )
    first, rest = words[0], list(words[1:])
    is_ours = _PYTHON.fullmatch(first) or first == "dist-ckpt" or Path(first).is_file()
    if not is_ours and shutil.which(first) is None:
        raise UsageError(
            f"There is no command {first}.",
            next_step="Write it as in a shell, behind two dashes: -- python train.py",
            found=first,
        )
    if _PYTHON.fullmatch(first):
        return [sys.executable, *rest]
    if first == "dist-ckpt":
        return [sys.executable, "-m", "dist_ckpt", *rest]
    if first.endswith(".py") and Path(first).is_file() and not os.access(first, os.X_OK):
        return [sys.executable, *words]
    return list(words)


def for_ranks(words: Sequence[str], ranks: int | None, launcher_of: str) -> list[str]:
    """Return the command run by that many ranks through this package's launcher; None: as it is.

    Args:
        words: What `resolve_command` returned.
        ranks: How many.
        launcher_of: First word as the user gave it.

    Raises:
        UsageError: The command is a launcher itself.
    """
    if ranks is None:
        return list(words)
    if Path(launcher_of).name in _LAUNCHERS:
        raise UsageError(
            f"{launcher_of} starts ranks by itself.",
            next_step="Leave --ranks out, or give the script's own command.",
            found=launcher_of,
        )
    launcher = [sys.executable, "-m", "dist_ckpt", "run", f"--nproc-per-node={ranks}"]
    if words[0] == sys.executable and len(words) > 1 and not words[1].startswith("-"):
        return [*launcher, *words[1:]]
    return [*launcher, "--no-python", *words]


def run_option(words: Sequence[str], option: str) -> str:
    """Return the run directory that the command gives with ``option``.

    Raises:
        UsageError: The option isn't there, or has no value.
    """
    return words[_place(words, option)].removeprefix(f"{option}=")


def with_run_dir(words: Sequence[str], option: str | None, run_dir: Path) -> list[str]:
    """Return the command with another value of ``option``; None leaves it as it is."""
    changed = list(words)
    if option is not None:
        at = _place(words, option)
        is_joined = words[at].startswith(f"{option}=")
        changed[at] = f"{option}={run_dir}" if is_joined else str(run_dir)
    return changed


def _place(words: Sequence[str], option: str) -> int:
    """Return where the value of ``option`` stands; the last one counts, as parsers have it."""
    for at in range(len(words) - 1, -1, -1):
        if words[at].startswith(f"{option}="):
            return at
        if words[at] == option and at + 1 < len(words):
            return at + 1
    raise UsageError(
        f"The command has no option {option} with a value.",
        next_step="--run-arg takes the option that names the run directory: --run-arg=--run, say.",
        found=option,
    )
