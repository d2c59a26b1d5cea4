"""``Checkpointer``: what a training script holds. Layer 6."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dist_ckpt.capture import Captured
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import Retention
from dist_ckpt.resume import Resumed
from dist_ckpt.service._arguments import absolute, names_in_order
from dist_ckpt.service._opening import open_session
from dist_ckpt.service._policy import KeptPolicy
from dist_ckpt.service._session import Session
from dist_ckpt.service._settings import DiskLow, Export, Reduce, Resume, Settings, SigUsr1
from dist_ckpt.service._trainer import Trainer

__all__ = ["RUN_DIR_VARIABLE", "Checkpointer"]

_Path = str | os.PathLike[str]
RUN_DIR_VARIABLE = "DIST_CKPT_RUN_DIR"


class Checkpointer:
    """A run that can be stopped at any instant and goes on bit-equal.

    Used as a context manager around the training loop; entering it resumes from the newest usable
    generation. On every rank of the job, main thread, same arguments. See docs/ for the whole
    contract.

    Args:
        run_dir: The run directory; its last component is the run's name.
        model: A module, or a dict of named ones.
        optimizer: A torch optimizer over the model's parameters, or a dict of named ones.
        scheduler: A learning rate scheduler, or a dict of named ones.
        scaler: A ``torch.amp.GradScaler``.
        data: An iterator with ``state_dict()`` and ``load_state_dict()``, such as
            ``ResumableLoader``.
        policy: The user's policy, with the same two methods; see `dist_ckpt.policy` for what else
            it may have.
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
        disk_low: After a save found no room: ``"stop"`` the run, ``"wait"`` for room, None: go on.
        signals: Which signals are handled.
        stop_exit_code: Exit status after a stop by signal; 75 where a scheduler requeues on
            non-zero.
        reduce: Log rank 0's loss, or the ``"mean"`` of all ranks'.
        order: Names of all ranks' parameters in the order of ``step_N.bin``, or the whole model
            that has them in it (on the meta device, say). Pipeline stages need it: without, they
            have no .bin. None: the model's own order.
        sign_with: File of the private key (Ed25519, PEM) that signs each resume point; rank 0 reads
            it.
        require_signature: Resume nothing but what this key, or one of these public keys (files),
            has signed: True, a file, or several.

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
        disk_low: DiskLow | None = None,
        signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        stop_exit_code: int = 0,
        reduce: Reduce = "rank0",
        order: Sequence[str] | torch.nn.Module | None = None,
        sign_with: _Path | None = None,
        require_signature: bool | _Path | Sequence[_Path] = False,
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
            disk_low=disk_low,
            signals=signals,
            stop_exit_code=stop_exit_code,
            reduce=reduce,
            accept=accept,
            strict=strict,
            config=config,
            config_ignore=config_ignore,
            data_id=data_id,
            order=names_in_order(order),
            sign_with=sign_with,
            require_signature=require_signature,
        )
        generators = dict(generators or {})
        kept = KeptPolicy(policy)
        captured = Captured(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            data=data,
            policy=kept.holder,
            extra=extra,
            generators=generators,
        )
        self._trainer = Trainer(
            run_dir=absolute(os.environ.get(RUN_DIR_VARIABLE) or run_dir),
            captured=captured,
            settings=self._settings,
            optimizers=list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer],
            data=data,
            policy=kept,
            generators=generators,
            given=(model, optimizer, scheduler, scaler, data, policy, extra, generators),
        )
        self._session: Session | None = None
        self._is_open = False
        self._pid = os.getpid()
        self._body: int | None = None
        self._left_at: int | None = None

    # What a script asks

    @property
    def run_dir(self) -> Path:
        """Where the run lies."""
        return self._trainer.run_dir

    @property
    def step(self) -> int:
        """Finished updates; in the body of step s it is s - 1."""
        return self._session.step if self._session else 0

    @property
    def resumed(self) -> Resumed | None:
        """The resume point that this attempt started from, None at a fresh start."""
        return self._session.resumed if self._session else None

    @property
    def stopped(self) -> str | None:
        """What ended the run: a signal, ``"stop"``, ``"pivot"``, ``"disk_low"``, or None."""
        return self._session.stopped if self._session else None

    @property
    def due(self) -> bool:
        """In a body: whether this step is a multiple of ``every``, the time for an audit sample."""
        return self._step_of_body("due") % self._settings.every == 0

    # Life

    def __enter__(self) -> Self:
        """Resume: everything but random state is restored when this returns. Collective."""
        if self._session is not None:
            raise UsageError(
                "This Checkpointer was used before.", next_step="Build one for each `with`."
            )
        self._session = open_session(self._trainer)
        self._is_open = True
        return self

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
        if os.getpid() != self._pid:
            return  # a forked child that leaves by itself: run, lock and thread are its parent's
        session = self._opened("exit")
        self._is_open = False
        failure = session.close(error)
        # `sys.exit(0)` says that all is well, which is for the saves to say.
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            return
        if failure is not None:
            raise failure
        by_signal = session.stopped is not None and session.stopped.startswith("SIG")
        if by_signal and session.stop_status:
            raise SystemExit(session.stop_status)

    # The loop

    def steps(self, until: int) -> Iterator[int]:
        """Yield the number of each update to make: ``step + 1 … until``.

        When the body comes back, the boundary is handled: signals are agreed on, a checkpoint is
        taken if due. Ends early, after a checkpoint, when a stop was asked for. Reaching ``until``
        always leaves a checkpoint; a body left by ``break`` or an exception takes none. Random
        state is restored when this is first advanced. Collective.

        Raises:
            SaveFailedError: The last save failed.
            JobError: The ranks lost each other.
        """
        session = self._opened("steps")
        self._refuse_after_break()
        if type(until) is not int or until < 0:
            raise UsageError(f"until={until!r} isn't a step number.", next_step="Give a number.")
        session.restore_rng()
        session.note_until(until)
        if session.boundary(is_last=session.step >= until, is_start=True):
            return
        while session.step < until:
            self._body = session.step + 1
            self._left_at = self._body  # until the body comes back
            try:
                yield self._body
            finally:
                body, self._body = self._body, None
            session.step, self._left_at = body, None
            if session.boundary(is_last=session.step == until):
                return

    # What a body may call

    def record(self, loss: Any = None, **metrics: Any) -> None:
        """Log this step's loss and whatever else: numbers or tensors of one element.

        Detached copies are kept. One entry in ``NAME.loss.json``, the rest in
        ``NAME.metrics.jsonl``. Not collective.
        """
        step = self._step_of_body("record")
        self._opened("record").losses.record(step, loss, metrics)

    def sample(self, text: str, *, loss: Any = None) -> None:
        """Log an audit sample of this step; its loss defaults to the recorded one."""
        step = self._step_of_body("sample")
        self._opened("sample").losses.sample(step, text, loss)

    def save(self) -> None:
        """In a body: ask, on any rank, for a checkpoint at this step's boundary.

        Outside a body: take one now and return when it is committed; collective; does nothing if
        this step has one.

        Raises:
            SaveFailedError: Outside a body only: it failed.
        """
        session = self._opened("save")
        if self._body is not None:
            session.ask_save()
        else:
            self._refuse_after_break()
            session.save_now()

    def stop(self) -> None:
        """End the run after this body, with a checkpoint; one rank is enough."""
        self._opened("stop").ask_stop()

    def poll(self) -> bool:
        """Return whether anything is asked for on any rank, so that a long evaluation should end.

        Collective; never saves.
        """
        return self._opened("poll").poll()

    def _opened(self, what: str) -> Session:
        if os.getpid() != self._pid:
            raise UsageError(
                f"This Checkpointer belongs to process {self._pid}, not to its forked child.",
                next_step="Leave a child by os._exit(), or have it end before the loop goes on.",
            )
        if self._session is None or not self._is_open:
            raise UsageError(
                f"{what}() needs an entered Checkpointer.",
                next_step="Use it inside `with dist_ckpt.Checkpointer(…) as ckpt:`.",
            )
        return self._session

    def _refuse_after_break(self) -> None:
        if self._left_at is not None:
            raise UsageError(
                f"The body of step {self._left_at} was left half-way, so nobody knows whether its "
                "update was made.",
                next_step="Call stop() in the body to end with a checkpoint, rather than break.",
                step=self._left_at,
            )

    def _step_of_body(self, what: str) -> int:
        if self._body is None:
            raise UsageError(
                f"{what} belongs in the body of a step.",
                next_step="Use it inside `for step in ckpt.steps(…):`.",
            )
        return self._body
