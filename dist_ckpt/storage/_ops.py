"""The seam between storage and the operating system: one method per system call. Layer 2, I/O.

Every function of ``storage`` reaches the file system through ``get_ops()``. Tests put a recorder or
a source of faults in its place with ``use_ops``; nothing else is ever put there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from dist_ckpt.storage._types import Bytes, Path

__all__ = ["PAGE_BYTES", "PIECE_BYTES", "Ops", "get_ops", "last_moved", "round_up", "use_ops"]

PAGE_BYTES: Final = 4096
"""Alignment of direct writes: offset, length and address."""

PIECE_BYTES: Final = 16 * 2**20
"""Bytes of one direct write, and of the part of a file that has a digest of its own."""

_FICLONE: Final = 0x40049409
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
#: Missing where Python was built against an older libc, as portable builds of it are.
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)

_libc = ctypes.CDLL(None, use_errno=True)
# The fallocate of libc, not posix_fallocate: the latter writes to every block where the file system
# can't do it.
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _fallocate.restype = ctypes.c_int


def round_up(size_bytes: int, unit_bytes: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of ``unit_bytes`` that isn't below ``size_bytes``."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class Ops:
    """The system calls that storage makes; each raises ``OSError`` as the kernel has it.

    May be called from any thread. Descriptors are never inherited by programs that are started.
    """

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Return a new descriptor of ``path``."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Give the descriptor back, also where this raises."""
        os.close(fd)

    def set_direct(self, fd: int, on: bool) -> None:
        """Turn O_DIRECT of an open descriptor on or off; EINVAL where the file system has none."""
        if not _O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        flags = flags | _O_DIRECT if on else flags & ~_O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        """Write at ``offset`` and return how many bytes were taken, maybe fewer than given."""
        taken = os.pwrite(fd, data, offset)
        _Seam.moved = time.monotonic()
        return taken

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill up to 1,024 buffers in order; return the bytes read, 0 at the end of the file."""
        taken = os.preadv(fd, buffers, offset)
        _Seam.moved = time.monotonic()
        return taken

    def is_cached(self, fd: int, offset: int) -> bool:
        """Return whether the byte at ``offset`` is in the page cache; True where nobody tells."""
        if _NOWAIT is None:
            return True
        try:
            os.preadv(fd, [bytearray(1)], offset, _NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, NotImplementedError):
            return True  # nobody knows the flag, or an error that the read itself will meet
        return True

    def fsync(self, fd: int) -> None:
        """Make data and metadata durable; for a directory, its entries."""
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """Make data durable, and of the metadata what is needed to read it."""
        os.fdatasync(fd)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Reserve blocks for the first ``size_bytes``; EOPNOTSUPP or ENOSYS where that can't be."""
        if _fallocate is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        while _fallocate(fd, 0, 0, size_bytes) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        """Set the file's size."""
        os.ftruncate(fd, size_bytes)

    def fadvise_dontneed(self, fd: int, offset: int, size_bytes: int) -> None:
        """Ask the kernel to forget clean pages of a range (size 0: to the end)."""
        os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def fchmod(self, fd: int, mode: int) -> None:
        """Set the permission bits of an open file."""
        os.fchmod(fd, mode)

    def utime(self, fd: int) -> None:
        """Have an open file be changed now, as far as its times tell."""
        os.utime(fd)

    def flock(self, fd: int, operation: int) -> None:
        """Apply an advisory lock of the whole file; BlockingIOError where LOCK_NB would wait."""
        fcntl.flock(fd, operation)

    def clone(self, src_fd: int, dst_fd: int) -> None:
        """Make the destination share all blocks of the source (FICLONE)."""
        fcntl.ioctl(dst_fd, _FICLONE, src_fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def stat(self, path: Path) -> os.stat_result:
        """Return the status of what ``path`` leads to."""
        return os.stat(path)

    def lstat(self, path: Path) -> os.stat_result:
        """Return the status of ``path`` itself, links not followed."""
        return os.lstat(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """Return the status of the file system that holds ``path``."""
        return os.statvfs(path)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory, in no order."""
        return os.listdir(path)

    def rename(self, src: Path, dst: Path) -> None:
        """Rename, replacing a file or an empty directory at ``dst``."""
        os.rename(src, dst)

    def link(self, src: Path, dst: Path) -> None:
        """Give the file at ``src`` a second name; symbolic links are not followed."""
        os.link(src, dst, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove the name of a file."""
        os.unlink(path)

    def mkdir(self, path: Path, mode: int) -> None:
        """Make a directory."""
        os.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


class _Seam:
    current: Ops = Ops()
    moved: float = 0.0


def last_moved() -> float:
    """Return when a read or write of this process last came back, by time.monotonic(); 0: never."""
    return _Seam.moved


def get_ops() -> Ops:
    """Return the operations in force in this process."""
    return _Seam.current


class use_ops:  # noqa: N801 - reads as a function: ``with use_ops(recorder):``
    """Context manager: inside, all of storage in this process works through ``ops``.

    A class rather than a generator, so that a caller who enters and forgets the object doesn't undo
    it by garbage collection.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._before: list[Ops] = []

    def __enter__(self) -> Ops:
        """Put ``ops`` in force."""
        self._before.append(_Seam.current)
        _Seam.current = self._ops
        return self._ops

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put back what was in force before."""
        _Seam.current = self._before.pop()
