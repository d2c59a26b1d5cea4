"""Bounded use of torch.distributed's key-value store. Layer 2, network I/O.

Calls of a store can't be given a limit: with its host stopped, even ``check`` waits for ever
(measured). So they run on a thread of ours, and whoever wants something waits for that thread with
a limit.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import Store

from dist_ckpt.errors import JobError

__all__ = ["PART_BYTES", "StoreClient", "StoreLostError", "View"]

T = TypeVar("T")

PART_BYTES = 4 * 2**20
"""Longer values are cut into parts: one message of a TCPStore takes 8 MiB at most."""

FIRST_PAUSE_SECS = 0.001
LAST_PAUSE_SECS = 0.02
JOIN_SECS = 0.5


class StoreLostError(JobError):
    """The store failed or doesn't answer; becomes an error that names ranks in this package."""


class View:
    """The store as work on the client's thread sees it: whole values, polling that can end."""

    def __init__(self, store: Store, stop: threading.Event) -> None:
        # Any: torch's type stubs don't know that values may be bytes.
        self._store: Any = store
        self._stop = stop
        self.last_answer = time.monotonic()

    def put(self, key: str, value: bytes) -> None:
        """The key holds the value, of any length, for `take`."""
        parts = [value[at : at + PART_BYTES] for at in range(0, len(value), PART_BYTES)] or [b""]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}#{number}", part)
        # The head is set last: who sees it finds all parts.
        self._store.set(key, b"%d:" % len(parts) + parts[0])
        self._answered()

    def mark(self, key: str, sign: bytes) -> None:
        """The key's value begins with ``sign``, which is no longer than a part; the rest is void.

        The further parts stay as they are: who has begun to `take` what was there finds all of it,
        and `drop` finds them.
        """
        count = int(self._store.get(key).partition(b":")[0]) if self.has([key]) else 1
        self._store.set(key, b"%d:" % count + sign)
        self._answered()

    def take(self, key: str) -> bytes:
        """Return what `put` wrote; only for keys that exist: a store waits for the others."""
        count, _, first = self._store.get(key).partition(b":")
        rest = [self._store.get(f"{key}#{number}") for number in range(1, int(count))]
        self._answered()
        return b"".join([first, *rest])

    def drop(self, key: str) -> None:
        """The key and its parts are gone; it need not exist."""
        if self.has([key]):
            count = int(self._store.get(key).partition(b":")[0])
            for number in range(1, count):
                self._store.delete_key(f"{key}#{number}")
            self._store.delete_key(key)
            self._answered()

    def has(self, keys: Sequence[str]) -> bool:
        """Say whether all of the keys exist."""
        found = not keys or bool(self._store.check(list(keys)))
        self._answered()
        return found

    def add(self, key: str, amount: int) -> int:
        """Return the counter's value after adding to it; one atomic step over all ranks."""
        value = int(self._store.add(key, amount))
        self._answered()
        return value

    def drop_counter(self, key: str) -> None:
        """The counter is gone."""
        self._store.delete_key(key)
        self._answered()

    def first(self, key: str, value: bytes) -> bytes:
        """Return the value of the rank that came here first; one atomic step over all ranks."""
        found = self._store.compare_set(key, "", value.decode())
        self._answered()
        return bytes(found)

    def poll(self, done: Callable[[], bool], secs: float) -> bool:
        """Return True once ``done()`` is; False after ``secs`` s or once the client closes."""
        deadline = time.monotonic() + secs
        pause = FIRST_PAUSE_SECS
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or self._stop.wait(min(pause, left)):
                return done()
            pause = min(pause * 1.5, LAST_PAUSE_SECS)
        return True

    def _answered(self) -> None:
        self.last_answer = time.monotonic()


class _Job(Generic[T]):
    """One piece of work for the client's thread, and its result."""

    def __init__(self, work: Callable[[View], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None


class StoreClient:
    """One connection to the store, used by one daemon thread of its own.

    Args:
        make_store: Makes the connection; called on that thread, when first needed.
        quiet_secs: How long the store may be silent before it counts as lost, in seconds.
    """

    def __init__(self, make_store: Callable[[], Store], quiet_secs: float) -> None:
        self._make_store = make_store
        self._quiet_secs = quiet_secs
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: list[View] = []

    def call(self, work: Callable[[View], T], *, quiet_secs: float | None = None) -> T:
        """Return what ``work`` returned on the client's thread; its errors are raised here.

        ``work`` may take as long as it likes while the store keeps answering.

        Args:
            work: What to do.
            quiet_secs: How long the store may be silent this once; None: as long as ever.

        Raises:
            StoreLostError: The store failed, or was silent for ``quiet_secs``. The work may still
                be under way.
        """
        quiet_secs = self._quiet_secs if quiet_secs is None else quiet_secs
        self._start()
        job = _Job(work)
        begun = time.monotonic()
        self._jobs.put(job)
        while not job.done.wait(self._silence_left(begun, quiet_secs)):
            if self._silence_left(begun, quiet_secs) <= 0:
                raise StoreLostError(
                    f"The job's store hasn't answered for {quiet_secs:g} s.",
                    next_step="Start the job again; it resumes from its last generation.",
                )
        if isinstance(job.error, RuntimeError):
            raise StoreLostError(
                "The job's store is lost: rank 0 or torchrun's agent, whichever hosted it, has "
                f"ended ({_first_line(job.error)}).",
                next_step="Start the job again; it resumes from its last generation.",
            ) from job.error
        if job.error is not None:
            raise job.error
        return job.value  # type: ignore[return-value]  # it is T when there is no error

    def close(self) -> None:
        """The thread has ended, or ends as soon as the store lets go of it."""
        self._stop.set()
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECS)

    def _silence_left(self, begun: float, quiet_secs: float) -> float:
        last = self._state[0].last_answer if self._state else begun
        return max(begun, last) + quiet_secs - time.monotonic()

    def _start(self) -> None:
        if self._thread is not None:
            return
        arguments = (self._make_store, self._jobs, self._stop, self._state)
        # Daemon: a store that never answers must not keep the process from ending.
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="dist_ckpt-store", daemon=True
        )
        self._thread.start()
        # The thread holds no reference to the client, so that dropping the client ends it.
        weakref.finalize(self, _end, self._jobs, self._stop)


def _end(jobs: queue.SimpleQueue[_Job[Any] | None], stop: threading.Event) -> None:
    stop.set()
    jobs.put(None)


def _serve(
    make_store: Callable[[], Store],
    jobs: queue.SimpleQueue[_Job[Any] | None],
    stop: threading.Event,
    state: list[View],
) -> None:
    """Do jobs until told to end; an error belongs to its job, never to this thread."""
    while (job := jobs.get()) is not None:
        try:
            if not state:
                state.append(View(make_store(), stop))
            job.value = job.work(state[0])
        except BaseException as error:  # noqa: BLE001 - handed to the one who asked
            job.error = error
        job.done.set()
        del job


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
