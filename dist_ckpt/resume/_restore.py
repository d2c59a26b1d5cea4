"""Restore one generation on all ranks, phase by phase. Layer 5, collective.

The order is that of requirement K6:

    model, optimizer tensors → groups, scheduler, scaler → data, user's state → (later) random state
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.errors import CorruptFileError, DistCkptError, MismatchError, RankFailedError
from dist_ckpt.generations import StoredGenerations, is_bad_bytes
from dist_ckpt.resume._derive import derive_rng
from dist_ckpt.resume._read import Reader
from dist_ckpt.resume._values import Inherited, differing_parts, inherit
from dist_ckpt.resume_point import ResumePoint, shard_name, state_name

__all__ = ["Elsewhere", "Restore", "Resumed", "Skipped", "UnusableError"]


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
        accepted: Parts that differ, which somebody has accepted.
        is_comparable: As many ranks, dividing tensors in the same way, so that sums are made in the
            same order.
        secs: How long restoring it took on this rank, choosing left out.
        imported: The .bin that its weights and moments came from, at the start of an import: data,
            schedule and random state are as the program built them.
        restore_rng: Call it last, after everything that draws; gradients of zeros are there then,
            too, where there were gradients.
    """

    step: int
    point: ResumePoint
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    is_comparable: bool = True
    secs: float = 0.0
    imported: str | None = None
    restore_rng: Callable[[], None] = field(default=lambda: None, repr=False)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What other live ranks have and this one hasn't: the other stages of a pipeline.

    Attributes:
        names: Parameters and buffers, by each of their names.
        parts: Words of parts, as ``extra_state.MODULE`` and ``optimizer.KEY``.
    """

    names: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()


class UnusableError(Exception):
    """A generation's bytes aren't right; never leaves this package."""

    def __init__(self, error_id: str, reason: str) -> None:
        super().__init__(reason)
        self.id = error_id


class Restore:
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
        elsewhere: Elsewhere,
    ) -> None:
        self._elsewhere = elsewhere
        self._store = store
        self._comm = comm
        self._captured = captured
        self._step = step
        self._accept = accept
        self._omit = frozenset(omit)
        self._differed: list[str] = []

    def run(
        self,
        admit: Callable[[ResumePoint], None],
        generators: Mapping[str, Any],
        chosen: Callable[[ResumePoint], None],
    ) -> Resumed:
        comm = self._comm
        point = self._together("open", self._open)
        if self._store.trusted is not None:
            self._together("signature", lambda: self._check_sums(point))
        if comm.rank == 0:
            self._together("identity", lambda: admit(point))
        else:
            self._together("identity", lambda: None)
        chosen(point)
        same_size = point.world_size == comm.world_size
        own_rank = comm.rank if same_size else 0
        reader = self._together(
            "index", lambda: Reader(self._store, point, place=(comm.rank, comm.world_size))
        )
        told = self._together("values", lambda: self._inherit(reader, point, own_rank))
        self._together("read", lambda: self._read_tensors(reader, point, told))
        self._together("shared values", lambda: self._load_shared(told))
        own = self._together("own tensors", lambda: told.read(reader))
        self._together("data and extra", lambda: self._load_rank(told, own))
        rng = self._together("random state", lambda: self._rng(reader, point, told, generators))

        def last() -> None:
            self._captured.load_gradients(told.values)
            rng()

        notes = self._notes(point)
        return Resumed(
            step=point.step,
            point=point,
            notes=(*notes, *self._captured.notes),
            accepted=tuple(dict.fromkeys(self._captured.accepted)),
            is_comparable=not (notes or self._captured.accepted),
            restore_rng=last,
        )

    def _open(self) -> ResumePoint:
        point = self._store.manifest(self._step)
        self._store.check_files(point)
        return point

    def _check_sums(self, point: ResumePoint) -> None:
        # All files before one of them is used; each once, whoever reads it later.
        mine = range(self._comm.rank, point.world_size, self._comm.world_size)
        names = [name(rank) for rank in mine for name in (shard_name, state_name)]
        self._store.check_sums(point, names)

    def _inherit(self, reader: Reader, point: ResumePoint, own_rank: int) -> Inherited:
        if point.world_size != self._comm.world_size and self._comm.rank == 0:
            self._check_data(differing_parts(reader, point), point)
        return inherit(
            reader,
            point,
            rank=own_rank,
            wanted=self._captured.parts(),
            elsewhere=self._elsewhere.parts,
        )

    def _check_data(self, different: set[str], point: ResumePoint) -> None:
        """Case 35: a place in the data that is a rank's own means nothing to another number."""
        if "data" in different and not {"data"} & {*self._accept, *self._omit}:
            raise MismatchError(
                f"The place in the data differed by rank on the {point.world_size} ranks of step "
                f"{point.step}: it can't be divided among {self._comm.world_size}.",
                next_step="Resume on as many ranks, use ResumableLoader, or take rank 0's place "
                "on all ranks by accept=('data',).",
                different=["data"],
            )
        self._differed = sorted(different - {"data"})

    def _read_tensors(self, reader: Reader, point: ResumePoint, told: Inherited) -> None:
        live = self._captured.prepare(
            reader.untied,
            point.canonical.stateless,
            told.shared,
            accept=self._accept,
            omit=self._omit,
            elsewhere=self._elsewhere.names,
            tied=reader.tied,
        )
        reader.into(live, buffers=told.buffers, rank=told.rank)

    def _load_shared(self, told: Inherited) -> None:
        self._captured.load_shared(
            told.shared,
            accept=self._accept,
            omit=self._omit,
            elsewhere=self._elsewhere.names,
        )

    def _load_rank(self, told: Inherited, own: Sequence[Any]) -> None:
        def get(number: int) -> Any:
            if not 0 <= number < len(own):
                raise CorruptFileError(
                    f"{self._store.path(self._step)} refers to tensor {number} of {len(own)}.",
                    next_step="Use another generation.",
                )
            return own[number]

        self._captured.load_rank(told.values, get, accept=self._accept, omit=self._omit)

    def _rng(
        self,
        reader: Reader,
        point: ResumePoint,
        told: Inherited,
        generators: Mapping[str, Any],
    ) -> Callable[[], None]:
        rank = self._comm.rank
        if "rng" in self._omit:
            return lambda: None
        if rank < point.world_size:
            values = told.values if told.rank == rank else reader.tail(rank).values
            return lambda: self._captured.load_rng(values, accept=self._accept)
        saved = told.values["rng"]
        return lambda: derive_rng(saved, step=point.step, rank=rank, generators=generators)

    def _notes(self, point: ResumePoint) -> list[str]:
        if point.world_size == self._comm.world_size:
            return self._notes_of_parallelism(point)
        differed = f"; they differed by rank: {', '.join(self._differed)}" if self._differed else ""
        return [
            (
                f"world size {point.world_size} → {self._comm.world_size}: sums between ranks are "
                "made in another order, so the continuation can't be compared bit by bit"
            ),
            (
                "buffers and the user's state are rank 0's on every rank; ranks that are new "
                f"derive their random state from rank 0's, the step and their rank{differed}"
            ),
        ]

    def _notes_of_parallelism(self, point: ResumePoint) -> list[str]:
        before, now = point.notes.get("parallelism"), self._captured.parallelism()
        if not isinstance(before, list) or before == now:
            return []
        told = f"[{'; '.join(map(str, before)) or 'none'}] → [{'; '.join(now) or 'none'}]"
        why = "sums are made in another order, so the continuation can't be compared bit by bit"
        return [f"parallelism {told}: {why}"]

    def _together(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on every rank and end alike: all go on, all skip it, or all raise."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - told to every rank, then raised
            error = caught
        report = None if error is None else _report_of(error)
        told = self._comm.gather(json.dumps(report).encode(), phase=f"resume, {phase}")
        reports = [json.loads(data) for data in told]
        failures = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not failures:
            return result
        if all(verdict == "unusable" for verdict, *_ in failures.values()):
            rank, (_, error_id, message, next_step) = next(iter(failures.items()))
            where = f"rank {rank}: " if self._comm.world_size > 1 else ""
            raise UnusableError(error_id, f"{where}{message} {next_step}".rstrip()) from error
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
