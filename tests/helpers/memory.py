"""A directory in memory, for tests that lay out many small trees."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made below


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
