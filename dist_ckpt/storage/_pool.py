"""Work on pieces of a file by a few threads. Layer 2, no I/O of its own.

Threads live for one call: starting one costs less than a hundredth of writing one piece, none is
left behind, and a fork in between can't lose them. The calling thread works too, so that everything
still works, slower, where no thread can be started any more (at the end of the interpreter).
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    helpers = _start(drain, min(threads, len(items)) - 1)
    try:
        drain()
    finally:
        # Descriptor and buffer belong to the caller: no thread may outlive this call, whatever
        # interrupts it.
        _join(helpers, errors)
    if errors:
        raise errors[0]


def _start(target: Callable[[], None], count: int) -> list[threading.Thread]:
    helpers: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads: fewer do the work
        for _ in range(count):
            helper = threading.Thread(target=target, name="dist-ckpt-io", daemon=True)
            helper.start()
            helpers.append(helper)
    return helpers


def _join(helpers: list[threading.Thread], errors: list[BaseException]) -> None:
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt: finish first
                errors.append(error)
