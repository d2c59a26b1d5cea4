"""The background thread of the saves: one piece of work at a time, and waits that end. Layer 6."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dist_ckpt.errors import DistCkptError, JobError, SaveFailedError

__all__ = ["IDLE_SECS", "Ticket", "Worker"]

IDLE_SECS = 5.0


@dataclass
class Ticket:
    """One piece of work and the events that tell how far it is.

    Attributes:
        work: Called on the background thread with this ticket.
        committed: What the next save waits for; set by the work, or at its end.
        done: Nothing of it is left to do.
    """

    work: Callable[[Ticket], None]
    committed: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs what is submitted, in order, on one daemon thread.

    Args:
        report: Told each failure on the background thread, to say and journal it.
        limit_secs: How long a wait may last.
        where: Says what the work in flight is doing, for the error when a wait is over.
        idle: Called every ``IDLE_SECS`` while there is nothing to do.
    """

    def __init__(
        self,
        report: Callable[[DistCkptError], None],
        limit_secs: float,
        where: Callable[[], str],
        idle: Callable[[], None] | None = None,
    ) -> None:
        self._report = report
        self._limit_secs = limit_secs
        self._where = where
        self._idle = idle
        self._current: Ticket | None = None
        self._failure: DistCkptError | None = None
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="dist_ckpt-saver", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Ticket], None]) -> None:
        """Have ``work`` run after what was submitted before."""
        self._current = Ticket(work)
        self._queue.put(self._current)

    def wait_committed(self) -> None:
        """Return once no save is on its way to its commit.

        Raises:
            JobError: It took longer than the limit; the disk or a rank is stuck.
        """
        if self._current is not None:
            self._wait(self._current.committed)

    def wait_done(self) -> None:
        """Return once nothing is left to do; the same error."""
        if self._current is not None:
            self._wait(self._current.done)

    def is_done_by(self, deadline: float) -> bool:
        """Wait until time.monotonic() is ``deadline`` at most; return whether nothing is left."""
        if self._current is None:
            return True
        while not self._current.done.wait(max(0.0, min(0.5, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def take_failure(self) -> DistCkptError | None:
        """Return why the last work failed, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """End the thread after the work in flight, within the limit."""
        try:
            self.wait_done()
        finally:
            self._queue.put(None)
        self._thread.join(self._limit_secs)

    def _wait(self, event: threading.Event) -> None:
        # Short waits, so that Python's signal handlers get their turn on this thread.
        ends = time.monotonic() + self._limit_secs
        while not event.wait(0.5):
            if not self._thread.is_alive() and not event.is_set():
                raise JobError(
                    "The thread that writes saves is gone (it ended, or this is a forked child).",
                    next_step="Start the run again; it resumes from the newest generation.",
                    phase="save",
                )
            if time.monotonic() > ends:
                raise JobError(
                    f"The save in flight has not ended within {self._limit_secs:g} s: "
                    f"{self._where()}.",
                    next_step="Look at the disk and the other ranks; if slow, raise timeout_secs.",
                    phase="save",
                )

    def _next(self) -> Ticket | None:
        while self._idle is not None:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=IDLE_SECS)
            with contextlib.suppress(Exception):  # looking must not end the thread that saves
                self._idle()
        return self._queue.get()

    def _serve(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                ticket.work(ticket)
            except DistCkptError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - a thread's exception would be lost
                self._fail(
                    SaveFailedError(
                        f"The background thread failed ({self._where()}): {error!r}",
                        next_step="Earlier generations are untouched. Please report this.",
                    )
                )
            finally:
                ticket.committed.set()
                ticket.done.set()

    def _fail(self, error: DistCkptError) -> None:
        with self._lock:
            self._failure = error
        with contextlib.suppress(Exception):  # telling must not end the thread that saves
            self._report(error)
