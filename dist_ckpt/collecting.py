"""Python's collector of garbage, held off where very many objects are made at once. Layer 0.

It looks through everything that is alive whenever enough has been made: with 100,000 tensors that
was half the time of a resume, and found nothing (docs/decisions/0052-collector-waits.md).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collection"]


class _Hold:
    """Who is inside, of all threads: the first one switches the collector off, the last one on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_on:
                gc.enable()

    def forget(self) -> None:
        """In a forked child: whoever was inside isn't there, and the lock may have been held."""
        self._lock = threading.Lock()
        if self._inside and self._was_on:
            gc.enable()
        self._inside = 0


_hold = _Hold()
os.register_at_fork(after_in_child=_hold.forget)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the collector off for a moment; as it was after. Any thread, also one inside another.

    What is no longer referred to goes at once all the same; only cycles wait. Not around a
    program's own code: what it says about the collector meanwhile would be undone.
    """
    _hold.enter()
    try:
        yield
    finally:
        _hold.leave()
