"""How people name a run and a generation: ``RUN``, ``RUN@N``, ``RUN@latest``, a path. Layer 8."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import storage
from dist_ckpt.errors import ForeignFileError, NotFoundError, UsageError
from dist_ckpt.generations import VANISHED_ADVICE
from dist_ckpt.runs import Generation, Run, open_run, runs_below

__all__ = ["Address", "AddressArgument", "RunArgument", "find", "find_generation", "find_run"]

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]
AddressArgument = Annotated[
    str, typer.Argument(metavar="RUN[@N]", help="A generation: RUN is the newest.")
]

_NUM_NAMED = 5
_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Address:
    """A run, and which generation of it.

    Attributes:
        run: The run.
        step: The step; None where none was named.
    """

    run: Run
    step: int | None


def find(text: str) -> Address:
    """Return what an address names; a path that exists is a path, whatever signs are in it.

    Raises:
        UsageError: What stands behind ``@`` isn't a step.
        NotFoundError: No such run or generation.
        ForeignFileError: Something else lies there.
    """
    base, at, which = text.rpartition("@")
    if not at or storage.exists(Path(text)):
        return Address(_open(text), None)
    run = _open(base)
    if which == "latest":
        return Address(run, newest(run).step)
    if not _STEP.fullmatch(which):
        raise UsageError(
            f"{which!r} behind the @ isn't a step.",
            next_step="Write RUN@100 or RUN@latest; `dist-ckpt ls RUN` lists the steps.",
            found=which,
        )
    return Address(run, run.generation(int(which)).step)


def _open(text: str) -> Run:
    """Return the run; where runs lie below the directory instead, the error names them."""
    try:
        return open_run(text)
    except ForeignFileError as error:
        below = [str(path) for path in runs_below(Path(text))]
        if not below:
            raise
        more = len(below) - _NUM_NAMED
        names = ", ".join(below[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
        one, lie = ("it", "lies") if len(below) == 1 else ("one of them", "lie")
        raise ForeignFileError(
            error.message,
            next_step=f"Below it {lie} {names}: name {one}.",
            **error.values,
        ) from error


def find_generation(text: str) -> tuple[Run, Generation]:
    """Return the generation that an address names, the newest where it names a run."""
    address = find(text)
    if address.step is None:
        return address.run, newest(address.run)
    return address.run, address.run.generation(address.step)


def find_run(text: str) -> Run:
    """Return the run that an address names.

    Raises:
        UsageError: It names one generation of it.
    """
    address = find(text)
    if address.step is not None or address.run.is_single:
        raise UsageError(
            f"{text} is one generation; this command is about a run.",
            next_step="Give the run directory alone.",
        )
    return address.run


def newest(run: Run) -> Generation:
    """Return the newest generation of a run that has one."""
    latest = run.latest()
    if latest is None:
        vanished = run.vanished()
        raise NotFoundError(
            vanished or f"{run.path} has no generation yet.",
            next_step=VANISHED_ADVICE if vanished else "`dist-ckpt status` says what the run does.",
            path=str(run.path),
        )
    return latest
