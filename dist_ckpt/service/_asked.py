"""What a rank asks for at a boundary: by signals, by its body, by a request file. Layer 6.

Each rank keeps its own until it is answered; what all ask for together is agreed on as `Wishes`.
"""

from __future__ import annotations

import time

from dist_ckpt import announce
from dist_ckpt.errors import DistCkptError, LockedError
from dist_ckpt.lifecycle import REQUEST_FILE, read_request
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._boundary import Wishes
from dist_ckpt.service._voice import Voice
from dist_ckpt.signals import SignalWatch

__all__ = ["Asked"]


class Asked:
    """One rank's wishes that weren't answered yet. Main thread.

    Args:
        watch: The signals that came.
        attempt: Whose directory a request for a pivot lies in, and whose journal it goes to.
        voice: Says it.
        every: The cadence, which a pivot waits for.
        looks: Whether this rank reads requests: rank 0.

    Attributes:
        save: A checkpoint at the next boundary.
        stop: The end of the run there.
        taken: Why nothing may be written any more: another job has the run directory.
    """

    def __init__(
        self, watch: SignalWatch, attempt: Attempt, voice: Voice, *, every: int, looks: bool
    ) -> None:
        self._watch = watch
        self._attempt = attempt
        self._voice = voice
        self._every = every
        self._looks = looks
        self._usr1 = 0
        self._pivot: str | None = None
        self.save = False
        self.stop = False
        self.taken: LockedError | None = None

    def wishes(
        self, step: int, *, low_bytes: int, redo: bool, rescue: bool, gives_up: bool
    ) -> Wishes:
        """Return what this rank wants now; the arguments are what it found, not what was asked."""
        watch = self._watch
        if num_usr1 := watch.take_usr1():
            self._usr1 += num_usr1 - self._notice_pivot(step)
        age_ms = 0
        if watch.stop_time is not None:
            age_ms = int((time.monotonic() - watch.stop_time) * 1000)
        return Wishes(
            stop_signal=watch.stop_signal,
            stop_age_ms=age_ms,
            usr1=self._usr1,
            save=int(self.save),
            stop=int(self.stop or gives_up),
            redo=int(redo),
            rescue=int(rescue),
            taken=int(self.taken is not None),
            pivot=int(self._pivot is not None),
            low_bytes=low_bytes,
            orphaned=int(watch.stop_signal > 0 and announce.is_orphaned()),
        )

    def answered(self, *, usr1: bool) -> None:
        """A checkpoint is taken; it answers the signals, too, where ``usr1`` says so."""
        if usr1:
            self._usr1 = 0
        self.save = False

    def _notice_pivot(self, step: int) -> int:
        """Return how many of the signals asked for a pivot: 1 where a new request lies there."""
        if not self._looks:
            return 0
        try:
            request = read_request(self._attempt.store.run_dir)
        except DistCkptError as error:  # nothing that could end training
            self._voice.warn(f"{REQUEST_FILE} can't be read: {error}")
            return 0
        if request is None or request.id == self._pivot:
            return 0
        self._pivot = request.id
        boundary = -(-max(step, 1) // self._every) * self._every
        asked = {"id": request.id, "boundary": boundary}
        self._attempt.journal("pivot_asked", step=step, sync=False, **asked)
        self._voice.say(f"a pivot is asked for: at step {boundary}")
        return 1
