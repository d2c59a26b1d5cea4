"""The save that a run ends with: what it doesn't hold is lost, so it is tried again. Layer 6."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dist_ckpt.comm import Comm
from dist_ckpt.errors import DistCkptError, JobError, LockedError, SaveFailedError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.service._keeper import Keeper
from dist_ckpt.service._losses import Losses
from dist_ckpt.service._saver import Saver
from dist_ckpt.service._voice import Voice

__all__ = ["LastSave"]

#: Between two tries; each pause is twice the one before.
_FIRST_PAUSE_SECS = 0.5
_LONGEST_PAUSE_SECS = 4.0


@dataclass(frozen=True)
class LastSave:
    """Whose last save it is; on every rank.

    Attributes:
        comm: The job's ranks.
        saver: Saves.
        losses: What is still to be logged.
        store: Where the generation has to be in the end.
        voice: Says it.
        keeper: Makes a vanished run directory again; rank 0.
        give_up: Told that another job has taken the directory.
        secs: What a stop may take.
    """

    comm: Comm
    saver: Saver
    losses: Losses
    store: GenerationStore
    voice: Voice
    keeper: Keeper | None
    give_up: Callable[[LockedError], None]
    secs: float

    def insist(
        self, step: int, reasons: tuple[str, ...], deadline: float | None
    ) -> DistCkptError | None:
        """Try the last save again while a stop leaves time for it; return why it still fails.

        There may be room again, or the directory. What isn't saved now is lost. Collective.

        Args:
            step: Finished updates.
            reasons: Why it is saved.
            deadline: time.monotonic() by which a stop must be over; None: what a stop may take,
                from now on.
        """
        ends = deadline or time.monotonic() + self.secs
        pause = _FIRST_PAUSE_SECS
        failure = self.saver.take_failure()
        while self._agree_on_another(step, failure, ends - pause):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
            self.voice.say(f"step {step}: the save is tried again")
            self.saver.make_room()
            self.losses.flush()
            self.saver.save(step, reasons, deadline=deadline)
            self.saver.wait_done(deadline)
            failure = self.saver.take_failure()
        return failure

    def _agree_on_another(self, step: int, failure: DistCkptError | None, ends: float) -> bool:
        try:
            wish = self._is_worth_another(step, failure, ends)
            return bool(self.comm.agree([wish], phase="the last save")[0])
        except JobError as lost:
            # A rank that was lost in the save is lost here, too; the first error says in which
            # phase.
            raise failure or lost from lost

    def _is_worth_another(self, step: int, failure: DistCkptError | None, ends: float) -> bool:
        """Rank 0: return whether the last save isn't there, and may be within the time."""
        is_undone = isinstance(failure, SaveFailedError) and "cause" in failure.values
        if self.comm.rank != 0 or not is_undone or time.monotonic() >= ends:
            return False
        try:
            if self.keeper is not None:
                self.keeper.mend(look=True)
            return not self.store.has(step)
        except LockedError as error:
            self.give_up(error)
            return False
        except DistCkptError:
            return True
