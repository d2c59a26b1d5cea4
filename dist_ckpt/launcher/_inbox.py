"""Signals of the launcher as a list to take from. Layer 7; main thread only.

The handlers only note the number; a wake-up descriptor ends the wait, so nothing polls while
nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

__all__ = ["Inbox"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
# A shell's "&" and nohup ignore these for their children on purpose.
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Inbox:
    """While entered, signals are kept in the order of their arrival and do nothing else."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._before: dict[signal.Signals, Any] = {}
        self._wake_read = self._wake_write = self._wake_before = -1
        #: A further descriptor whose input ends a wait; None for none.
        self.also: int | None = None

    def __enter__(self) -> Self:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in _SIGNALS:
            before = signal.getsignal(signum)
            if before == signal.SIG_IGN and signum in _LEFT_IGNORED:
                continue
            self._before[signum] = before
            signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(self._wake_before)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wait(self, timeout_secs: float) -> None:
        """A signal has arrived (SIGCHLD among them), ``also`` has input, or the time is over."""
        if self._arrived:
            return
        also = () if self.also is None else (self.also,)
        select.select([self._wake_read, *also], [], [], max(timeout_secs, 0.0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def take(self) -> list[int]:
        """Return the signals that arrived since the last call, oldest first, SIGCHLD left out."""
        taken = []
        while self._arrived:
            signum = self._arrived.popleft()
            if signum != signal.SIGCHLD:
                taken.append(signum)
        return taken

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self._arrived.append(signum)
