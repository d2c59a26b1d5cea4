"""The arena: page-aligned host memory, allocated once and reused by every save. Layer 2, no I/O."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import StorageError, UsageError
from dist_ckpt.storage._ops import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from dist_ckpt.storage._types import ByteArray

_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_STRIDE_BYTES: Final = 64 * 2**20

_libc = ctypes.CDLL(None, use_errno=True)
# By ctypes because mmap.madvise holds the GIL, which would stop training while gigabytes are
# populated.
_madvise = getattr(_libc, "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _madvise.restype = ctypes.c_int


class Arena:
    """Private, page-aligned memory for direct writes, in huge pages where the kernel has them.

    Not inherited by forked children: a child that touches ``array`` is killed by the kernel.
    Without that, a loader worker forked during a write would make the next fill copy every page.

    Args:
        size_bytes: Wanted size; ``Arena.size_bytes`` is it rounded up to whole pages, one page at
            least.

    Raises:
        UsageError: A negative size.
        StorageError: The memory can't be had; carries ``operation`` and ``errno``.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 0:
            msg = f"An arena of {size_bytes} bytes was asked for."
            raise UsageError(msg, next_step="Give a size of 0 or more.", size_bytes=size_bytes)
        self.size_bytes: int = max(PAGE_BYTES, round_up(size_bytes))
        try:
            # Without MAP_PRIVATE Python's anonymous maps are shared memory, which never gets huge
            # pages.
            self._map: mmap.mmap | None = mmap.mmap(
                -1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError, ValueError) as error:
            code = getattr(error, "errno", None) or errno.ENOMEM
            raise no_memory("allocate", self.size_bytes, code) from error
        import numpy as np  # noqa: PLC0415 - looking at a run needs none, and its import is long

        self._array: ByteArray | None = np.frombuffer(self._map, dtype=np.uint8)
        self._advise(
            0, self.size_bytes, _MADV_HUGEPAGE
        )  # a kernel without them says EINVAL: as well
        self._advise(0, self.size_bytes, _MADV_DONTFORK)

    @property
    def array(self) -> ByteArray:
        """The memory as a flat ``uint8`` array of ``size_bytes``; zeros until written.

        Raises:
            UsageError: The arena is closed.
        """
        if self._array is None:
            msg = "The arena is closed."
            raise UsageError(msg, next_step="Make a new one.")
        return self._array

    def populate(self) -> None:
        """Give every page its memory now, so that the first fill runs at full speed; contents stay.

        Lets go of the GIL. Any thread.

        Raises:
            StorageError: The machine has no memory left for it.
        """
        array = self.array
        for start in range(0, self.size_bytes, _POPULATE_STRIDE_BYTES):
            # In strides, so that other threads get at the address space in between.
            stop = min(start + _POPULATE_STRIDE_BYTES, self.size_bytes)
            code = self._advise(start, stop - start, _MADV_POPULATE_WRITE)
            if code in (errno.EINVAL, errno.ENOSYS):  # Linux before 5.14
                array[start:stop:PAGE_BYTES] |= 0
            elif code:
                raise no_memory("populate", self.size_bytes, code)

    def close(self) -> None:
        """Give the memory back, or as soon as the last view of it is gone. Twice does no harm."""
        self._array = None
        if self._map is not None:
            # A view that is still alive keeps the map: dropping our reference frees both.
            with suppress(BufferError):
                self._map.close()
            self._map = None

    def _advise(self, start: int, length: int, advice: int) -> int:
        """Return 0, or the error number of the refusal."""
        if _madvise is None:
            return errno.ENOSYS
        address = self.array.ctypes.data + start
        while _madvise(address, length, advice) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN):
                return code
        return 0


def no_memory(operation: str, size_bytes: int, code: int = errno.ENOMEM) -> StorageError:
    """Return the error of host memory that can't be had; it speaks against no file."""
    error = StorageError(
        f"Could not {operation} {size_bytes:,} bytes of host memory: {os.strerror(code)}.",
        next_step="Free some memory, or train with more ranks so that each one keeps less.",
        path=None,
        operation=operation,
        errno=code,
        size_bytes=size_bytes,
    )
    error.errno = code
    return error
