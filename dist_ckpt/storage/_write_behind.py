"""Files written from front to back in bounded memory, behind whoever gives the bytes. Layer 2, I/O.

The other end of a copy that `_read_ahead` begins. Digests are taken of what is written; SHA-256,
far slower than the others, on a thread of its own.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import wait
from contextlib import ExitStack
from typing import TYPE_CHECKING

import xxhash

from dist_ckpt.errors import UsageError
from dist_ckpt.storage._digest import FileDigest
from dist_ckpt.storage._direct import DirectWriter, preallocate
from dist_ckpt.storage._files import new_file
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._ops import PIECE_BYTES, get_ops, round_up
from dist_ckpt.storage._pool import hand_on

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future
    from types import TracebackType
    from typing import Self

    from dist_ckpt.storage._buffers import Buffers
    from dist_ckpt.storage._types import ByteArray, Path

__all__ = ["ForwardWriter"]


class ForwardWriter:
    """Context manager: a new file written from front to back; durable once left without an error.

    Left by an exception, the file is gone. Its mode is 0400. ``digest`` tells what was written, and
    ``sha256``, where it was wanted. Holds one buffer, and one for each write under way. One thread.

    Args:
        path: Must not exist.
        size_bytes: What it will have; bytes that nobody gives are zeros.
        buffers: Where chunks lie.
        pool: Writes behind.
        hasher: Of one thread, computes the SHA-256; None for none.

    Raises:
        StorageError, NoSpaceError: On entering, writing or leaving.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        buffers: Buffers,
        pool: Executor,
        *,
        hasher: Executor | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.digest: FileDigest | None = None
        self.sha256: str | None = None
        self._hasher = hasher
        self._sha256 = hashlib.sha256()
        self._hashed: list[Future[None]] = []  # the last, where there is one
        self._size_bytes = size_bytes
        self._buffers = buffers
        self._pool = pool
        self._end = 0
        self._chunk: ByteArray | None = None
        self._hash = xxhash.xxh3_128()
        self._pieces: list[str] = []
        self._writes: list[Future[None]] = []
        self._stack = ExitStack()
        self._file: DirectWriter | None = None
        self._fd = -1

    def __enter__(self) -> Self:
        """Make the file, its blocks reserved."""
        padded = round_up(self._size_bytes)
        with ExitStack() as undo:
            self._fd = undo.enter_context(new_file(self.path, mode=0o400, need_bytes=padded))
            preallocate(self._fd, self.path, padded)
            self._file = DirectWriter(self._fd, self.path, self._size_bytes)
            self._stack = undo.pop_all()
        return self

    def write(self, at: int, data: ByteArray) -> None:
        """Take bytes for ``at``, behind all that was taken before; zeros in between.

        Raises:
            UsageError: They don't lie behind, or don't fit the file.
            StorageError: The system refused these or earlier ones.
        """
        if at < self._end or at + data.nbytes > self._size_bytes:
            raise UsageError(
                f"{data.nbytes:,} bytes for {at:,} of {self.path} don't go behind "
                f"{self._end:,} of {self._size_bytes:,}.",
                next_step="Write from front to back.",
                path=self.path,
            )
        self._skip(at)
        while data.nbytes:
            part = self._room(data.nbytes)
            part[:] = data[: part.nbytes]
            data = data[part.nbytes :]
            self._advance(part.nbytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make the file durable, or remove it."""
        failure = error
        try:
            if error is None:
                self._skip(self._size_bytes)
                self._hand_over()
        except BaseException as caught:  # noqa: BLE001 - raised below, when the file is gone
            failure = caught
        # Descriptor and buffers are in use until the last write has come to its end.
        for write in self._writes:
            failure = write.exception() or failure
        if self._chunk is not None:
            self._buffers.give(self._chunk)
            self._chunk = None
        if failure is not None:
            self._stack.__exit__(type(failure), failure, failure.__traceback__)
            if error is None:
                raise failure
            return
        with self._stack:
            if round_up(self._size_bytes) != self._size_bytes:
                with guard("truncate", self.path):
                    get_ops().ftruncate(self._fd, self._size_bytes)
        self.digest = FileDigest.from_pieces(self._size_bytes, self._pieces)
        self.sha256 = self._sha256.hexdigest() if self._hasher is not None else None

    def _skip(self, at: int) -> None:
        while self._end < at:
            part = self._room(at - self._end)
            part[:] = 0
            self._advance(part.nbytes)

    def _room(self, num_bytes: int) -> ByteArray:
        """Return the memory of the next bytes, as many as the chunk in hand has room for."""
        if self._chunk is None:
            self._chunk = self._buffers.take()
        begin = self._end % self._buffers.chunk_bytes
        return self._chunk[begin : begin + num_bytes]

    def _advance(self, num_bytes: int) -> None:
        self._end += num_bytes
        if self._end % self._buffers.chunk_bytes == 0:
            self._hand_over()

    def _hand_over(self) -> None:
        """Have the chunk in hand written; failures of earlier ones come out here."""
        if self._chunk is None or self._file is None:
            return
        buffer, self._chunk = self._chunk, None
        stop = self._end
        start = (stop - 1) // self._buffers.chunk_bytes * self._buffers.chunk_bytes
        buffer[stop - start : round_up(stop - start)] = 0
        self._hash.update(buffer[: stop - start].data)
        if stop % PIECE_BYTES == 0 or stop == self._size_bytes:
            self._pieces.append(self._hash.hexdigest())
            self._hash.reset()
        file, buffers = self._file, self._buffers
        hashed = self._take_sum(buffer[: stop - start].data)

        def work() -> None:
            try:
                file.put(buffer.data, start, stop)
            finally:
                wait(hashed)
                buffers.give(buffer)
            for one in hashed:
                one.result()

        for write in [write for write in self._writes if write.done()]:
            self._writes.remove(write)
            try:
                write.result()
            except BaseException:
                buffers.give(buffer)
                raise
        self._writes.append(hand_on(self._pool, work))

    def _take_sum(self, view: memoryview) -> list[Future[None]]:
        if self._hasher is None:
            return []
        before = self._hashed

        def work() -> None:
            wait(before)  # over already, unless this is done here and not by the hasher
            self._sha256.update(view)

        self._hashed = [hand_on(self._hasher, work)]
        return self._hashed
