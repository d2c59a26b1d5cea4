"""Takes one instant at a boundary and has a background thread make a generation of it. Layer 6.

The training thread copies and goes on. The next save waits for the commit of the one before, never
for its verification, and nothing ever queues up: at most one save is being written and one
verification
    pending.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.errors import DistCkptError, JobError, SaveFailedError
from dist_ckpt.layout import Layout, decode_specs, encode_specs, plan_layout
from dist_ckpt.resume_point import Canonical, ResumePoint
from dist_ckpt.service._job import Job, Saves, finish_generation, index_aliases, run_job, tidy
from dist_ckpt.slices import TensorSpec
from dist_ckpt.snapshot_index import encode_index
from dist_ckpt.staging import RankValues, Staging
from dist_ckpt.storage import digest_bytes

__all__ = ["Saver", "Subject"]


@dataclass(frozen=True)
class Subject:
    """Whose state is saved: the facts that go into each resume point."""

    run: str
    attempt: int
    nonce: str
    identity: Mapping[str, Any]


@dataclass
class _Ticket:
    """One piece of work for the background thread and the events that tell how far it is."""

    work: Callable[[_Ticket], None]
    committed: threading.Event
    done: threading.Event


class Saver:
    """Stages saves and hands them to one background thread.

    Args:
        saves: The frame of every job.
        staging: The arena.
        captured: The live objects.
        subject: Facts for the resume points.
        parent: ``{"step", "id", "content"}`` of the resume point that this attempt started from.
    """

    def __init__(
        self,
        saves: Saves,
        staging: Staging,
        captured: Captured,
        subject: Subject,
        parent: Mapping[str, Any] | None,
    ) -> None:
        self._saves = saves
        self._comm: Comm = saves.comm
        self._staging = staging
        self._captured = captured
        self._subject = subject
        self._parent = parent
        self._counter = 0
        self._specs: list[TensorSpec] | None = None
        self._layout: Layout | None = None
        self._index = b""
        self._current: _Ticket | None = None
        self._failure: DistCkptError | None = None
        self._lock = threading.Lock()
        self._committed_step = parent["step"] if parent else None
        self._queue: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="dist_ckpt-saver", daemon=True)
        self._thread.start()

    # Training thread

    def take_failure(self) -> DistCkptError | None:
        """Return why the last save failed, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def predict(self) -> None:
        """Have the arena ready before training where its size can be told; collective."""
        specs = self._captured.predicted_tensors()
        known = self._comm.agree([specs is None])[0] == 0
        if known and specs is not None:
            layout = plan_layout(self._all_ranks(list(specs)))
            self._staging.adopt(layout.ranks[self._comm.rank])

    def settle(self) -> bool:
        """At a boundary: return whether the last save's copy stands (always, without overlap)."""
        return self._staging.settle()

    def save(
        self,
        step: int,
        reasons: tuple[str, ...],
        *,
        deadline: float | None = None,
        may_overlap: bool = False,
    ) -> None:
        """Copy this boundary's instant and have it written; returns when it is copied.

        Collective: the layout is agreed on when it changed on any rank. Waits for the save before
            to be committed.

        Raises:
            JobError: The save before is stuck.
        """
        self.wait_committed()
        started = time.monotonic()
        self._counter += 1
        save_id = self._save_id(step)
        staged, fault = None, None
        try:
            tensors = self._captured.tensors()
            specs = [item.spec for item in tensors]
        except Exception as error:  # noqa: BLE001 - told to every rank through the job
            specs, fault = [], f"capture: {error}"
        self._plan(specs)
        layout = self._layout
        if layout is not None and fault is None:
            values = RankValues(
                encode=self._captured.rank_values,
                shared=self._captured.shared_values(),
                rank=self._comm.rank,
                step=step,
                id=save_id,
            )
            try:
                staged = self._staging.stage(layout, tensors, values, may_overlap=may_overlap)
            except Exception as error:  # noqa: BLE001 - told to every rank through the job
                fault = f"staging: {error}"
        job = Job(
            step=step,
            id=save_id,
            reasons=reasons,
            staged=staged,
            layout=layout,
            fault=fault,
            index=self._index,
            deadline=deadline,
            point=self._point_maker(step, save_id, reasons, layout),
            blocked_secs=time.monotonic() - started,
        )
        self._submit(lambda ticket: self._run(job, ticket))

    def tidy_start(self, step: int, *, unverified: Sequence[int]) -> None:
        """Have the background thread do what earlier attempts left to do.

        Args:
            step: The resume point's, whose .bin is made if it lacks one.
            unverified: Steps of generations that were never read back, the same on every rank.
        """

        def work(ticket: _Ticket) -> None:
            ticket.committed.set()
            for other in unverified:
                save_id = f"{self._subject.nonce} {other}"
                whole = finish_generation(self._saves, other, save_id, answered_signal=True)
                if other == step and not whole:
                    self._committed_step = None  # set aside: this step has to be saved again
            if self._comm.rank == 0 and step not in unverified:
                tidy(self._saves, step, answered_signal=True)

        self._submit(work)

    def wait_committed(self) -> int | None:
        """Return the step of the newest generation, once no save is on its way to its commit.

        None where this attempt neither committed one nor resumed from one.

        Raises:
            JobError: It took longer than two time limits; the disk or a rank is stuck.
        """
        self._wait(lambda ticket: ticket.committed)
        return self._committed_step

    def wait_done(self) -> None:
        """Return once the background thread has nothing left to do; the same errors."""
        self._wait(lambda ticket: ticket.done)

    def close(self) -> None:
        """End the thread; waits for the work in flight, within limits."""
        try:
            self.wait_done()
        finally:
            self._queue.put(None)
        self._thread.join(self._saves.timeout_secs)
        self._staging.close()

    def _wait(self, which: Callable[[_Ticket], threading.Event]) -> None:
        ticket = self._current
        limit = 2 * self._saves.timeout_secs
        if ticket is None:
            return
        event = which(ticket)
        # Short waits, so that Python's signal handlers get their turn on this thread.
        ends = time.monotonic() + limit
        while not event.wait(0.5):
            if time.monotonic() > ends:
                raise JobError(
                    f"The save in flight has not ended within {limit:g} s.",
                    next_step="Look at the disk and the other ranks; if slow, raise timeout_secs.",
                    phase="save",
                )

    def _submit(self, work: Callable[[_Ticket], None]) -> None:
        ticket = _Ticket(work, threading.Event(), threading.Event())
        self._current = ticket
        self._queue.put(ticket)

    def _save_id(self, step: int) -> str:
        # The same on every rank without asking: the nonce is rank 0's, the counter counts saves.
        text = f"{self._subject.nonce} {self._counter} {step}".encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def _all_ranks(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        if self._comm.world_size == 1:
            return [specs]
        return [decode_specs(data) for data in self._comm.gather(encode_specs(specs))]

    def _plan(self, specs: list[TensorSpec]) -> None:
        """Have the layout of these specs; planned anew when they changed on any rank."""
        changed = specs != self._specs
        if self._comm.world_size > 1:
            changed = bool(self._comm.agree([changed])[0])
        if changed:
            self._specs = specs
            self._layout = plan_layout(self._all_ranks(specs))
            aliases = index_aliases(self._captured.aliases())
            present = {tensor.key for tensor in self._layout.tensors}
            self._index = encode_index(
                self._layout.tensors, {a: k for a, k in aliases.items() if k in present}
            )

    def _point_maker(
        self, step: int, save_id: str, reasons: tuple[str, ...], layout: Layout | None
    ) -> Callable[[Mapping[str, Any], Mapping[str, Any]], ResumePoint]:
        parent = self._parent
        shared = self._captured.shared_values()
        canonical = layout.canonical if layout else Canonical((), 0, is_shard=False)

        def make(files: Mapping[str, Any], notes: Mapping[str, Any]) -> ResumePoint:
            parent_content = parent.get("content") if parent else None
            return ResumePoint(
                run=self._subject.run,
                step=step,
                id=save_id,
                parent={"step": parent["step"], "id": parent["id"]} if parent else None,
                attempt=self._subject.attempt,
                time=time.time(),
                reasons=reasons,
                world_size=self._comm.world_size,
                files=files,
                index={"size_bytes": len(self._index), "digest": digest_bytes(self._index)},
                canonical=canonical,
                identity=self._subject.identity,
                shared=shared,
                notes={**notes, "parent_content": parent_content},
            )

        return make

    # Background thread

    def _serve(self) -> None:
        while (ticket := self._queue.get()) is not None:
            try:
                ticket.work(ticket)
            except DistCkptError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - a thread's exception would be lost
                self._fail(
                    SaveFailedError(
                        f"The background thread failed: {error!r}",
                        next_step="Earlier generations are untouched. Please report this.",
                    )
                )
            finally:
                ticket.committed.set()
                ticket.done.set()

    def _run(self, job: Job, ticket: _Ticket) -> None:
        before = (self._committed_step, self._parent)
        outcome = run_job(self._saves, job)
        self._committed_step = job.step
        self._parent = {"step": job.step, "id": job.id, "content": outcome.content}
        self.take_failure()  # that of an earlier save: this one stands in its place
        ticket.committed.set()
        if outcome.finish:
            signals = any(reason.startswith("SIG") for reason in job.reasons)
            if not finish_generation(self._saves, job.step, job.id, answered_signal=signals):
                self._committed_step, self._parent = before
                raise SaveFailedError(
                    f"Step {job.step} was saved, but didn't read back whole.",
                    next_step="It was set aside in archive/; look at the disk. Earlier generations "
                    "are untouched.",
                    step=job.step,
                )

    def _fail(self, error: DistCkptError) -> None:
        with self._lock:
            self._failure = error
        self._saves.journal("save_failed", step=error.values.get("step"), error=str(error))
        self._saves.warn(str(error))
