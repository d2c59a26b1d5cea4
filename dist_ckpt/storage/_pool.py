"""Work on pieces of a file, or of memory, by a few threads. Layer 2, no I/O of its own.

Threads live for one call: starting one costs less than a hundredth of writing one piece, none is
left behind, and a fork in between can't lose them. The calling thread works too, so that everything
still works, slower, where no thread can be started any more (at the end of the interpreter, or at a
limit of the system's); also what is handed to a pool that others keep.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor


def for_each(
    items: Sequence[int], make_worker: Callable[[], Callable[[int], None]], threads: int
) -> None:
    """Return when every item was handled; inline where there is one item or one thread.

    Args:
        items: What to hand out, in order; each goes to one thread.
        make_worker: Called in each thread; what it returns handles that thread's items, so that a
            thread can keep a buffer.
        threads: How many, the calling one included.

    Raises:
        BaseException: The first error of any thread, after all threads have come to an end; nothing
            is handed out after it.
    """
    handout = itertools.count()
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            worker = make_worker()
            while not errors and (at := next(handout)) < len(items):
                worker(items[at])
        except BaseException as error:  # noqa: BLE001 - told to the caller below
            errors.append(error)

    # Descriptor and memory belong to the caller: no helper may touch them after this call, whatever
    # interrupts it.
    crew = _Crew(drain)
    try:
        crew.start(min(threads, len(items)) - 1)
        drain()
    except BaseException as error:  # noqa: BLE001 - an interrupt, raised below
        errors.append(error)
    crew.end(errors)
    if errors:
        raise errors[0]


def hand_on(pool: Executor, work: Callable[[], None]) -> Future[None]:
    """Have a pool do ``work``, or do it here where the pool can start no thread for it.

    A pool that can't has queued the work before it says so: another thread of it may come upon it
    at any time, also when the file that it is about is closed. So whoever comes first does it, and
    nobody does it again.
    """
    done: Future[None] = Future()
    claim = threading.Lock()

    def once() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to whoever asks for the result
            done.set_exception(error)
        else:
            done.set_result(None)

    try:
        pool.submit(once)
    except RuntimeError:
        once()
    return done


class _Crew:
    """Helpers of one call. One that comes late, its start interrupted, finds the work closed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._gate = threading.Lock()
        self._is_closed = False
        self._entered: list[threading.Thread] = []
        self._helpers: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Have up to so many threads work."""
        with suppress(RuntimeError):  # no more threads: fewer do the work
            for _ in range(count):
                helper = threading.Thread(target=self._enter, name="dist-ckpt-io", daemon=True)
                helper.start()
                self._helpers.append(helper)

    def end(self, errors: list[BaseException]) -> None:
        """No helper works any more; interrupts meanwhile go to ``errors``, for after."""
        while True:
            try:
                with self._gate:
                    self._is_closed = True
                    helpers = {*self._helpers, *self._entered}
                for helper in helpers:
                    helper.join()
            except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt: finish first
                errors.append(error)
            else:
                return

    def _enter(self) -> None:
        with self._gate:
            if self._is_closed:
                return
            self._entered.append(threading.current_thread())
        self._work()
