"""A place on this machine for what is fetched from a destination, to load it for trial."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dist_ckpt import storage
from dist_ckpt.errors import NoSpaceError, StorageError, UsageError

__all__ = ["scratch"]

_LOCK: Final = "run.lock"


@contextmanager
def scratch(parent: Path | None, id_: str, need_bytes: int) -> Iterator[Path]:
    """Give an empty private directory that is gone afterwards; what a killed call left goes first.

    Args:
        parent: Where to make it; None for the system's temporary directory.
        id_: Of the resume point: one shipment of it at a time.
        need_bytes: How much will be written.

    Raises:
        LockedError: Another call ships the same resume point.
        NoSpaceError: No room; nothing was sent yet.
        UsageError: No such directory, or somebody else's thing in the way.
    """
    base = Path(tempfile.gettempdir()) if parent is None else parent
    if not storage.is_dir(base):
        raise UsageError(
            f"{base} isn't a directory, so nothing can be loaded from there for trial.",
            next_step="Give another --scratch.",
            path=str(base),
        )
    path = base / f"dist-ckpt-ship-{os.geteuid()}-{id_[:16]}"
    _make_own(path)
    lock = storage.RunLock(path / _LOCK)
    lock.acquire({"pid": os.getpid(), "host": socket.gethostname(), "command": "ship"})
    try:
        _empty(path)
        try:
            storage.check_space(path, need_bytes)
        except NoSpaceError as error:
            raise NoSpaceError(
                f"{error.message} The copy is fetched there to be loaded for trial.",
                next_step="Give --scratch a directory with more room.",
                **error.values,
            ) from error
        yield path
    finally:
        with suppress(StorageError):  # what matters has been decided
            _empty(path)
            storage.remove_tree(path)
        lock.release()


def _make_own(path: Path) -> None:
    try:
        storage.make_dir(path)
    except StorageError:
        if not storage.exists(path):
            raise
    # In a directory for everybody, somebody may have been there first.
    status = storage.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} isn't this user's own directory.",
            next_step="Give --scratch a directory of your own.",
            path=str(path),
        )


def _empty(path: Path) -> None:
    for name in storage.list_names(path):
        if name != _LOCK:
            storage.remove_tree(path / name)
