"""``RUN``, ``RUN@N``, ``RUN@latest``, a generation's path, a ``.bin``: what they name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.errors import NotFoundError, UsageError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import RESUME_POINT_NAME

__all__ = ["Address", "resolve"]


@dataclass(frozen=True, slots=True)
class Address:
    """What an address names: the directory of a generation, or a canonical file."""

    path: Path
    is_bin: bool


def resolve(address: str | os.PathLike[str]) -> Address:
    """Return what ``address`` names; that it is whole isn't checked.

    Raises:
        NotFoundError: No such run, generation or file.
        UsageError: The part behind ``@`` isn't a step.
    """
    text = os.fspath(address)
    path = Path(text)
    if storage.exists(path):
        if not storage.is_dir(path):
            return Address(path, is_bin=True)
        if storage.exists(path / RESUME_POINT_NAME):
            return Address(path, is_bin=False)
        return Address(_generation(path, "latest", text), is_bin=False)
    run, at, step = text.rpartition("@")
    if at and run and storage.exists(Path(run)):
        return Address(_generation(Path(run), step, text), is_bin=False)
    raise _missing(text, path, "there is no such path")


def _generation(run: Path, step: str, text: str) -> Path:
    if step != "latest" and not (step.isascii() and step.isdigit()):
        raise UsageError(
            f"{text!r} asks for step {step!r}, which isn't a number.",
            next_step="Write RUN@100 or RUN@latest.",
            path=text,
        )
    store = StoredGenerations(run)
    steps = store.steps()
    if not steps:
        raise _missing(text, run, "it holds no generation")
    wanted = steps[-1] if step == "latest" else int(step)
    if wanted not in steps:
        raise _missing(text, run, f"it has no step {wanted}, only {steps[0]} … {steps[-1]}")
    return store.path(wanted)


def _missing(text: str, path: Path, why: str) -> NotFoundError:
    return NotFoundError(
        f"{text} can't be opened: {why}.",
        next_step="`dist-ckpt ls RUN` lists the generations of a run.",
        path=str(path),
    )
