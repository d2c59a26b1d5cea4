"""Signals become flags; whoever is at a boundary looks at them. Layer 2, sets handlers.

A handler here only notes that a signal arrived. Everything else, saving above all, happens where
the program asks: work inside a handler could meet any half-done state, and sometimes never ends.

Python runs handlers on the main thread, between two instructions of its own. While that thread is
in native code (a collective, a big copy) a handler waits, and equal signals that arrive meanwhile
are
one: the kernel keeps no count. So the promise is not one answer a signal, but that every arrival is
followed by an answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, TypeAlias

from dist_ckpt.errors import SettingError

__all__ = ["SignalWatch", "terminable"]

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
HANDLED = STOPS | {signal.SIGUSR1}
DEFAULT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SignalWatch:
    """Notes SIGTERM, SIGINT and SIGUSR1 between `install` and `uninstall`.

    Handlers that the program had set in Python are called too, after the note is made. A SIGINT
    that was ignored (a job in the background of a shell, nohup) stays ignored. The flags may be
    read on any thread; SIGUSR1 is to be taken by one thread.

    A handler set in C without Python's knowledge, such as `faulthandler.register`'s, is replaced if
    it was there first; registered later and with ``chain=True`` it works beside this one.

    Args:
        signals: Which of the three to note; the others keep what they do.

    Raises:
        SettingError: A signal that isn't one of the three.
    """

    def __init__(self, signals: Collection[signal.Signals] = DEFAULT) -> None:
        strange = [int(number) for number in signals if number not in HANDLED]
        if strange:
            raise SettingError(
                f"Signals {strange} can't be watched, only SIGTERM, SIGINT and SIGUSR1.",
                next_step="Leave them out of signals=.",
                found=strange,
            )
        self._signals = tuple(dict.fromkeys(signal.Signals(number) for number in signals))
        self._previous: dict[int, Handler] = {}
        self._pid = os.getpid()
        # A handler may interrupt another one half-way, so no count here is read, changed and
        # written back: deque.append and popleft are each one step.
        self._stops: deque[tuple[int, float]] = deque()
        self._interrupts: deque[None] = deque()
        self._usr1: deque[None] = deque()

    @property
    def stop_signal(self) -> int:
        """The number of the first SIGTERM or SIGINT that arrived; 0 when there was none."""
        return self._stops[0][0] if self._stops else 0

    @property
    def stop_time(self) -> float | None:
        """When the first stop signal was noted, by `time.monotonic` in seconds; None when none was.

        Later than it was sent by what the main thread spent in native code meanwhile.
        """
        return self._stops[0][1] if self._stops else None

    def take_usr1(self) -> int:
        """Return how many SIGUSR1 were noted since this was last asked; none is lost or told twice.

        For one thread. A signal that arrives meanwhile is told now or next time.
        """
        number = len(self._usr1)
        for _ in range(number):
            self._usr1.popleft()
        return number

    def install(self) -> None:
        """The signals are noted from now on; again is fine.

        Main thread only. Elsewhere Python allows no handlers: it warns, and signals do what they
        did.
        """
        if not _on_main_thread("watched"):
            return
        self._pid = os.getpid()
        for number in self._signals:
            if number in self._previous:
                continue
            previous = signal.getsignal(number)
            if number == signal.SIGINT and previous == signal.SIG_IGN:
                continue
            # First, since a signal may arrive as soon as the handler is there.
            self._previous[number] = previous
            signal.signal(number, self._note)

    def uninstall(self) -> None:
        """The handlers from before `install` are back; what was noted can still be read.

        A handler that the program set since then stays. Main thread only; elsewhere it warns.
        """
        if self._previous and not _on_main_thread("given back"):
            return
        for number in list(self._previous):
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._note:
            # None: it was set by C code, and Python can't set it again.
            previous = self._previous[number]
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        # Last: until then the handler needs it.
        self._previous.pop(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Make the note; runs between any two instructions of the main thread."""
        previous = self._previous.get(number)
        if os.getpid() != self._pid:
            self._in_a_child(number, previous, frame)
            return
        if number in self._previous:
            if number in STOPS:
                self._stops.append((number, time.monotonic()))
            else:
                self._usr1.append(None)
            if number == signal.SIGINT:
                self._interrupts.append(None)
                if len(self._interrupts) > 1:
                    # Asked twice: a person doesn't want to wait for the boundary.
                    self._put_back(number)
                    raise KeyboardInterrupt
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _in_a_child(self, number: int, previous: Handler, frame: FrameType | None) -> None:
        """A forked child (a loader's worker, say) has inherited the handler: do as if it hadn't.

        But for SIGUSR1, whose default would kill a worker that was merely asked with its parent.
        """
        if callable(previous):
            previous(number, frame)
        elif number in STOPS and previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _on_main_thread(what: str) -> bool:
    if threading.current_thread() is threading.main_thread():
        return True
    warnings.warn(
        f"Signals can't be {what} from thread {threading.current_thread().name!r}: Python allows "
        "handlers on the main thread only.",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM is a KeyboardInterrupt, so that no child outlives the caller.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
