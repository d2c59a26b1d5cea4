"""A run under way: what exists between entering a Checkpointer and leaving it. Layer 6."""

from __future__ import annotations

import signal
from dataclasses import replace

from dist_ckpt import announce
from dist_ckpt.comm import Comm
from dist_ckpt.errors import LockedError
from dist_ckpt.resume import Resumed
from dist_ckpt.service._asked import Asked
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._boundary import PIVOT, Decision, Wishes, decide
from dist_ckpt.service._deadline import stop_deadline
from dist_ckpt.service._disk_low import heed_low_disk
from dist_ckpt.service._keeper import Keeper
from dist_ckpt.service._last_save import LastSave
from dist_ckpt.service._losses import Losses
from dist_ckpt.service._notices import Notices
from dist_ckpt.service._saver import Saver
from dist_ckpt.service._settings import Settings
from dist_ckpt.service._voice import Voice
from dist_ckpt.service._witness import Witness
from dist_ckpt.signals import SignalWatch

__all__ = ["Session"]


class Session:
    """The boundaries of a run and what the body of a step asks for.

    Attributes:
        step: Finished updates.
        resumed: The resume point that this attempt started from.
        stopped: What ended the run early, None while nothing has.
        stop_status: The exit status after a stop by a signal.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        comm: Comm,
        watch: SignalWatch,
        attempt: Attempt,
        saver: Saver,
        losses: Losses,
        voice: Voice,
        resumed: Resumed | None,
        keeper: Keeper | None = None,
        witness: Witness | None = None,
        notices: Notices | None = None,
    ) -> None:
        self._settings = settings
        self._witness = witness
        self._notices = notices or Notices()
        self._stop_at = settings.stop_at
        self._stop_secs = settings.stop_secs
        self.stop_status = settings.stop_status
        self._lost_a_peer = False
        self._comm = comm
        self._watch = watch
        self._asked = Asked(watch, attempt, voice, every=settings.every, looks=comm.rank == 0)
        self._attempt = attempt
        self._saver = saver
        self._voice = voice
        self._keeper = keeper
        self._stop_word = "stop"
        self._rng_is_due = resumed is not None
        self._has_begun = False
        self._last_save = LastSave(
            comm=comm,
            saver=saver,
            losses=losses,
            store=attempt.store,
            voice=voice,
            keeper=keeper,
            give_up=self._give_up,
            secs=settings.stop_secs,
        )
        self._has_told_of_end = False
        self.losses = losses
        self.resumed = resumed
        self.step = resumed.step if resumed else 0
        self.stopped: str | None = None

    def restore_rng(self) -> None:
        """Put the random state back, once: last of all, after everything that draws."""
        if self._rng_is_due and self.resumed is not None:
            self.resumed.restore_rng()
        self._rng_is_due = False
        if not self._has_begun:
            self._has_begun = True
            self._saver.begin(self.step)
        if self._witness is not None:
            self._witness.start(self.step)

    def note_until(self, until: int) -> None:
        """Journal the step that is trained to: who looks on can then tell how long it takes."""
        self._attempt.journal("loop_started", step=self.step, sync=False, until=until)
        if self.resumed is not None and self.step == self.resumed.step >= until:
            if not self._has_told_of_end:  # once, though a script may ask epoch by epoch
                self._voice.say(f"nothing to train: {self.step} steps are done, until={until}")
            self._has_told_of_end = True

    def boundary(self, *, is_last: bool, is_start: bool = False) -> bool:
        """Agree with all ranks and act; return whether the run ends here. Collective.

        Raises:
            SaveFailedError: The last save failed.
            JobError: The ranks lost each other.
            LockedError: Another job has taken the run directory.
        """
        self._notices.alive()
        if self._witness is not None and not is_start:
            self._witness.step(self.step, self.losses.own(self.step))
        if self._stop_at is not None and self.step >= self._stop_at:
            self.ask_stop()
        is_rescue = self._keep()
        redo = not self._saver.settle()
        agreed = self._agree(f"boundary of step {self.step}", redo=redo, rescue=is_rescue)
        if agreed.taken:
            raise self._asked.taken or _taken_elsewhere()
        agreed = self._heed_disk(agreed)
        decision = decide(
            agreed,
            step=self.step,
            every=self._settings.every,
            is_last=is_last,
            usr1_waits=self._settings.sigusr1 == "boundary",
            is_start=is_start,
        )
        if not is_start:
            self.losses.agree(self.step)
        self.losses.flush(before=None if decision.reasons else self.step)
        deadline = None
        if decision.stops and agreed.stop_signal:
            deadline = stop_deadline(self._stop_secs, agreed.stop_age_ms / 1000)
            # Only then is the process about to end: else the script may have much to do yet.
            self._notices.stopping(self.step)
        if decision.reasons:
            self._checkpoint(decision, agreed, deadline)
        if decision.stops:
            self._finish(agreed, decision, deadline)
        return decision.stops

    def _keep(self) -> bool:
        """Rank 0: make again what of the run directory is gone; return whether a save must too."""
        if self._keeper is None:
            return False
        try:
            is_rescue = self._keeper.mend()
        except LockedError as error:
            self._give_up(error)
            return False
        if is_rescue:
            self._saver.forget_committed()
        return is_rescue

    def _give_up(self, error: LockedError) -> None:
        # From here on not a byte may be written: the files are another job's.
        self._asked.taken = error
        self._attempt.abandon()

    def _heed_disk(self, agreed: Wishes) -> Wishes:
        def agree(missing: int, gives_up: bool) -> Wishes:
            return self._agree("room on the disk", low_bytes=missing, gives_up=gives_up)

        heeded = heed_low_disk(
            agreed,
            agree,
            attempt=self._attempt,
            settings=self._settings,
            step=self.step,
            voice=self._voice,
        )
        if heeded.stop and not agreed.stop:
            self._stop_word = "disk_low"
        return heeded

    def _save_last_again(self, reasons: tuple[str, ...]) -> None:
        """Make up for a last save that found no room, once there is some; until a stop comes."""
        wishes = self._agree("the last save")
        while wishes.low_bytes:
            heeded = self._heed_disk(wishes)
            self._saver.take_failure()
            self._saver.save(self.step, reasons)
            self._saver.wait_done()
            wishes = self._agree("the last save")
            if heeded.stop or heeded.stop_signal:
                return

    def _agree(
        self,
        phase: str,
        *,
        redo: bool = False,
        rescue: bool = False,
        low_bytes: int | None = None,
        gives_up: bool = False,
    ) -> Wishes:
        mine = self._asked.wishes(
            self.step,
            low_bytes=self._saver.low_bytes if low_bytes is None else low_bytes,
            redo=redo,
            rescue=rescue,
            gives_up=gives_up,
        )
        return Wishes.decode(self._comm.agree(mine.encode(), phase=phase))

    def _checkpoint(self, decision: Decision, agreed: Wishes, deadline: float | None) -> None:
        self._asked.answered(usr1=decision.answers_usr1)
        signals = [reason for reason in decision.reasons if reason.startswith("SIG")]
        if signals:
            fields = {"signals": signals, "count": agreed.usr1}
            self._attempt.journal("signal", step=self.step, sync=False, **fields)
        if self._saver.wait_committed() == self.step:
            # Bit for bit what is there already, since nothing ran since; reasons merge.
            reasons = list(decision.reasons)
            self._attempt.journal("already_saved", step=self.step, sync=False, reasons=reasons)
            if signals:
                self._saver.export_for_signal(self.step)
            return
        may_overlap = not (decision.stops or agreed.redo)
        self._saver.save(self.step, decision.reasons, deadline=deadline, may_overlap=may_overlap)

    def _finish(self, agreed: Wishes, decision: Decision, deadline: float | None) -> None:
        if agreed.stop_signal:
            self.stopped = signal.Signals(agreed.stop_signal).name
            self._lost_a_peer = bool(agreed.orphaned) and not announce.is_orphaned()
        elif agreed.stop:
            self.stopped = self._stop_word
        elif decision.pivots:
            self.stopped = PIVOT
        if self._witness is not None:
            self._witness.end(self.step, self.stopped)
        self._saver.wait_done(deadline)
        if self._settings.disk_low == "wait" and not agreed.stop_signal:
            self._save_last_again(decision.reasons)
        failure = self._last_save.insist(self.step, decision.reasons, deadline)
        if failure is not None:
            raise failure
        if self._lost_a_peer:
            self._voice.warn("the launcher of another rank has died: this one goes on without it")
        if self.stopped:
            self._voice.say(f"stopped at step {self.step} by {self.stopped}")

    def ask_save(self) -> None:
        """Want a checkpoint at this step's boundary."""
        self._asked.save = True

    def ask_stop(self) -> None:
        """Want the run to end at this step's boundary."""
        self._asked.stop = True

    def save_now(self) -> None:
        """Have a committed checkpoint of this step; outside a body. Collective.

        Raises:
            SaveFailedError: It failed.
        """
        if self._saver.wait_committed() == self.step:
            return
        if self._rng_is_due and self.resumed is not None:
            # Before the loop, where the resumed generation turned out faulty: what is saved in its
            # place has its random state. The loop puts it back again, after whatever draws until
            # then.
            self.resumed.restore_rng()
        self._saver.take_failure()
        self.losses.flush()
        self._saver.save(self.step, ("save",))
        self._saver.wait_committed()
        if (failure := self._saver.take_failure()) is not None:
            raise failure

    def poll(self) -> bool:
        """Return whether anything is asked for on any rank. Collective; takes nothing away.

        A SIGUSR1 that waits for the cadence asks for nothing yet.
        """
        self._notices.alive()
        agreed = self._agree("poll")
        if self._settings.sigusr1 == "boundary":
            agreed = replace(agreed, usr1=0)
        return agreed.any

    def close(self, error: BaseException | None) -> BaseException | None:
        """Wait for the save in flight, let go of everything; return what went wrong meanwhile.

        Args:
            error: The exception that leaves the ``with``, if any.
        """
        failure: BaseException | None = KeyboardInterrupt()  # what it is unless waiting ends
        # A second Ctrl-C means now: the save in flight is left as temporary files, which the next
        # start removes. The first one is a KeyboardInterrupt only where nobody watches SIGINT.
        is_second = signal.SIGINT in self._settings.signals
        leaves_now = isinstance(error, KeyboardInterrupt) and is_second
        try:
            failure = None if leaves_now else self._drain()
        finally:
            self._let_go(error or failure)
        return failure

    def _drain(self) -> BaseException | None:
        """Write what is logged and wait for the save in flight; return what went wrong."""
        failure: BaseException | None = None
        try:
            self.losses.drop_after(self.step)
            if self._asked.taken is None:
                self.losses.flush()
        except Exception as caught:  # noqa: BLE001 - told below, after the save has come to its end
            failure = caught
        try:
            self._saver.close()
        except Exception as caught:  # noqa: BLE001 - the caller raises it
            failure = failure or caught
        return self._saver.take_failure() or failure

    def _let_go(self, wrong: BaseException | None) -> None:
        """Give back lock, handlers, files and groups, whatever happens on the way."""
        self._heed_late_signal()
        how = "failed" if wrong else "stopped" if self.stopped else "ended"
        if self._witness is not None:
            self._witness.close()
        try:
            self._attempt.journal(
                f"attempt_{how}",
                step=self.step,
                reason=self.stopped,
                error=None if wrong is None else f"{type(wrong).__name__}: {wrong}",
            )
            self._attempt.close()
        finally:
            self._notices.close()
            self._heed_late_signal()
            by_request = self.stopped not in {None, PIVOT} and not self._lost_a_peer
            announce.withdraw(
                self._comm.rank,
                stopped=by_request and not wrong,
                again=self.stopped == PIVOT and not wrong,
                lost_a_peer=self._lost_a_peer,
            )
            self._watch.uninstall()
            self._heed_late_signal()  # what came until now was noted; from here on it is Python's
            self._comm.close()

    def _heed_late_signal(self) -> None:
        """A stop that came after the last boundary counts: the script learns of it by `stopped`."""
        if self.stopped is None and self._watch.stop_signal:
            self.stopped = signal.Signals(self._watch.stop_signal).name


def _taken_elsewhere() -> LockedError:
    return LockedError(
        "Rank 0 has lost the run directory to another job.",
        next_step="Look at rank 0's error, which names it.",
    )
