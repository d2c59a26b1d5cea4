"""A big file written from front to back in chunks of any size, and digested. Layer 2, I/O."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import xxhash

from dist_ckpt.errors import UsageError
from dist_ckpt.storage._digest import FileDigest, flat
from dist_ckpt.storage._files import new_file, write_all
from dist_ckpt.storage._ops import PIECE_BYTES
from dist_ckpt.storage._space import check_space

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from dist_ckpt.storage._types import AnyArray, Bytes, Path


class StreamWriter:
    """Context manager: a new file that takes chunks in order; durable once left without an error.

    Left by an exception, the file is gone. After the ``with``, ``digest`` and ``sha256`` tell what
    was written. One thread.

    Args:
        path: Must not exist.
        size_bytes: How much will be written: the space is checked beforehand.
        mode: Permission bits of the finished file.
        sha256: Whether to compute it too; it halves the speed.

    Raises:
        StorageError: On entering, writing or leaving: the system refused.
        NoSpaceError: No room.
    """

    def __init__(
        self, path: Path, size_bytes: int, *, mode: int = 0o400, sha256: bool = True
    ) -> None:
        self.path: str = os.fspath(path)
        self.written_bytes: int = 0
        self.digest: FileDigest | None = None
        self.sha256: str | None = None
        self._size_bytes = size_bytes
        self._mode = mode
        self._sha256 = hashlib.sha256() if sha256 else None
        self._piece = xxhash.xxh3_128()
        self._pieces: list[str] = []
        self._stack = ExitStack()
        self._fd: int | None = None

    def write(self, data: Bytes | AnyArray) -> None:
        """Return when ``data`` was taken behind what was written before; not yet durable.

        Raises:
            UsageError: More than ``size_bytes`` in all, or outside the ``with``.
            StorageError: The system refused.
        """
        view = flat(data)
        if self._fd is None or self.written_bytes + len(view) > self._size_bytes:
            raise self._misused(self.written_bytes + len(view))
        write_all(self._fd, view, self.written_bytes, self.path)
        if self._sha256 is not None:
            self._sha256.update(view)
        while len(view):
            room = PIECE_BYTES - self.written_bytes % PIECE_BYTES
            part, view = view[:room], view[room:]
            self._piece.update(part)
            self.written_bytes += len(part)
            if len(part) == room:
                self._end_piece()

    def __enter__(self) -> Self:
        """Make the file."""
        check_space(os.path.dirname(self.path) or ".", self._size_bytes)
        file = new_file(self.path, mode=self._mode, need_bytes=self._size_bytes)
        self._fd = self._stack.enter_context(file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make the file durable, or remove it."""
        self._fd = None
        if error is None and self.written_bytes != self._size_bytes:
            short = self._misused(self.written_bytes)
            self._stack.__exit__(type(short), short, None)
            raise short
        self._stack.__exit__(kind, error, trace)
        if error is None:
            if self.written_bytes % PIECE_BYTES:
                self._end_piece()
            self.digest = FileDigest.from_pieces(self.written_bytes, self._pieces)
            self.sha256 = None if self._sha256 is None else self._sha256.hexdigest()

    def _end_piece(self) -> None:
        self._pieces.append(self._piece.hexdigest())
        self._piece.reset()

    def _misused(self, found: int) -> UsageError:
        return UsageError(
            f"{self.path} was to get {self._size_bytes:,} bytes, not {found:,}, inside one with.",
            next_step="Give the right size.",
            path=self.path,
            expected=self._size_bytes,
            found=found,
        )
