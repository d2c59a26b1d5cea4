"""Choose the newest usable generation and restore it on all ranks. Layer 5, collective.

The order is that of requirement K6:

    model, optimizer tensors → groups, scheduler, scaler → data, user's state → (later) random state

A generation whose bytes aren't right is skipped, on all ranks or on none; a generation that doesn't
fit the live objects is an error, since an older one wouldn't fit either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.errors import (
    DistCkptError,
    NotFoundError,
    NoUsableGenerationError,
    RankFailedError,
)
from dist_ckpt.generations import StoredGenerations, is_bad_bytes
from dist_ckpt.resume._bins import advise_import
from dist_ckpt.resume._derive import derive_rng
from dist_ckpt.resume._read import Reader
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.staging import StateTail

__all__ = ["Resumed", "Skipped", "restore_newest"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A generation that wasn't used, and why."""

    step: int
    id: str
    reason: str


@dataclass(frozen=True)
class Resumed:
    """What was restored.

    Attributes:
        step: Finished updates; training goes on with the next.
        point: The resume point.
        skipped: Newer generations that can't be used.
        notes: What isn't as it was, for people and the journal.
        secs: How long restoring it took on this rank, choosing left out.
        imported: The .bin that its weights and moments came from, at the start of an import: data,
            schedule and random state are as the program built them.
        restore_rng: Call it last, after everything that draws.
    """

    step: int
    point: ResumePoint
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    secs: float = 0.0
    imported: str | None = None
    restore_rng: Callable[[], None] = field(default=lambda: None, repr=False)


def restore_newest(
    store: StoredGenerations,
    comm: Comm,
    captured: Captured,
    *,
    admit: Callable[[ResumePoint], None],
    accept: Collection[str] = (),
    omit: Collection[str] = (),
    generators: Mapping[str, Any] | None = None,
    only: int | None = None,
    chosen: Callable[[ResumePoint], None] | None = None,
) -> Resumed | None:
    """Restore all but random state from the newest usable generation; None where none exists.

    Args:
        store: The run's generations.
        comm: The job's ranks; every rank calls this.
        captured: The live objects.
        admit: Raises where the resume point's identity isn't admitted; rank 0 alone calls it.
        accept: Parts that may be missing on one side ("scaler", "extra.ema", …).
        omit: Parts to leave out, for proofs ("rng", "data", "optimizer", "scheduler", "scaler").
        generators: The user's generators, for ranks that the saved job didn't have.
        only: This step and no other.
        chosen: Told the admitted resume point on every rank, before anything of it is loaded.

    Raises:
        NoUsableGenerationError: Generations exist, but each has a fault.
        MismatchError, IdentityError: It isn't this run's model, data or configuration.
        FormatVersionError: A later version of this package wrote the newest.
        RankFailedError: Another rank failed.
    """
    steps: list[int] = json.loads(comm.broadcast(_own_steps(store, comm)))
    if only is not None:
        if only not in steps:
            raise NotFoundError(
                f"There is no generation of step {only}.",
                next_step=f"There are: {', '.join(map(str, steps)) or 'none'}.",
                step=only,
            )
        steps = [only]
    skipped: list[Skipped] = []
    for step in reversed(steps):
        attempt = _Restore(store, comm, captured, step, accept=accept, omit=omit)
        began = time.monotonic()
        try:
            resumed = attempt.run(admit, generators or {}, chosen or (lambda _point: None))
        except _Unusable as fault:
            skipped.append(Skipped(step, fault.id, str(fault)))
            continue
        secs = time.monotonic() - began
        return replace(resumed, skipped=tuple(skipped), secs=secs)
    if skipped:
        raise NoUsableGenerationError(
            f"None of the {len(skipped)} generations in {store.directory} can be used: "
            + "; ".join(f"step {fault.step}: {fault.reason}" for fault in skipped),
            next_step=_way_out(store),
            path=str(store.directory),
            skipped={fault.step: fault.reason for fault in skipped},
        )
    return None


def _own_steps(store: StoredGenerations, comm: Comm) -> bytes | None:
    return json.dumps(store.steps()).encode() if comm.rank == 0 else None


def _way_out(store: StoredGenerations) -> str:
    otherwise = "Restore a copy of the run directory, or start a new run in another directory."
    return advise_import(store) or otherwise


class _Unusable(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, error_id: str, reason: str) -> None:
        super().__init__(reason)
        self.id = error_id


