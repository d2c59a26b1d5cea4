"""Python's collector of garbage, held off where very many objects are made at once. Layer 0.

It looks through everything that is alive whenever enough has been made: with 100,000 tensors that
was half the time of a resume, and found nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the collector off for a moment; on again after, if it was on. Any thread.

    What is no longer referred to goes at once all the same; only cycles wait. A program that
    switches the collector off itself, in another thread, within that moment finds it on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
