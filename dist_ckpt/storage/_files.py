"""Opening, filling and reading files, as the other modules of storage need it. Layer 2, I/O."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import CorruptFileError, ForeignFileError, StorageError
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dist_ckpt.storage._types import Bytes, Path

IOV_MAX: Final = 1024
"""Buffers that one preadv takes."""

_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
# O_NONBLOCK so that a FIFO in the place of a file is refused and not waited for; regular files
# ignore it.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def new_file(path: Path, *, mode: int, need_bytes: int | None = None) -> Iterator[int]:
    """Give the descriptor of a new file; on leaving it has ``mode``, is synced and closed.

    When anything fails inside or on leaving, the file is gone again. A failed sync is never tried a
    second time: the kernel may have dropped the pages and would report success. The directory isn't
    synced.

    Raises:
        StorageError: The file exists, or the system refused.
    """
    ops = get_ops()
    with guard("create", path, need_bytes=need_bytes, creating=True):
        fd = ops.open(path, _CREATE, 0o600)
    try:
        try:
            yield fd
            with guard("set the mode of", path):
                ops.fchmod(fd, mode)
            with guard("sync", path, need_bytes=need_bytes):
                ops.fsync(fd)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                ops.close(fd)
            raise
        with guard("close", path, need_bytes=need_bytes):
            ops.close(fd)
    except BaseException:
        with suppress(OSError):
            ops.unlink(path)
        raise


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """Give descriptor and size in bytes of a regular file, for reading; closed on leaving.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: A symbolic link, a directory, a device or a pipe lies there.
        StorageError: The system refused.
    """
    ops = get_ops()
    with guard("open", path):
        fd = ops.open(path, _READ)
    try:
        with guard("look at", path):
            status = ops.fstat(fd)
        require_regular(status, path)
        yield fd, status.st_size
    finally:
        with suppress(OSError):  # nothing was written: a failing close loses nothing
            ops.close(fd)


def require_regular(status: os.stat_result, path: Path) -> None:
    """Return when the status is that of a regular file.

    Raises:
        ForeignFileError: It is something else.
    """
    if not stat.S_ISREG(status.st_mode):
        msg = f"{os.fspath(path)} is not a regular file (mode {stat.filemode(status.st_mode)})."
        raise ForeignFileError(msg, next_step="Move it away.", path=os.fspath(path))


def write_all(fd: int, data: Bytes, offset: int, path: Path) -> None:
    """Return when all of ``data`` was taken at ``offset``; short writes are continued.

    Raises:
        StorageError: The system refused; part of the data may have been written.
    """
    view = memoryview(data).cast("B")
    with guard("write to", path, need_bytes=len(view), creating=True):
        write_view(fd, view, offset, path)


def write_view(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """As `write_all`, of bytes; the system's errors are the caller's to name."""
    ops = get_ops()
    done = 0
    while done < len(view):
        taken = ops.pwrite(fd, view[done:] if done else view, offset + done)
        done += progress(taken, path)


def progress(taken: int, path: Path) -> int:
    """Return ``taken``, the result of a write; a write that takes nothing would be tried for ever.

    Raises:
        StorageError: Nothing was taken.
    """
    if taken <= 0:
        msg = f"A write to {os.fspath(path)} took no bytes."
        step = "Look at the file system and the kernel's log."
        raise StorageError(msg, next_step=step, path=os.fspath(path), operation="write to")
    return taken


def fill(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
    """Return when the buffers hold the file's bytes from ``offset`` on, in order.

    Args:
        fd: Open for reading.
        buffers: ``IOV_MAX`` at most; writable, flat, of bytes, none of them empty.
        offset: Where in the file.
        path: For the error.

    Raises:
        CorruptFileError: The file ends before the buffers are full.
        StorageError: The system refused.
    """
    ops = get_ops()
    want = sum(map(len, buffers))
    with guard("read", path):
        got = ops.preadv(fd, buffers, offset)
        while got < want:
            rest = _after(buffers, got)
            more = ops.preadv(fd, rest, offset + got)
            if more <= 0:
                raise ends_early(path, offset + want, offset + got)
            got += more


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the buffers behind their first ``done`` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def ends_early(path: Path, expected: int, found: int) -> CorruptFileError:
    """Return the error of a file that is shorter than it must be, or has another size."""
    return CorruptFileError(
        f"{os.fspath(path)} has {found:,} bytes where {expected:,} are expected.",
        next_step="Use another generation.",
        path=os.fspath(path),
        expected=expected,
        found=found,
    )
