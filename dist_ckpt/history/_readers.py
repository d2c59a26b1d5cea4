"""Reading the history of a run, also beside the job that writes it. Layer 4, reads only.

An append in progress can be seen half done; all readers here pass over a torn end.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dist_ckpt.history._array_file import LIMIT_BYTES, read_or_none
from dist_ckpt.history._follow import FollowedHistory
from dist_ckpt.history._gap import LossGap, find_gap, mark_of_columns
from dist_ckpt.history._journal import parse_journal
from dist_ckpt.history._loss_format import CanonicalIndex, LossEntry, parse_loss, scan_loss
from dist_ckpt.history._marks import LOSSES_MISSING, void_counts
from dist_ckpt.history._metrics import parse_metrics
from dist_ckpt.history._paths import FILES, history_path, run_name
from dist_ckpt.history._replay import ReplayResult, replay_summary
from dist_ckpt.history._samples import canonical_samples, parse_samples
from dist_ckpt.storage import read_file

__all__ = [
    "RunHistory",
    "read_gap",
    "read_history",
    "read_journal",
    "read_loss",
    "read_loss_raw",
    "read_metrics",
    "read_samples",
]

_Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Everything that a run logged, canonical. A file that is missing is empty here."""

    name: str
    loss: list[LossEntry]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    @property
    def replays(self) -> list[ReplayResult]:
        """The replay of each attempt that had one."""
        return replay_summary(self.journal)


def read_loss(run_dir: _Path) -> list[LossEntry]:
    """Return the canonical history of a run: ``(step, loss)``, rising in step.

    Raises:
        NotFoundError: No such run, or it has no loss file.
        CorruptFileError: The file is something else.
    """
    name = run_name(run_dir)
    path = history_path(run_dir, name, "loss")
    return _canonical_loss(_read(path), path, _journal_data(run_dir, name))


def read_loss_raw(run_dir: _Path) -> list[LossEntry]:
    """Return all entries of a run's loss file, void ones included, in the order of the file.

    Raises:
        NotFoundError: No such run, or it has no loss file.
        CorruptFileError: The file is something else.
    """
    path = history_path(run_dir, run_name(run_dir), "loss")
    return parse_loss(_read(path), path=path, torn_ok=True)


def read_gap(history: FollowedHistory, point_id: str, step: int, mark: Any) -> LossGap | None:
    """Return what the loss file lacks now of what was logged.

    Not only of what the newest generation notes: it may have been saved after losses were gone.
    What a resume found missing is told until as many are there again, and what it found changed
    until the next one; nothing of what lies behind ``step``. None where nothing is missing, or
    where the generation was brought here from another run, whose losses aren't expected.

    Raises:
        CorruptFileError: The loss file is something else.
    """
    journal = history.journal()
    told = [event for event in journal if event.get("event") in (LOSSES_MISSING, "resumed")]
    saved_here = any(e.get("event") == "saved" and e.get("id") == point_id for e in journal)
    if not saved_here and all(event["event"] == "resumed" for event in told):
        return None
    counting = history.index()
    was_resumed = False
    for event in reversed(told):
        at, logged, found = (event.get(key) for key in ("step", "logged", "found"))
        if event["event"] == "resumed":
            was_resumed = True
        elif type(at) is int and type(logged) is int and type(found) is int and at <= step:
            left, _ = counting.columns_up_to(at)
            if len(left) < logged or (found >= logged and not was_resumed):
                return LossGap(at, logged, len(left), left[-1] if left else None)
    if not saved_here:
        return None
    return find_gap(step, mark, mark_of_columns(*counting.columns_up_to(step)))


def read_metrics(run_dir: _Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that counts, rising in step.

    Raises:
        NotFoundError: No such run, or it has no metrics file.
    """
    return parse_metrics(_read(history_path(run_dir, run_name(run_dir), "metrics")))


def read_samples(run_dir: _Path) -> list[dict[str, Any]]:
    """Return the audit samples that count, rising in step.

    Raises:
        NotFoundError: No such run, or it has no samples file.
        CorruptFileError: The file is something else.
    """
    name = run_name(run_dir)
    path = history_path(run_dir, name, "samples")
    return _canonical_samples(_read(path), path, _journal_data(run_dir, name))


def read_journal(path: _Path, *, naming: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the events of a run in their order.

    Args:
        path: The run's directory, or the journal itself.
        naming: Only events in whose lines one of these words stands; empty for all.

    Raises:
        NotFoundError: No such run or journal.
    """
    if not os.fspath(path).endswith(FILES["journal"]):
        path = history_path(path, run_name(path), "journal")
    return parse_journal(_read(path), naming=naming)


def read_history(run_dir: _Path) -> RunHistory:
    """Return all of a run's history; each file is read once.

    Raises:
        NotFoundError: No such directory.
        CorruptFileError: A file is something else.
    """
    name = run_name(run_dir)
    journal = _journal_data(run_dir, name)
    loss, samples = (history_path(run_dir, name, what) for what in ("loss", "samples"))
    return RunHistory(
        name=name,
        loss=_canonical_loss(read_or_none(loss) or b"", loss, journal),
        metrics=parse_metrics(read_or_none(history_path(run_dir, name, "metrics")) or b""),
        samples=_canonical_samples(read_or_none(samples) or b"", samples, journal),
        journal=parse_journal(journal),
    )


def _canonical_loss(data: bytes, path: str, journal: bytes) -> list[LossEntry]:
    steps, losses, _ = scan_loss(data, path=path)
    void, _ = void_counts(journal)
    return list(CanonicalIndex(steps[void:], losses[void:]))


def _canonical_samples(data: bytes, path: str, journal: bytes) -> list[dict[str, Any]]:
    samples = parse_samples(data, path=path, torn_ok=True)
    _, void = void_counts(journal)
    return canonical_samples(islice(samples, void, None))


def _journal_data(run_dir: _Path, name: str) -> bytes:
    return read_or_none(history_path(run_dir, name, "journal")) or b""


def _read(path: _Path) -> bytes:
    return read_file(path, limit_bytes=LIMIT_BYTES)
