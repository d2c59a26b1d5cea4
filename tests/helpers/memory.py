"""For tests that lay out many small trees: a directory in memory, and a heap that is left alone."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made below

_T = TypeVar("_T")


@contextlib.contextmanager
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a private directory on a tmpfs; the test is skipped where there is none."""
    if f" {MEMORY} tmpfs " not in Path("/proc/mounts").read_text():
        pytest.skip(f"needs a tmpfs at {MEMORY}")
    folder = MEMORY / f"dist_ckpt-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def rarely_collected(items: Iterable[_T], *, every: int = 100) -> Iterator[_T]:
    """Yield the items, with the garbage collected after so many of them and not meanwhile.

    Thousands of starts of a training make and drop as many objects; a sixth of the time would go
    into looking at what the imports left.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number, item in enumerate(items, start=1):
            yield item
            if number % every == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
