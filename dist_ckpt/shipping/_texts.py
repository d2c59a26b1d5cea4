"""What a shipment says of itself: ``RESTORE.md``, ``SHA256SUMS``, ``confirmation.json``. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, Final

from dist_ckpt.resume_point import UNFINISHED_NAME, ResumePoint
from dist_ckpt.shipping._items import Item
from dist_ckpt.shipping._place import HIDDEN, is_secret_name

__all__ = [
    "CONFIRMATION",
    "MARKER",
    "RESTORE",
    "SUMS",
    "encode_marker",
    "encode_sums",
    "restore_text",
    "spell_command",
]

#: Written last: without it, nothing was shipped.
CONFIRMATION: Final = "confirmation.json"
#: Written first, removed last.
MARKER: Final = UNFINISHED_NAME
RESTORE: Final = "RESTORE.md"
SUMS: Final = "SHA256SUMS"

_COMMAND_CHARACTERS: Final = 1000

_FETCH = (
    "import sys, fsspec; fs, path = fsspec.url_to_fs(sys.argv[1]); "
    "fs.get(path, sys.argv[2], recursive=True)"
)


def encode_marker(point: ResumePoint, run: str) -> bytes:
    """Return the bytes of the file that says whose files these are, before all have arrived."""
    told = {"run": run, "step": point.step, "id": point.id}
    return json.dumps(told | {"say": "ship hasn't ended here; call it again"}).encode() + b"\n"


def encode_sums(items: Iterable[Item]) -> bytes:
    """Return what ``sha256sum -c`` reads."""
    return "".join(f"{item.sha256}  {item.name}\n" for item in items).encode()


def spell_command(words: Sequence[str]) -> str:
    """Return a command line for a shell, with the values of secret options blotted out."""
    shown = []
    hide = False
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if hide and not is_option:
            shown.append(HIDDEN)
        elif equals and is_secret_name(name.lstrip("-")):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(shlex.quote(PurePath(word).name if number == 0 else word))
        hide = is_option and not equals and is_secret_name(word.lstrip("-"))
    return " ".join(shown)


def restore_text(
    point: ResumePoint,
    run: str,
    label: str,
    *,
    is_url: bool,
    command: Sequence[str],
    has_bin: bool,
) -> bytes:
    """Return how to train on from the shipped folder, with the exact commands.

    A place may have any name: its bytes stand in the commands as they are.
    """
    home = shlex.quote(f"runs/{run}")
    source = shlex.quote(label)
    fetch = f"cp -a {source} {home}"
    if is_url:
        fetch = f"python -c {shlex.quote(_FETCH)} {source} {home}"
    ranks = "one rank" if point.world_size == 1 else f"{point.world_size} ranks"
    has_command = _is_short(command)
    start = spell_command(command) if has_command else "python train.py"
    started = (
        "The run was last started by this command; put in what `***` hides:"
        if has_command
        else "Start the program that trained it:"
    )
    bin_line = (
        f"`step_{point.step:06d}.bin` holds weights and both moments, see `dist_ckpt.read_bin`."
        if has_bin
        else "There is no `.bin`."
    )
    text = f"""# {run}, step {point.step}: train on from here

This folder is a run directory with one resume point, `{point.id}`, saved by {ranks}: weights,
optimizer, schedule, random state and the place in the data. Nothing of the machine that it came
from is needed. `{CONFIRMATION}` says that every file was read back and the whole loaded for trial;
where it is missing, the shipment hasn't ended.

## 1. Bring it back

```sh
mkdir -p runs
{fetch}
```

`{home}` mustn't exist before. A folder on a disk of this machine can be used in place, too: what
trains there adds to it.

## 2. Check it

```sh
(cd {home} && sha256sum --quiet -c {SUMS})
dist-ckpt verify {home}
```

## 3. Train on

{started}

```sh
DIST_CKPT_RUN_DIR={home} {start}
```

It resumes from step {point.step} by itself, on any number of ranks. Another configuration, other
data or another model are refused, and the error says what differs:

{_identity(point)}
## What else lies here

The losses up to step {point.step} are in `{run}.loss.json`. `shipped/` holds the configuration, the
identities and the journal of the old run, to be read by people. {bin_line}
"""
    return text.encode("utf-8", "surrogateescape")


def _is_short(command: Sequence[str]) -> bool:
    """Return whether a command is one that people type; a program in an argument isn't."""
    words = " ".join(command)
    return 0 < len(words) <= _COMMAND_CHARACTERS and words.isprintable() and "`" not in words


def _identity(point: ResumePoint) -> str:
    identity = point.identity
    versions = identity.get("versions")
    code = identity.get("code")
    data = identity.get("data")
    lines = ["| what | was |", "|---|---|"]
    if isinstance(code, dict):
        program, git = _cell(code.get("path")), _cell(code.get("git") or "unknown")
        lines.append(f"| program | `{program}`, git {git} |")
    lines.append(f"| data | {_spell(data)} |")
    if isinstance(versions, dict):
        lines.append(f"| versions | {_spell(versions)} |")
    return "\n".join(lines) + "\n"


def _spell(value: Any) -> str:
    if not isinstance(value, dict):
        return "unknown"
    told = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return _cell(told) or "unknown"


def _cell(value: Any) -> str:
    """Return what may stand in a table: on one line, and nothing that isn't UTF-8."""
    text = " ".join(str(value).replace("|", "/").split())
    return text.encode("utf-8", "backslashreplace").decode()
