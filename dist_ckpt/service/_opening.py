"""From the user's arguments to a run under way: connected, locked, restored. Layer 6."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dist_ckpt import announce
from dist_ckpt.comm import Comm, connect
from dist_ckpt.errors import DistCkptError
from dist_ckpt.history import OwnPoints
from dist_ckpt.service._attempt import Attempt, open_attempt
from dist_ckpt.service._deadline import warn_of_tight_deadline
from dist_ckpt.service._importing import save_import
from dist_ckpt.service._job import Saves
from dist_ckpt.service._keeper import Keeper
from dist_ckpt.service._losses import Losses
from dist_ckpt.service._notices import Notices
from dist_ckpt.service._provenance import Provenance, open_provenance
from dist_ckpt.service._resuming import Start, start_run
from dist_ckpt.service._saver import Saver, Subject
from dist_ckpt.service._session import Session
from dist_ckpt.service._sums import likely_cause
from dist_ckpt.service._trainer import Trainer
from dist_ckpt.service._voice import Voice
from dist_ckpt.service._witness import call_witness
from dist_ckpt.signals import SignalWatch
from dist_ckpt.staging import CudaStreams, Overlap, Staging

__all__ = ["open_session"]


def open_session(trainer: Trainer) -> Session:
    """Return a run that is locked, cleaned and restored, but for random state. Collective."""
    watch = SignalWatch(trainer.settings.signals)
    comm = connect(trainer.settings.timeout_secs)
    try:
        watch.install()
        announce.announce(comm.rank)
        return _open(trainer, comm, watch)
    except BaseException:
        announce.withdraw(comm.rank)
        watch.uninstall()
        comm.close()
        raise


def _open(trainer: Trainer, comm: Comm, watch: SignalWatch) -> Session:
    notices = Notices()
    notices.starting()
    retention = trainer.settings.retention.to_json()
    attempt = open_attempt(trainer.run_dir, comm, settings={"retention": retention})
    voice = Voice(attempt.name, comm.rank)
    attempt.warn = voice.warn
    with _undone_by_errors(attempt) as undo:
        provenance = open_provenance(trainer.settings, comm)
        attempt.store.trusted = provenance.trusted
        start = start_run(
            attempt,
            comm,
            trainer.captured,
            trainer.settings,
            voice=voice,
            data=trainer.data,
            policy=trainer.policy,
            generators=trainer.generators,
        )
        mean = trainer.settings.reduce == "mean"
        losses = Losses(attempt.history, comm, voice.warn, mean=mean)
        # Asked when a replayed loss differs: a script may rehearse until its loop begins.
        attempt.history.explain_by(lambda: likely_cause(trainer.given[0], comm.world_size))
        keeper = Keeper(attempt, voice.warn) if comm.rank == 0 else None
        saver = _build_saver(
            trainer,
            attempt,
            comm,
            start,
            losses=losses,
            voice=voice,
            keeper=keeper,
            notices=notices,
            provenance=provenance,
        )
        undo.callback(_give_up, saver)
        if keeper is not None:
            keeper.newest = lambda: saver.committed_step
        saver.predict()
        resumed = start.resumed
        if resumed is not None:
            saver.tidy_start(resumed.step, unverified=start.unverified)
        if start.imported is not None:
            resumed = save_import(saver, attempt, start.imported)
        witness = call_witness(trainer, comm, resumed)
        if witness is not None:
            undo.callback(witness.close)
        if comm.rank == 0:
            warn_of_tight_deadline(attempt, trainer.settings.stop_secs, voice.warn)
    notices.ready(resumed.step if resumed else None)
    return Session(
        settings=trainer.settings,
        comm=comm,
        watch=watch,
        attempt=attempt,
        saver=saver,
        losses=losses,
        voice=voice,
        resumed=resumed,
        keeper=keeper,
        witness=witness,
        notices=notices,
    )


@contextlib.contextmanager
def _undone_by_errors(attempt: Attempt) -> Iterator[contextlib.ExitStack]:
    """Give what to undo should the opening fail; then the attempt has failed, and is closed."""
    with contextlib.ExitStack() as undo:
        undo.callback(attempt.close)
        with contextlib.ExitStack() as parts:
            try:
                yield parts
            except BaseException as error:
                parts.callback(attempt.journal, "attempt_failed", error=str(error))
                raise
            parts.pop_all()
        undo.pop_all()


def _give_up(saver: Saver) -> None:
    """End the thread; what it has not begun is left for the next start."""
    with contextlib.suppress(DistCkptError):  # the first error is the one to tell
        saver.close(hurry=True)


def _build_saver(
    trainer: Trainer,
    attempt: Attempt,
    comm: Comm,
    start: Start,
    *,
    losses: Losses,
    voice: Voice,
    keeper: Keeper | None,
    notices: Notices,
    provenance: Provenance,
) -> Saver:
    saves = Saves(
        comm=comm,
        store=attempt.store,
        journal=attempt.journal,
        mark_history=attempt.history.mark,
        sync_history=losses.sync,
        keep_policy=attempt.keep_policy,
        check_lock=attempt.check_lock,
        settings=trainer.settings,
        provenance=provenance,
        own=OwnPoints(attempt.store.run_dir),
        say=voice.say,
        warn=voice.warn,
        committed=notices.committed,
    )
    overlap = None
    on_device = any(p.is_cuda for p in trainer.captured.parameters().values())
    if on_device and trainer.captured.only_steps_change_weights():
        overlap = Overlap(trainer.optimizers, CudaStreams())
    subject = Subject(attempt.name, attempt.number, attempt.nonce, start.identity, trainer.policy)
    return Saver(
        saves,
        Staging(overlap, warn=voice.warn),
        trainer.captured,
        subject,
        start.parent,
        idle=keeper.look if keeper is not None else None,
    )