class _Restore:
    """One generation on all ranks, phase by phase; each phase ends the same way on every rank."""

    def __init__(
        self,
        store: StoredGenerations,
        comm: Comm,
        captured: Captured,
        step: int,
        *,
        accept: Collection[str],
        omit: Collection[str],
    ) -> None:
        self._store = store
        self._comm = comm
        self._captured = captured
        self._step = step
        self._accept = accept
        self._omit = frozenset(omit)

    def run(
        self,
        admit: Callable[[ResumePoint], None],
        generators: Mapping[str, Any],
        chosen: Callable[[ResumePoint], None],
    ) -> Resumed:
        comm = self._comm
        point = self._together("open", self._open)
        if comm.rank == 0:
            self._together("identity", lambda: admit(point))
        else:
            self._together("identity", lambda: None)
        chosen(point)
        same_size = point.world_size == comm.world_size
        own_rank = comm.rank if same_size else 0
        reader = self._together("index", lambda: Reader(self._store, point))
        tail = self._together("values", lambda: reader.tail(own_rank))
        self._together("read", lambda: self._read_tensors(reader, point, tail, own_rank))
        self._together("shared values", lambda: self._load_shared(tail))
        own = self._together("own tensors", lambda: reader.own(own_rank, tail.tensors))
        self._together("data and extra", lambda: self._load_rank(tail, own))
        rng = self._together("random state", lambda: self._rng(reader, point, tail, generators))
        return Resumed(
            step=point.step,
            point=point,
            notes=(*self._notes(point), *self._captured.notes),
            restore_rng=rng,
        )

    def _open(self) -> ResumePoint:
        point = self._store.manifest(self._step)
        self._store.check_files(point)
        return point

    def _read_tensors(
        self, reader: Reader, point: ResumePoint, tail: StateTail, own_rank: int
    ) -> None:
        live = self._captured.prepare(
            reader.untied,
            point.canonical.stateless,
            tail.shared,
            accept=self._accept,
            omit=self._omit,
        )
        reader.into(live, buffers=tail.buffers, rank=own_rank)

    def _load_shared(self, tail: StateTail) -> None:
        self._captured.load_shared(tail.shared, accept=self._accept, omit=self._omit)

    def _load_rank(self, tail: StateTail, own: Sequence[Any]) -> None:
        self._captured.load_rank(
            tail.values, lambda number: own[number], accept=self._accept, omit=self._omit
        )

    def _rng(
        self,
        reader: Reader,
        point: ResumePoint,
        tail: StateTail,
        generators: Mapping[str, Any],
    ) -> Callable[[], None]:
        rank = self._comm.rank
        if "rng" in self._omit:
            return lambda: None
        if rank < point.world_size:
            values = tail.values if tail.rank == rank else reader.tail(rank).values
            return lambda: self._captured.load_rng(values, accept=self._accept)
        saved = tail.values["rng"]
        return lambda: derive_rng(saved, step=point.step, rank=rank, generators=generators)

    def _notes(self, point: ResumePoint) -> list[str]:
        if point.world_size == self._comm.world_size:
            return []
        return [
            (
                f"world size {point.world_size} → {self._comm.world_size}: sums between ranks are "
                "made in another order, so the continuation can't be compared bit by bit"
            ),
            (
                "buffers and the user's state are rank 0's on every rank; ranks that are new "
                "derive their random state from rank 0's, the step and their rank"
            ),
        ]

    def _together(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on every rank and end alike: all go on, all skip it, or all raise."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - told to every rank, then raised
            error = caught
        report = None if error is None else _report_of(error)
        reports = [json.loads(data) for data in self._comm.gather(json.dumps(report).encode())]
        failures = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not failures:
            return result
        if all(verdict == "unusable" for verdict, *_ in failures.values()):
            rank, (_, error_id, message, next_step) = next(iter(failures.items()))
            where = f"rank {rank}: " if self._comm.world_size > 1 else ""
            raise _Unusable(error_id, f"{where}{message} {next_step}".rstrip()) from error
        if error is not None and _verdict(error) == "fatal":
            raise error
        fatal = {
            rank: message for rank, (kind, _, message, _) in failures.items() if kind == "fatal"
        }
        next_step = next(step for kind, *_, step in failures.values() if kind == "fatal")
        raise RankFailedError(
            f"Resume failed in phase {phase!r} on "
            + "; ".join(f"rank {rank}: {text}" for rank, text in fatal.items()),
            next_step=next_step or "Mend that rank's error; nothing on disk was changed.",
            phase=phase,
            failures=fatal,
        ) from error


def _verdict(error: Exception) -> str:
    return "unusable" if is_bad_bytes(error) else "fatal"


def _report_of(error: Exception) -> list[str]:
    """Return what the other ranks are told: verdict, id, message and next step."""
    if isinstance(error, DistCkptError):
        return [_verdict(error), error.id, error.message, error.next_step]
    return [_verdict(error), type(error).__name__, str(error), ""]
