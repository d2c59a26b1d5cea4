"""A run directory, looked at from outside. Layer 6, reads only; no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dist_ckpt.errors import DistCkptError, ForeignFileError, NotFoundError
from dist_ckpt.generations import (
    VANISHED_ADVICE,
    SingleGeneration,
    StoredGenerations,
    tell_vanished,
)
from dist_ckpt.history import (
    LossEntry,
    proven_steps,
    read_journal,
    read_loss,
    read_loss_raw,
    run_name,
)
from dist_ckpt.lifecycle import Pivot, pivots_of
from dist_ckpt.runs._generation import Generation
from dist_ckpt.runs._places import holds_format, is_run, read_run_file, require_directory

__all__ = ["Run", "open_run", "settings_of"]


class Run:
    """One training and its directory; use `open_run`.

    Each call reads anew, so a run under way can be followed.

    Attributes:
        path: As it was given.
        name: The run's name, with which its files begin.
        store: Its generations, for the commands of this package.
        is_single: It is one generation that was named by its own path.
    """

    def __init__(self, path: Path, store: StoredGenerations, name: str, *, is_single: bool) -> None:
        self.path = path
        self.name = name
        self.store = store
        self.is_single = is_single

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def generations(self) -> list[Generation]:
        """Return the committed generations, ascending by step, as numbers."""
        return [Generation(self.store, step) for step in self.store.steps()]

    def latest(self) -> Generation | None:
        """Return the generation of the highest step, None where there is none."""
        steps = self.store.steps()
        return Generation(self.store, steps[-1]) if steps else None

    def generation(self, step: int) -> Generation:
        """Return the generation of ``step``.

        Raises:
            NotFoundError: There is none; the message names those that there are.
        """
        steps = self.store.steps()
        if step not in steps:
            vanished = self.vanished()
            raise NotFoundError(
                vanished or f"{self.path} has no generation of step {step}.",
                next_step=VANISHED_ADVICE if vanished else f"It has {_spell(steps)}.",
                path=str(self.path),
                step=step,
            )
        return Generation(self.store, step)

    def loss(self) -> list[LossEntry]:
        """Return the canonical curve, ``[(step, loss)]``, rising in step; None where not finite.

        Empty where the run has no loss file.

        Raises:
            CorruptFileError: The file is something else.
        """
        try:
            return read_loss(self.store.run_dir)
        except NotFoundError:
            return []

    def loss_raw(self) -> list[LossEntry]:
        """Return all entries in the order of the file, void ones included; otherwise as `loss`."""
        try:
            return read_loss_raw(self.store.run_dir)
        except NotFoundError:
            return []

    def journal(self) -> list[dict[str, Any]]:
        """Return the events in their order; empty where there is no journal."""
        try:
            return read_journal(self.store.run_dir)
        except NotFoundError:
            return []

    def pivots(self) -> list[Pivot]:
        """Return the changes of policy, in their order; empty where the journal can't be read."""
        try:
            return pivots_of(self.journal())
        except DistCkptError:
            return []

    def vanished(self) -> str | None:
        """Return a sentence about generations that the journal tells of where none is there now.

        None where there is one, nothing was saved yet, or the journal can't be read.
        """
        if self.is_single or self.store.steps():
            return None
        try:
            return tell_vanished(self.store, self.journal())
        except DistCkptError:
            return None

    def proven(self) -> dict[int, str]:
        """Return step → by what a real resume has proven its generation, for those that were.

        Empty where the journal can't be read: nothing is known then.
        """
        try:
            return proven_steps(self.journal())
        except DistCkptError:
            return {}


def open_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a directory, for looking at; nothing is written, locked or executed.

    The path of a generation gives a run of that one generation, with the history around it.

    Raises:
        NotFoundError: Nothing is there.
        ForeignFileError: No run directory; the message says what it is.
        CorruptFileError: A generation outside a run that doesn't tell its step.
    """
    directory = Path(path)
    require_directory(directory)
    if holds_format(directory):
        single = SingleGeneration(directory)
        return Run(directory, single, _name_of(single), is_single=True)
    if not is_run(directory):
        raise ForeignFileError(
            f"{directory} isn't a run directory: it has no run.json, no history and no generation.",
            next_step="Give the directory that Checkpointer was given, or a generation's own.",
            path=str(directory),
        )
    return Run(directory, StoredGenerations(directory), run_name(directory), is_single=False)


def settings_of(run: Run) -> dict[str, Any]:
    """Return what ``run.json`` says of the run's last start; empty where it says nothing."""
    return read_run_file(run.store.run_dir) or {}


def _name_of(store: SingleGeneration) -> str:
    try:
        return store.manifest(store.steps()[0]).run
    except DistCkptError:
        return run_name(store.run_dir)  # a broken manifest is for the reader of it to hear of


def _spell(steps: list[int]) -> str:
    if not steps:
        return "none yet"
    if len(steps) <= 6:
        return ", ".join(map(str, steps))
    return f"{len(steps)} from {steps[0]} to {steps[-1]}, {steps[-2]} before the last"
