"""Operations of storage, recorded with their bytes as they are done.

``Recorder`` goes into the seam of storage and remembers each operation that changes something.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt.storage import Ops

_CLONE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Event:
    """One operation that changed something, or a mark.

    Attributes:
        op: What was done.
        inode: The file or directory that it is about: the one that got or lost a name, or was
            changed or synced.
        places: The names it is about, ``(directory, name)``: the new one first.
        offset: Of a write; the size of a truncation or reservation.
        data: What was written.
        text: Of a mark, and for people: the path.
        is_dir: Whether ``inode`` is a directory.
        time: On the clock that all processes share.
    """

    op: str
    inode: int = -1
    places: tuple[tuple[int, str], ...] = ()
    offset: int = 0
    data: bytes = b""
    text: str = ""
    is_dir: bool = False
    time: float = 0.0


class Recorder(Ops):
    """Does everything as it is, below one directory remembering it in ``events``.

    Files are told apart by their inode's number, the same for all processes. So the directory must
    lie in memory (tmpfs): other file systems give a number again as soon as a file is removed.

    Args:
        root: An existing directory; what happens elsewhere isn't remembered.
    """

    def __init__(self, root: Path) -> None:
        self.events: list[Event] = []
        self._root = os.path.realpath(root)
        self._guard = threading.RLock()

    # What changes names

    def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
        with self._guard:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            fd = super().open(path, flags, mode)
            if is_new:
                self._named("create", os.fstat(fd), path)
            return fd

    def mkdir(self, path: Any, mode: int) -> None:
        with self._guard:
            super().mkdir(path, mode)
            self._named("mkdir", os.lstat(path), path)

    def rename(self, src: Any, dst: Any) -> None:
        with self._guard:
            super().rename(src, dst)
            self._named("rename", os.lstat(dst), dst, src)

    def link(self, src: Any, dst: Any) -> None:
        with self._guard:
            super().link(src, dst)
            self._named("link", os.lstat(dst), dst)

    def unlink(self, path: Any) -> None:
        with self._guard:
            status = os.lstat(path)
            super().unlink(path)
            self._named("unlink", status, path)

    def rmdir(self, path: Any) -> None:
        with self._guard:
            status = os.lstat(path)
            super().rmdir(path)
            self._named("unlink", status, path)

    # What changes bytes

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        with self._guard:
            taken = super().pwrite(fd, data, offset)
            self._about(fd, "write", offset, bytes(memoryview(data).cast("B")[:taken]))
            return taken

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            super().ftruncate(fd, size_bytes)
            self._about(fd, "truncate", size_bytes)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            super().fallocate(fd, size_bytes)
            self._about(fd, "reserve", size_bytes)

    def clone(self, src_fd: int, dst_fd: int) -> None:
        with self._guard:
            super().clone(src_fd, dst_fd)
            self._about(dst_fd, "write", 0, os.pread(src_fd, _CLONE_LIMIT, 0))

    # What makes durable

    def fsync(self, fd: int) -> None:
        with self._guard:
            super().fsync(fd)
            self._about(fd, "sync")

    def fdatasync(self, fd: int) -> None:
        with self._guard:
            super().fdatasync(fd)
            self._about(fd, "sync")

    def _named(self, op: str, status: os.stat_result, *paths: Any) -> None:
        places = []
        for path in paths:
            parent, name = os.path.split(os.path.abspath(path))
            places.append((os.stat(parent).st_ino, name))
        text = os.path.abspath(paths[0])
        is_dir = stat.S_ISDIR(status.st_mode)
        self._add(Event(op, status.st_ino, tuple(places), text=text, is_dir=is_dir))

    def _about(self, fd: int, op: str, offset: int = 0, data: bytes = b"") -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._add(Event(op, os.fstat(fd).st_ino, offset=offset, data=data, text=path))

    def _add(self, event: Event) -> None:
        if event.text == self._root or event.text.startswith(self._root + "/"):
            self.events.append(replace(event, time=time.monotonic()))


def merge(*records: Sequence[Event]) -> list[Event]:
    """Return the events of several processes that worked side by side, in the order of time."""
    return sorted(itertools.chain(*records), key=lambda event: event.time)
