"""``Checkpointer``: what a training script holds. Layer 6; puts the pieces together and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dist_ckpt import announce
from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm, connect
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import Retention
from dist_ckpt.resume import Resumed
from dist_ckpt.service._attempt import Attempt, open_attempt
from dist_ckpt.service._boundary import Decision, Wishes, decide
from dist_ckpt.service._job import Saves
from dist_ckpt.service._losses import Losses
from dist_ckpt.service._resuming import Start, start_run
from dist_ckpt.service._saver import Saver, Subject
from dist_ckpt.service._settings import Export, Reduce, Resume, Settings, SigUsr1
from dist_ckpt.service._voice import Voice
from dist_ckpt.signals import SignalWatch
from dist_ckpt.staging import CudaStreams, Overlap, Staging

__all__ = ["Checkpointer"]

_RUN_DIR_VARIABLE = "DIST_CKPT_RUN_DIR"


class Checkpointer:
    """A run that can be stopped at any instant and goes on bit-equal.

    Used as a context manager around the training loop; entering it resumes from the newest usable generation. On
    every rank of the job, main thread, same arguments. See docs/ for the whole contract.

    Args:
        run_dir: The run directory; its last component is the run's name.
        model: A module, or a dict of named ones.
        optimizer: A torch optimizer over the model's parameters, or a dict of named ones.
        scheduler: A learning rate scheduler, or a dict of named ones.
        scaler: A ``torch.amp.GradScaler``.
        data: An iterator with ``state_dict()`` and ``load_state_dict()``, such as ``ResumableLoader``.
        policy: The user's policy, with the same two methods.
        extra: Further objects by name, with the same two methods.
        generators: Random generators that the program owns, by name.
        every: A checkpoint after each multiple of so many steps.
        keep_last: So many newest verified generations stay; None keeps all.
        keep_every: Each multiple of it stays as well.
        keep_bins: ``step_N.bin`` of only so many newest generations stay; None: one with each.
        config: The run's configuration; compared key by key at resume.
        config_ignore: Patterns of keys that may change.
        data_id: Identity of the data; None takes it from the loader.
        accept: Words that accept differences which an ``IdentityError`` has named.
        strict: Refuse changes of code and versions too.
        resume: ``"auto"``, ``"never"``, or a step to go back to.
        export: When ``step_N.bin`` is made: ``"always"``, ``"signal"``, ``"never"``.
        export_copy: Make it a file of its own where a link would do.
        sigusr1: Answer SIGUSR1 ``"now"`` or at the next cadence ``"boundary"``.
        timeout_secs: Limit of every wait between ranks.
        deadline_secs: What a stop may take, from the signal's arrival on any rank.
        reserve_bytes: Free space that a save must leave.
        signals: Which signals are handled.
        stop_exit_code: Exit status after a stop by signal; 75 where a scheduler requeues on non-zero.
        reduce: Log rank 0's loss, or the ``"mean"`` of all ranks'.

    Raises:
        UsageError: A setting that can't be meant, or state that can't be kept; with its name.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        policy: Any = None,
        extra: Mapping[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        every: int = 100,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_bins: int | None = None,
        config: Mapping[str, Any] | None = None,
        config_ignore: Collection[str] = (),
        data_id: str | None = None,
        accept: Collection[str] = (),
        strict: bool = False,
        resume: Resume = "auto",
        export: Export = "always",
        export_copy: bool = False,
        sigusr1: SigUsr1 = "now",
        timeout_secs: float = 600.0,
        deadline_secs: float = 25.0,
        reserve_bytes: int = 0,
        signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        stop_exit_code: int = 0,
        reduce: Reduce = "rank0",
    ) -> None:
        self._settings = Settings(
            every=every,
            retention=Retention(keep_last, keep_every, keep_bins),
            resume=resume,
            export=export,
            export_copy=export_copy,
            sigusr1=sigusr1,
            timeout_secs=timeout_secs,
            deadline_secs=deadline_secs,
            reserve_bytes=reserve_bytes,
            signals=signals,
            stop_exit_code=stop_exit_code,
            reduce=reduce,
            accept=accept,
            strict=strict,
            config=config,
            config_ignore=config_ignore,
            data_id=data_id,
        )
        self._run_dir = Path(os.environ.get(_RUN_DIR_VARIABLE) or run_dir)
        self._data = data
        self._generators = dict(generators or {})
        self._optimizers = (
            list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
        )
        self._captured = Captured(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            data=data,
            policy=policy,
            extra=extra,
            generators=self._generators,
        )
        self._step = 0
        self._body: int | None = None
        self._wants_save = False
        self._wants_stop = False
        self._usr1_pending = 0
        self._rng_is_restored = False
        self._stopped: str | None = None
        self._resumed: Resumed | None = None
        self._open: _Open | None = None

    # What a script asks

    @property
    def step(self) -> int:
        """Finished updates; in the body of step s it is s - 1."""
        return self._step

    @property
    def resumed(self) -> Resumed | None:
        """The resume point that this attempt started from, None at a fresh start."""
        return self._resumed

    @property
    def stopped(self) -> str | None:
        """Name of the signal that ended the run (``"stop"`` after :meth:`stop`), None while it goes on."""
        return self._stopped

    @property
    def due(self) -> bool:
        """In a body: whether this step is a multiple of ``every``, the time for an audit sample."""
        return self._step_of_body("due") % self._settings.every == 0

    @property
    def run_dir(self) -> Path:
        """Where the run lies."""
        return self._run_dir

    # Life

    def __enter__(self) -> Self:
        """Resume: everything but random state is restored when this returns. Collective."""
        if self._open is not None:
            raise UsageError(
                "This Checkpointer is already in use.", next_step="Build one for each `with`."
            )
        comm = connect(self._settings.timeout_secs)
        watch = SignalWatch(self._settings.signals)
        watch.install()
        announce.announce(comm.rank)
        try:
            self._open = self._enter(comm, watch)
        except BaseException:
            announce.withdraw(comm.rank)
            watch.uninstall()
            comm.close()
            raise
        return self

    def _enter(self, comm: Comm, watch: SignalWatch) -> _Open:
        attempt = open_attempt(self._run_dir, comm)
        try:
            voice = Voice(attempt.name, comm.rank)
            start = start_run(
                attempt, comm, self._captured, self._settings, voice, self._data, self._generators
            )
            self._resumed = start.resumed
            self._step = start.resumed.step if start.resumed else 0
            saver = self._build_saver(attempt, comm, start, voice)
        except BaseException as error:
            attempt.history.journal.append("attempt_failed", error=str(error))
            attempt.close()
            raise
        losses = Losses(attempt.history, comm, mean=self._settings.reduce == "mean")
        return _Open(comm, watch, attempt, saver, losses, voice)

    def _build_saver(self, attempt: Attempt, comm: Comm, start: Start, voice: Voice) -> Saver:
        settings = self._settings
        saves = Saves(
            comm=comm,
            store=attempt.store,
            journal=attempt.history.journal.append,
            sync_history=attempt.history.sync,
            check_lock=attempt.check_lock,
            retention=settings.retention,
            export=settings.export,
            export_copy=settings.export_copy,
            reserve_bytes=settings.reserve_bytes,
            timeout_secs=settings.timeout_secs,
            say=voice.say,
            warn=voice.warn,
        )
        overlap = None
        if any(p.is_cuda for p in self._captured.parameters().values()):
            overlap = Overlap(self._optimizers, CudaStreams())
        subject = Subject(attempt.name, attempt.number, attempt.nonce, start.identity)
        saver = Saver(saves, Staging(overlap), self._captured, subject, start.parent)
        saver.predict()
        if start.resumed is not None:
            saver.tidy_start(start.resumed.step, verify=start.unverified)
        return saver

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the save in flight and its verification, then let go of everything.

        Raises:
            DistCkptError: The last save failed (only where no other exception is on its way).
            SystemExit: The run was stopped by a signal and ``stop_exit_code`` isn't 0.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        failure: BaseException | None = None
        # A second Ctrl-C means now: the save in flight is left as temporary files, which the next start removes.
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            try:
                opened.losses.flush()
                opened.saver.close()
                failure = opened.saver.take_failure()
            except Exception as caught:  # noqa: BLE001 - raised below unless another is on its way
                failure = caught
        how = "stopped" if self._stopped else "ended" if error is None else "failed"
        opened.close(
            how, step=self._step, reason=self._stopped, error=error or failure, stopped=self._stopped
        )
        if error is None and failure is not None:
            raise failure
        by_signal = self._stopped is not None and self._stopped.startswith("SIG")
        if error is None and by_signal and self._settings.stop_exit_code:
            raise SystemExit(self._settings.stop_exit_code)

    # The loop

    def steps(self, until: int) -> Iterator[int]:
        """Yield the number of each update to make: ``step + 1 … until``.

        When the body comes back, the boundary is handled: signals are agreed on, a checkpoint is taken if due. Ends
        early, after a checkpoint, when a stop was asked for. Reaching ``until`` always leaves a checkpoint; a body left
        by ``break`` or an exception takes none. Random state is restored when this is first advanced. Collective.

        Raises:
            SaveFailedError: The last save failed.
            JobError: The ranks lost each other.
        """
        opened = self._opened("steps")
        if type(until) is not int or until < 0:
            raise UsageError(f"until={until!r} isn't a step number.", next_step="Give a number.")
        if not self._rng_is_restored:
            self._rng_is_restored = True
            if self._resumed is not None:
                self._resumed.restore_rng()
        if self._boundary(opened, is_last=self._step >= until, is_start=True):
            return
        while self._step < until:
            self._body = self._step + 1
            yield self._body
            self._step, self._body = self._body, None
            if self._boundary(opened, is_last=self._step == until):
                return

    def _boundary(self, opened: _Open, *, is_last: bool, is_start: bool = False) -> bool:
        """Agree and act; return whether the run ends here."""
        settings, saver = self._settings, opened.saver
        self._report_failure(opened)
        agreed = self._agree(opened)
        decision = decide(
            agreed,
            step=self._step,
            every=settings.every,
            is_last=is_last,
            usr1_waits=settings.sigusr1 == "boundary",
            is_start=is_start,
        )
        opened.losses.flush(before=None if decision.reasons else self._step)
        if decision.reasons:
            self._checkpoint(opened, decision, agreed)
        if not decision.stops:
            return False
        if agreed.stop_signal:
            self._stopped = signal.Signals(agreed.stop_signal).name
        elif agreed.stop:
            self._stopped = "stop"
        saver.wait_done()
        if (failure := saver.take_failure()) is not None:
            raise failure
        if self._stopped:
            opened.voice.say(f"stopped at step {self._step} by {self._stopped}")
        return True

    def _agree(self, opened: _Open) -> Wishes:
        watch = opened.watch
        self._usr1_pending += watch.take_usr1()
        age_ms = 0
        if watch.stop_time is not None:
            age_ms = int((time.monotonic() - watch.stop_time) * 1000)
        mine = Wishes(
            stop_signal=watch.stop_signal,
            stop_age_ms=age_ms,
            usr1=self._usr1_pending,
            save=int(self._wants_save),
            stop=int(self._wants_stop),
            redo=int(not opened.saver.settle()),
        )
        return Wishes.decode(opened.comm.agree(mine.encode(), phase=f"boundary of step {self._step}"))

    def _checkpoint(self, opened: _Open, decision: Decision, agreed: Wishes) -> None:
        saver, journal = opened.saver, opened.attempt.history.journal
        if decision.answers_usr1:
            self._usr1_pending = 0
        self._wants_save = False
        asked = [reason for reason in decision.reasons if reason.startswith("SIG")]
        if asked:
            journal.append("signal", step=self._step, signals=asked, count=agreed.usr1)
        deadline = None
        if decision.stops and agreed.stop_signal:
            left = self._settings.deadline_secs - agreed.stop_age_ms / 1000
            deadline = time.monotonic() + left
        if saver.committed_step == self._step:
            # Bit for bit what is there already, since nothing ran since; reasons merge in the journal.
            journal.append("already_saved", step=self._step, reasons=list(decision.reasons))
        else:
            saver.save(
                self._step,
                decision.reasons,
                deadline=deadline,
                may_overlap=not (decision.stops or agreed.redo),
            )

    def _report_failure(self, opened: _Open) -> None:
        # The background thread has said and journalled it already; taking it keeps the exit status
        # about the last save alone.
        opened.saver.take_failure()

    # What a body may call

    def record(self, loss: Any = None, **metrics: Any) -> None:
        """Log this step's loss and whatever else; numbers or tensors of one element, detached copies are kept.

        One entry in ``NAME.loss.json``, the rest in ``NAME.metrics.jsonl``. Not collective.
        """
        step = self._step_of_body("record")
        self._opened("record").losses.record(step, loss, metrics)

    def sample(self, text: str, *, loss: Any = None) -> None:
        """Log an audit sample of this step in ``NAME.samples.json``; the loss defaults to the recorded one."""
        step = self._step_of_body("sample")
        self._opened("sample").losses.sample(step, text, loss)

    def save(self) -> None:
        """In a body: ask, on any rank, for a checkpoint at this step's boundary.

        Outside a body: take one now and return when it is committed; collective; does nothing if this step has one.

        Raises:
            SaveFailedError: Outside a body only: it failed.
        """
        opened = self._opened("save")
        if self._body is not None:
            self._wants_save = True
            return
        if opened.saver.committed_step == self._step:
            return
        opened.losses.flush()
        opened.saver.save(self._step, ("save",), may_overlap=False)
        opened.saver.wait_committed()
        if (failure := opened.saver.take_failure()) is not None:
            raise failure

    def stop(self) -> None:
        """End the run after this body, with a checkpoint; one rank is enough."""
        self._opened("stop")
        self._wants_stop = True

    def poll(self) -> bool:
        """Return whether anything is asked for, so that a long evaluation should come to its end. Collective; never saves."""
        opened = self._opened("poll")
        self._usr1_pending += opened.watch.take_usr1()
        mine = Wishes(
            stop_signal=opened.watch.stop_signal,
            usr1=self._usr1_pending,
            save=int(self._wants_save),
            stop=int(self._wants_stop),
        )
        return Wishes.decode(opened.comm.agree(mine.encode(), phase="poll")).any

    def _opened(self, what: str) -> _Open:
        if self._open is None:
            raise UsageError(
                f"{what}() needs an entered Checkpointer.",
                next_step="Use it inside `with dist_ckpt.Checkpointer(…) as ckpt:`.",
            )
        return self._open

    def _step_of_body(self, what: str) -> int:
        if self._body is None:
            raise UsageError(
                f"{what} belongs in the body of a step.",
                next_step="Use it inside `for step in ckpt.steps(…):`.",
            )
        return self._body


class _Open:
    """What exists only between entering and leaving."""

    def __init__(
        self,
        comm: Comm,
        watch: SignalWatch,
        attempt: Attempt,
        saver: Saver,
        losses: Losses,
        voice: Voice,
    ) -> None:
        self.comm = comm
        self.watch = watch
        self.attempt = attempt
        self.saver = saver
        self.losses = losses
        self.voice = voice

    def close(
        self, how: str, *, step: int, reason: str | None, error: BaseException | None, stopped: str | None
    ) -> None:
        """Let go of everything, whatever happens on the way."""
        try:
            self.attempt.history.journal.append(
                f"attempt_{how}", step=step, reason=reason, error=str(error) if error else None
            )
        finally:
            try:
                self.attempt.close()
            finally:
                announce.withdraw(self.comm.rank, stopped=stopped is not None)
                self.watch.uninstall()
                self.comm.close()
