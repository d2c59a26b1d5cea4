"""How far an instant has been copied, so that writing it begins meanwhile. Layer 3, any thread."""

from __future__ import annotations

import threading

from dist_ckpt.errors import JobError
from dist_ckpt.storage import PIECE_BYTES

__all__ = ["CopyFailedError", "Watermark"]


class CopyFailedError(Exception):
    """The copy came to no end; ``cause`` says why. Goes no further than whoever writes."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


class Watermark:
    """The shard's bytes are copied from its start to here; raised by one thread, awaited by others.

    Once raised over a byte, nobody changes that byte before the writing is over.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._cause: BaseException | None = None
        self._risen = threading.Condition()
        self._over = threading.Event()

    def reach(self, end: int) -> None:
        """The shard is copied up to ``end``."""
        # Writers wait for whole pieces: nobody needs to be woken in between.
        if end // PIECE_BYTES > self._bytes // PIECE_BYTES:
            with self._risen:
                self._bytes = end
                self._risen.notify_all()

    def finish(self, cause: BaseException | None = None) -> None:
        """All is copied, of both files; or the copy ends here, and who waits is told why."""
        with self._risen:
            self._cause = cause
            self._over.set()
            self._risen.notify_all()

    @property
    def is_over(self) -> bool:
        """Nothing is being copied any more."""
        return self._over.is_set()

    def wait(self, end: int | None, timeout_secs: float) -> None:
        """Return once the shard is copied up to ``end``; with None, once all is.

        Raises:
            CopyFailedError: It never will be.
            JobError: It wasn't in time.
        """
        if end is None:
            in_time = self._over.wait(timeout_secs)
        else:
            with self._risen:
                in_time = self._risen.wait_for(
                    lambda: end <= self._bytes or self._over.is_set(), timeout_secs
                )
        if self._cause is not None:
            raise CopyFailedError(self._cause)
        if not in_time:
            raise JobError(
                f"The copy of the state took longer than {timeout_secs:g} s.",
                next_step="Raise timeout_secs if it takes this long.",
            )
