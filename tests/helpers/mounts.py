"""Small file systems in memory, for what only a real one shows: full, out of inodes, read-only."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _mount(*arguments: str | Path) -> str:
    """Return what mount said, empty where it did it."""
    if shutil.which("mount") is None:
        return "there is no mount here"
    command = ["/usr/bin/env", "mount", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or "mount failed"


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Give a tmpfs of its own, ``options`` as ``size=2m``; skips where none can be mounted."""
    folder.mkdir()
    if why := _mount("-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", folder):
        pytest.skip(f"needs a tmpfs of its own, and the right to mount one: {why}")
    try:
        yield folder
    finally:
        subprocess.run(["/usr/bin/env", "umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """The file system has other options, ``ro`` or ``rw``."""
    why = _mount("-o", f"remount,{options}", folder)
    assert not why, why
