"""Big transfers past the page cache, through it where the file system refuses that. Layer 2, I/O.

Direct transfers need memory, offset and length in whole pages. A refusal may come at the open or
at the first transfer; from then on the file is used through the cache.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.storage._files import ends_early, fill, progress
from dist_ckpt.storage._guard import guard, named
from dist_ckpt.storage._ops import PAGE_BYTES, get_ops, round_up

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Path

_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS)


def _try_direct(fd: int, path: Path) -> bool:
    try:
        get_ops().set_direct(fd, on=True)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise named(error, "open", path) from error
        return False
    return True


class DirectWriter:
    """Writes parts of an open file from page-aligned memory; parts may be written by any thread.

    Args:
        fd: The file.
        path: For errors.
        size_bytes: Of the whole file, for errors.
    """

    def __init__(self, fd: int, path: Path, size_bytes: int) -> None:
        self._fd = fd
        self._path = path
        self._size_bytes = size_bytes
        self._direct = _try_direct(fd, path)

    def put(self, view: memoryview, start: int, stop: int) -> None:
        """Have bytes ``start`` to ``stop`` of the file; the last page may be written whole.

        Args:
            view: Of whole pages, no shorter than the part.
            start: On a page.
            stop: Behind the last byte.

        Raises:
            StorageError: The system refused.
        """
        at = start
        with guard("write to", self._path, need_bytes=self._size_bytes, creating=True):
            while at < stop:
                at += self._put_some(view, start, at, stop)

    def _put_some(self, view: memoryview, start: int, at: int, stop: int) -> int:
        direct = self._direct
        end = round_up(stop) if direct else stop
        try:
            taken = get_ops().pwrite(self._fd, view[at - start : end - start], at)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT:
                raise
            self._leave_direct()
            return 0
        progress(taken, self._path)
        if direct and at + taken < stop and taken % PAGE_BYTES:
            # The next direct write has to begin on a page; less than one page at a time is no way
            # to go on.
            taken -= taken % PAGE_BYTES
            if not taken:
                self._leave_direct()
        return taken

    def _leave_direct(self) -> None:
        # Several threads may come here at once: both lines may be done twice.
        get_ops().set_direct(self._fd, on=False)
        self._direct = False


class DirectReader:
    """Reads parts of an open file into page-aligned memory; parts may be read by any thread.

    Args:
        fd: The file.
        path: For errors.
        size_bytes: What the file must have.
        direct: False reads through the page cache on purpose.
    """

    def __init__(self, fd: int, path: Path, size_bytes: int, *, direct: bool) -> None:
        self._fd = fd
        self._path = path
        self._size_bytes = size_bytes
        self._forget = direct  # where direct reads are refused
        self._direct = direct and _try_direct(fd, path)

    def fill(self, buffer: memoryview, start: int, stop: int) -> None:
        """Have bytes ``start`` to ``stop`` of the file at the beginning of the buffer.

        Args:
            buffer: Of whole pages, no shorter than the part.
            start: On a page.
            stop: Behind the last byte.

        Raises:
            CorruptFileError: The file ends before.
            StorageError: The system refused.
        """
        if self._direct and self._fill_direct(buffer, start, stop):
            return
        self._drop_pages(start, stop)
        fill(self._fd, [buffer[: stop - start]], start, self._path)
        self._drop_pages(start, stop)

    def _fill_direct(self, buffer: memoryview, start: int, stop: int) -> bool:
        """Return whether the buffer was filled; False where a direct read was refused."""
        ops = get_ops()
        want = round_up(stop - start)
        at = 0
        with guard("read", self._path):
            while at < stop - start:
                try:
                    got = ops.preadv(self._fd, [buffer[at:want]], start + at)
                except OSError as error:
                    if error.errno not in _NO_DIRECT:
                        raise
                    ops.set_direct(self._fd, on=False)
                    self._direct = False
                    return False
                if got <= 0:
                    raise ends_early(self._path, self._size_bytes, start + at)
                at += got
                if at < stop - start and at % PAGE_BYTES:
                    at -= at % PAGE_BYTES  # a direct read begins on a page
                    if got < PAGE_BYTES:
                        raise ends_early(self._path, self._size_bytes, start + at + got)
        return True

    def _drop_pages(self, start: int, stop: int) -> None:
        if self._forget:
            with suppress(OSError):  # advice only
                get_ops().fadvise_dontneed(self._fd, start, stop - start)


def preallocate(fd: int, path: Path, size_bytes: int) -> None:
    """Have blocks reserved for the file, where the file system can.

    Raises:
        NoSpaceError: There aren't enough.
    """
    if size_bytes == 0:
        return
    try:
        get_ops().fallocate(fd, size_bytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise named(error, "allocate blocks for", path, need_bytes=size_bytes) from error
