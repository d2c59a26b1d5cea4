"""Takes one instant at a boundary and has a background thread make a generation of it. Layer 6.

The training thread copies and goes on. The next save waits for the commit of the one before, never
for its verification, and nothing ever queues up: at most one save is being written and one
verification pending.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt.capture import Captured
from dist_ckpt.errors import DistCkptError, MismatchError, SaveFailedError
from dist_ckpt.layout import Layout
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._finish import catch_up, export_verified, finish_generation, retire
from dist_ckpt.service._job import Job, Saves, run_job
from dist_ckpt.service._plans import Plan, Planner
from dist_ckpt.service._policy import KeptPolicy
from dist_ckpt.service._told import Told, during
from dist_ckpt.service._worker import Ticket, Worker
from dist_ckpt.slices import TensorSpec
from dist_ckpt.staging import RankValues, Staging, Writable
from dist_ckpt.storage import digest_bytes

__all__ = ["Saver", "Subject"]


@dataclass(frozen=True)
class Subject:
    """Whose state is saved: the facts that go into each resume point."""

    run: str
    attempt: int
    nonce: str
    identity: Mapping[str, Any]
    policy: KeptPolicy


class Saver:
    """Stages saves and hands them to one background thread.

    Args:
        saves: The frame of every job.
        staging: The arena.
        captured: The live objects.
        subject: Facts for the resume points.
        parent: ``{"step", "id", "content"}`` of the resume point that this attempt started from.
        idle: Called now and then on the background thread while there is nothing to save.
    """

    def __init__(
        self,
        saves: Saves,
        staging: Staging,
        captured: Captured,
        subject: Subject,
        parent: Mapping[str, Any] | None,
        *,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self._saves = saves
        self._staging = staging
        self._captured = captured
        self._subject = subject
        self._parent = parent
        self._committed_step = parent["step"] if parent else None
        #: What the last save needed and the disk didn't have; any thread may read it.
        self.low_bytes = 0
        self._counter = 0
        #: The step at which training began, until the first save has looked what changed since.
        self._began_at: int | None = None
        self._refusals: set[str | None] = {None}  # that were told
        self._planner = Planner(captured, saves.comm, saves.settings.order)
        limit_secs = 2 * saves.settings.timeout_secs
        self._worker = Worker(self._report, limit_secs, lambda: saves.where.text, idle)
        self.take_failure = self._worker.take_failure

    # Training thread

    def predict(self) -> None:
        """Have the arena ready before training where its size can be told; collective."""
        layout = self._planner.predict((self._committed_step or 0) + 1)
        if layout is not None:
            self._tell_refused(layout)
            self._staging.adopt(layout.ranks[self._saves.comm.rank])

    def begin(self, step: int) -> None:
        """Training begins, after whatever is restored; once.

        Every rank looks at its model, though rank 0 alone will speak of what changes: a look
        reshards FSDP2's modules, and where one rank's are whole the others would wait for it.
        """
        self._began_at = step
        self._captured.begin()

    def _warn_of_drift(self, step: int) -> None:
        """Say at the first save what a resume won't bring back; the journal keeps it."""
        if self._began_at is None or step <= self._began_at:
            return
        self._began_at = None
        found = self._captured.drifted()
        for text in found if self._saves.comm.rank == 0 else ():
            self._saves.warn(text)
            self._saves.journal("note", step=step, sync=False, text=text)

    def _tell_refused(self, layout: Layout) -> None:
        """Say why there is no canonical file, once."""
        refused = layout.canonical.refused
        if refused not in self._refusals and self._saves.settings.export != "never":
            self._saves.say(f"makes no step_N.bin: {refused}")
        self._refusals.add(refused)

    @property
    def committed_step(self) -> int | None:
        """The step of the newest generation as this rank knows it. Any thread."""
        return self._committed_step

    def forget_committed(self) -> None:
        """The newest generation is gone from the disk: its step has to be saved again. Rank 0."""
        self._committed_step = None

    def export_for_signal(self, step: int) -> None:
        """Have ``step_N.bin`` of a generation that now answers a signal too."""
        if self._saves.comm.rank == 0:
            self._saves.answered.add(step)
            self._worker.submit(lambda _ticket: self._export_answer(step))

    def _export_answer(self, step: int) -> None:
        with contextlib.suppress(DistCkptError):  # the next save tells of a journal that can't be
            self._saves.sync_history()
        export_verified(self._saves, step)

    def make_room(self) -> None:
        """Retire what retention lets go already; while nothing is being saved."""
        if self._saves.comm.rank == 0:
            retire(self._saves)

    def settle(self) -> bool:
        """At a boundary: return whether the last save's copy stands (always, without overlap)."""
        return self._staging.settle()

    def wait_committed(self) -> int | None:
        """Return the step of the newest generation, once no save is on its way to its commit.

        As rank 0 knows it: another rank may not have learned the outcome. None where this attempt
        neither committed one nor resumed from one. Collective.

        Raises:
            JobError: It took longer than two time limits; the disk or a rank is stuck.
        """
        self._staging.finish()
        self._worker.wait_committed()
        mine = -1
        if self._saves.comm.rank == 0 and self._committed_step is not None:
            mine = self._committed_step
        step = self._saves.comm.agree([mine], phase="waiting for the save before")[0]
        return None if step < 0 else step

    def wait_done(self, deadline: float | None = None) -> None:
        """Return once the background thread has nothing left to do.

        Args:
            deadline: time.monotonic() from which on reading back and export are left for the next
                start; a commit never is.

        Raises:
            JobError: It took longer than two time limits.
        """
        self._staging.finish()
        if deadline is not None and not self._worker.is_done_by(deadline):
            self._saves.hurry.set()
        self._worker.wait_done()

    def save(
        self,
        step: int,
        reasons: tuple[str, ...],
        *,
        deadline: float | None = None,
        may_overlap: bool = False,
    ) -> None:
        """Copy this boundary's instant and have it written; returns when it is copied.

        Collective: the layout is agreed on. Waits for the commit of the save before.

        Raises:
            JobError: The save before is stuck.
        """
        if deadline is not None:
            self._saves.hurry.set()  # what the save before still has to be done gives way
            self._worker.wait_done()
            self._saves.hurry.clear()
        self._worker.wait_committed()
        started = time.monotonic()
        self._counter += 1
        save_id = self._save_id(step)
        specs: list[TensorSpec] | None = None
        staged: Writable | None = None
        plan: Plan | None = None
        fault: Told | None = None
        shared, policy = None, None
        try:
            tensors = self._captured.tensors()
            shared = self._captured.shared_values()
            specs = [item.spec for item in tensors]
            policy = self._subject.policy.sidecar() if self._saves.comm.rank == 0 else None
            self._warn_of_drift(step)
        except Exception as error:  # noqa: BLE001 - told to every rank through the job
            fault = during("capture", error)
        try:
            plan = self._planner.plan(specs, shared, step=step, phase=f"capture of step {step}")
        except MismatchError as error:
            fault = during("planning", error)
        if plan is not None:
            self._tell_refused(plan.layout)
            values = RankValues(
                encode=self._captured.rank_values,
                shared=shared,
                rank=self._saves.comm.rank,
                step=step,
                id=save_id,
            )
            try:
                staged = self._staging.stage(plan.layout, tensors, values, may_overlap=may_overlap)
            except Exception as error:  # noqa: BLE001 - told to every rank through the job
                fault = during("staging", error)
        job = Job(
            step=step,
            id=save_id,
            reasons=reasons,
            staged=staged,
            layout=plan.layout if plan is not None else None,
            fault=fault,
            index=plan.index if plan is not None else b"",
            deadline=deadline,
            point=self._point_maker(step, save_id, reasons, plan, shared),
            blocked_secs=time.monotonic() - started,
            policy=policy,
        )
        self._worker.submit(lambda ticket: self._run(job, ticket))
        if staged is not None and staged.blocks:
            self._worker.wait_committed()

    def tidy_start(self, step: int, *, unverified: Sequence[int]) -> None:
        """Have the background thread do what earlier attempts left to do.

        Args:
            step: The resume point's, which has to be saved again if it turns out faulty.
            unverified: Steps of generations that were never read back, the same on every rank.
        """

        def work(ticket: Ticket) -> None:
            ticket.committed.set()
            for other in unverified:
                save_id = f"{self._subject.nonce} {other}"
                if finish_generation(self._saves, other, save_id) == "faulty" and other == step:
                    self._committed_step = None  # set aside: this step has to be saved again
                    raise _not_whole(step)
            if self._saves.comm.rank == 0:
                catch_up(self._saves)

        self._worker.submit(work)

    def close(self, *, hurry: bool = False) -> None:
        """End the thread and give the arena back; waits for the work in flight, within limits.

        Args:
            hurry: Reading back, export and retirement are left for the next start.
        """
        if hurry:
            self._saves.hurry.set()
        self._staging.finish()
        self._worker.close()
        self._staging.close()

    def _save_id(self, step: int) -> str:
        # The same on every rank without asking: the nonce is rank 0's, the counter counts saves.
        text = f"{self._subject.nonce} {self._counter} {step}".encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def _point_maker(
        self, step: int, save_id: str, reasons: tuple[str, ...], plan: Plan | None, shared: Any
    ) -> Callable[[Mapping[str, Any], Mapping[str, Any]], ResumePoint]:
        parent = self._parent
        history = self._saves.mark_history(step)

        def make(files: Mapping[str, Any], notes: Mapping[str, Any]) -> ResumePoint:
            if plan is None:
                raise RuntimeError("a job without a plan comes to no resume point")
            parent_content = parent.get("content") if parent else None
            more = {
                "history": history,
                "parallelism": plan.parallelism,
                "nonce": self._subject.nonce,
                **self._subject.policy.notes(),
            }
            return ResumePoint(
                run=self._subject.run,
                step=step,
                id=save_id,
                parent={"step": parent["step"], "id": parent["id"]} if parent else None,
                attempt=self._subject.attempt,
                time=time.time(),
                reasons=reasons,
                world_size=self._saves.comm.world_size,
                files=files,
                index={"size_bytes": len(plan.index), "digest": digest_bytes(plan.index)},
                canonical=plan.layout.canonical,
                identity=self._subject.identity,
                shared=plan.shared(shared),
                notes={**notes, "parent_content": parent_content, **more},
            )

        return make

    # Background thread

    def _run(self, job: Job, ticket: Ticket) -> None:
        before = (self._committed_step, self._parent)
        try:
            outcome = run_job(self._saves, job)
        except DistCkptError as error:
            error.values.setdefault("step", job.step)
            raise
        self.low_bytes = 0
        self._committed_step = job.step
        self._parent = {"step": job.step, "id": job.id, "content": outcome.content}
        self._saves.committed(job.step)
        self.take_failure()  # an earlier save's: this one stands in its place
        ticket.committed.set()
        if not outcome.finish:
            return
        try:
            finished = finish_generation(self._saves, job.step, job.id)
        except DistCkptError as error:
            error.values.setdefault("step", job.step)
            raise
        if finished == "faulty":
            self._committed_step, self._parent = before
            raise _not_whole(job.step)

    def _report(self, error: DistCkptError) -> None:
        self.low_bytes = int(error.values.get("low_bytes", 0))
        self._saves.journal("save_failed", step=error.values.get("step"), error=str(error))
        self._saves.warn(str(error))


def _not_whole(step: int) -> SaveFailedError:
    return SaveFailedError(
        f"Step {step} was saved, but didn't read back whole.",
        next_step="It is in archive/ now; look at the disk. Earlier generations are untouched.",
        step=step,
    )
