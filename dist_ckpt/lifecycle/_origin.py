"""Where a run that is made comes from: a generation, its history, its policy. Layer 5, reads only.

What a branch, a shipped copy and a rewritten run take along is what the next start of the run
itself would go on with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.history import Past, read_journal, read_past
from dist_ckpt.lifecycle._pivot import Pivot, last_pivot, saved_since
from dist_ckpt.lifecycle._rewind import started_rewind
from dist_ckpt.resume_point import ResumePoint

__all__ = ["Origin", "find_origin", "past_of", "pivot_due"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The generation that a run begins from.

    Attributes:
        store: Where it lies.
        step: Its step.
        run_dir: The run whose history led to it; None for a generation that lies alone.
        home: Its directory in that run's ``archive/``, if it lies there.
    """

    store: StoredGenerations
    step: int
    run_dir: Path | None
    home: str | None = None

    @property
    def is_newest(self) -> bool:
        """Whether the run's next start would resume from it, however it was named."""
        if self.run_dir is None or self.home is not None:
            return False
        return StoredGenerations(self.run_dir).steps()[-1:] == [self.step]


def find_origin(store: StoredGenerations, step: int) -> Origin:
    """Return where a generation belongs: a run, its archive, or nowhere."""
    path = Path(os.path.abspath(store.path(step)))
    home = path.parent
    if home.name == "checkpoints":
        return Origin(store, step, home.parent)
    if home.parent.name == "archive" and storage.is_dir(home.parent.parent / "checkpoints"):
        return Origin(store, step, home.parent.parent, home.name)
    return Origin(store, step, None)


def past_of(origin: Origin) -> Past:
    """Return the history that led to the generation; empty where it lies in no run."""
    if origin.run_dir is None:
        return Past([], [], [])
    mark: Mapping[str, Any] | None = None
    if origin.home is not None:
        with contextlib.suppress(NotFoundError):
            mark = started_rewind(read_journal(origin.run_dir), origin.home)
    return read_past(origin.run_dir, origin.step, mark)


def pivot_due(origin: Origin, point: ResumePoint) -> Pivot | None:
    """Return the pivot that no save has followed yet, so that the next start would follow it.

    None where there is none, and for every generation but the run's newest.
    """
    if origin.run_dir is None or not origin.is_newest:
        return None
    try:
        journal = read_journal(origin.run_dir)
    except NotFoundError:
        return None
    pivot = last_pivot(journal)
    if any(event.get("id") == point.id for event in saved_since(journal)):
        return None  # whatever it notes
    return None if pivot is None or pivot.id == point.notes.get("pivot") else pivot
