"""A file that grows at its end: journal, metrics, loss. Layer 2, I/O."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import StorageError, UsageError
from dist_ckpt.storage._files import fill, require_regular, write_all, write_view
from dist_ckpt.storage._guard import guard, named
from dist_ckpt.storage._names import sync_dir
from dist_ckpt.storage._ops import get_ops
from dist_ckpt.storage._small import replace_durable
from dist_ckpt.storage._unsynced import Unsynced

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from dist_ckpt.storage._types import Bytes, Path

# Not O_APPEND: Linux ignores pwrite's offset there, and the closing bracket has to be written over.
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK


class AppendFile:
    """A file with one writer that appends; made, with its name durable, where it doesn't exist.

    ``append``, ``overwrite_tail`` and ``truncate`` belong to one thread at a time; ``sync`` and
    ``close`` may be called from others meanwhile. What was written since the last sync is kept in
    memory, to be written again should a sync fail.

    Args:
        path: The file; its parent exists.
        mode: Permission bits of a new file.

    Raises:
        StorageError: The system refused.
        ForeignFileError: Not a regular file, or a symbolic link.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self.path: str = os.fspath(path)
        self._closing = threading.Lock()
        # Held for a write to the page cache at most, never while the disk is waited for.
        self._writing = threading.Lock()
        self._fd: int | None = None
        self._size: int = 0
        # A failed write has left more than `_size` bytes in the file, and it couldn't be cut.
        self._is_ragged = False
        self._unsynced = Unsynced(0)
        self.created: bool = self._open(mode)
        if self.created:
            try:
                sync_dir(os.path.dirname(self.path) or ".")
            except BaseException:
                self.close()
                raise

    @property
    def size(self) -> int:
        """Bytes in the file, all that was appended included."""
        return self._size

    def append(self, data: Bytes) -> None:
        """Return when ``data`` stands at the end of the file, not yet durable.

        Raises:
            StorageError: The system refused; the file ends where it ended before, as far as the
                system lets it be cut.
            UsageError: The file is closed.
        """
        self._write(self._size, data)

    def overwrite_tail(self, offset: int, data: Bytes) -> None:
        """Return when the file is its first ``offset`` bytes and then ``data``, not yet durable.

        A crash, or an error, may leave a part of ``data`` over the old tail.

        Raises:
            StorageError: The system refused; the file ends at ``offset``, as far as the system lets
                it be cut.
            UsageError: ``offset`` lies outside the file, or the file is closed.
        """
        if not 0 <= offset <= self._size:
            msg = (
                f"{self.path} has {self._size:,} bytes: nothing can be written over at {offset:,}."
            )
            raise UsageError(msg, next_step="Give an offset inside the file.", path=self.path)
        before = self._size
        self._write(offset, data)
        if self._size < before:
            self.truncate(self._size)

    def truncate(self, size_bytes: int) -> None:
        """Return when the file has its first ``size_bytes`` bytes only, not yet durable.

        Raises:
            StorageError: The system refused.
            UsageError: The file is shorter, or closed.
        """
        if not 0 <= size_bytes <= self._size:
            msg = f"{self.path} has {self._size:,} bytes: it can't be cut to {size_bytes:,}."
            raise UsageError(msg, next_step="Give a size inside the file.", path=self.path)
        with self._writing:
            with guard("truncate", self.path):
                get_ops().ftruncate(self._open_fd(), size_bytes)
            self._is_ragged = False
            self._grown(size_bytes, b"")

    def doubt(self, offset: int) -> None:
        """Have the next sync write anew what lies from ``offset`` on, as after a sync that failed.

        For bytes that were found in the file: whether whoever wrote them could sync them isn't
        known, and the system tells of a failure once only. Not beside an append.

        Raises:
            StorageError: The system refused.
            UsageError: The file is closed.
        """
        with self._writing:
            data = bytearray(self._size - offset)
            if data:
                fill(self._open_fd(), [memoryview(data)], offset, self.path)
                self._unsynced.put(offset, data)
                self._unsynced.is_doubtful = True

    def touch(self) -> None:
        """Have the file be changed now for whoever looks at its time; no error comes of it."""
        with self._writing, suppress(OSError):
            if self._fd is not None:
                get_ops().utime(self._fd)

    def has_its_name(self) -> bool:
        """Return whether ``path`` still leads to this file. Any thread."""
        with self._closing:
            fd = self._open_fd()
            with guard("look at", self.path):
                own = get_ops().fstat(fd)
        try:
            there = get_ops().lstat(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise named(error, "look at", self.path) from error
        return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)

    def revive(self) -> None:
        """Return when ``path`` durably names all that was appended, in a new file if need be.

        For a name that was taken away: the bytes are still there for whoever has the file open.
        What lies at ``path`` is replaced at once. Not beside an append.

        Raises:
            StorageError: The system refused; the file is as it was.
        """
        if self.has_its_name():
            return
        data = bytearray(self._size)
        if data:
            fill(self._open_fd(), [memoryview(data)], 0, self.path)
            with self._writing:  # a sync on another thread may be letting go of the copy
                data[self._unsynced.start :] = self._unsynced.data
        replace_durable(self.path, data)
        with self._closing:
            ops = get_ops()
            with guard("open", self.path):
                fd = ops.open(self.path, _OPEN)
            before, self._fd = self._fd, fd
            self._unsynced = Unsynced(self._size)
            if before is not None:
                with suppress(OSError):  # of the file without a name
                    ops.close(before)

    def sync(self) -> None:
        """Return when all that was appended before the call is durable.

        Any thread; lets go of the GIL. After a sync that failed, the next one writes anew what
        the failed one should have made durable: a sync alone would succeed and say nothing.

        Raises:
            StorageError: The system refused. What was appended since the last sync may be lost.
            UsageError: The file is closed.
        """
        with self._closing:  # the descriptor's number may be another file's once it is closed
            fd = self._open_fd()
            unsynced = self._unsynced
            with self._writing:
                if unsynced.is_doubtful:
                    write_all(fd, unsynced.data, unsynced.start, self.path)
                unsynced.begin_sync()
                unsynced.is_doubtful = True  # until it has succeeded
            with guard("sync", self.path):
                get_ops().fdatasync(fd)
            with self._writing:
                unsynced.end_sync()

    def close(self) -> None:
        """Give the descriptor back, without a sync. Twice does no harm."""
        with self._closing:
            fd, self._fd = self._fd, None
            if fd is not None:
                with guard("close", self.path):
                    get_ops().close(fd)

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def _open(self, mode: int) -> bool:
        """Open the file and return whether it was made just now."""
        ops = get_ops()
        with guard("open", self.path, creating=True):
            try:
                self._fd = ops.open(self.path, _OPEN | os.O_CREAT | os.O_EXCL, mode)
                created = True
            except FileExistsError:
                self._fd = ops.open(self.path, _OPEN)
                created = False
        try:
            with guard("look at", self.path):
                status = ops.fstat(self._fd)
            require_regular(status, self.path)
        except BaseException:
            self.close()
            raise
        self._size = status.st_size
        self._unsynced = Unsynced(self._size)
        return created

    def _open_fd(self) -> int:
        if self._fd is None:
            msg = f"{self.path} is closed."
            raise UsageError(msg, next_step="Open it again.", path=self.path)
        return self._fd

    def _write(self, offset: int, data: Bytes) -> None:
        # No generator's context manager on this path: it runs at every step of the training.
        with self._writing:
            self._write_locked(offset, data)

    def _write_locked(self, offset: int, data: Bytes) -> None:
        fd = self._open_fd()
        if self._is_ragged:  # what follows may be shorter than what is left there
            with guard("truncate", self.path):
                get_ops().ftruncate(fd, self._size)
            self._is_ragged = False
        try:
            write_view(fd, memoryview(data), offset, self.path)
        except OSError as error:
            try:
                get_ops().ftruncate(fd, offset)
            except OSError:
                self._is_ragged = True
            self._grown(offset, b"")
            if isinstance(error, StorageError):
                raise
            need_bytes = len(data)
            raise named(
                error, "write to", self.path, need_bytes=need_bytes, creating=True
            ) from error
        self._grown(offset, data)

    def _grown(self, offset: int, data: Bytes) -> None:
        """Note that the file is its first ``offset`` bytes and then ``data``."""
        self._size = offset + len(data)
        self._unsynced.put(offset, data)
