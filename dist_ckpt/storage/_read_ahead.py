"""Files gone through from front to back in bounded memory, read ahead. Layer 2, I/O.

One end of a copy whose bytes keep their order, however they are spread over files; the other is
`_write_behind`. Every piece that is touched is compared with its digest.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import xxhash

from dist_ckpt.storage._digest import FileDigest
from dist_ckpt.storage._direct import DirectReader
from dist_ckpt.storage._files import ends_early, open_regular
from dist_ckpt.storage._ops import PIECE_BYTES
from dist_ckpt.storage._read import require_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor, Future

    from dist_ckpt.storage._buffers import Buffers
    from dist_ckpt.storage._types import ByteArray, Path

__all__ = ["ForwardReader"]


class ForwardReader:
    """Reads a file from front to back, the next chunk always on its way; holds two buffers.

    Every piece that is touched is read to its end and compared; bytes may be handed out before the
    end of their piece was seen, so nothing made of them counts before `finish`. Going back works,
    and costs reading the piece again. One thread.

    Args:
        path: The file.
        digest: What it must be.
        buffers: Where chunks lie.
        pool: Reads ahead.
        direct: Past the page cache.

    Attributes:
        compared: Numbers of the pieces that were found good.

    Raises:
        NotFoundError, ForeignFileError, CorruptFileError, StorageError: As `read_segments`.
    """

    def __init__(
        self,
        path: Path,
        digest: FileDigest,
        buffers: Buffers,
        pool: Executor,
        *,
        direct: bool = False,
    ) -> None:
        self.compared: set[int] = set()
        self._label = os.fspath(path)
        self._digest = digest
        self._buffers = buffers
        self._pool = pool
        self._chunk_bytes = buffers.chunk_bytes
        self._at: int | None = None  # first byte of the chunk in hand
        self._chunk: ByteArray | None = None
        self._ahead: tuple[int, ByteArray, Future[None]] | None = None
        self._hash = xxhash.xxh3_128()
        self._stack = ExitStack()
        fd, size = self._stack.enter_context(open_regular(path))
        if size != digest.size_bytes:
            self._stack.close()
            raise ends_early(path, digest.size_bytes, size)
        self._file = DirectReader(fd, path, size, direct=direct)

    def read(self, start: int, stop: int) -> Iterator[ByteArray]:
        """Yield the bytes of a range in order, as views that are good until the next is asked for.

        Raises:
            DigestMismatchError: A piece isn't what was written; carries ``path`` and ``piece``.
            CorruptFileError: The file has become shorter.
            StorageError: The system refused.
        """
        while start < stop:
            first = start - start % self._chunk_bytes
            chunk = self._get(first)
            end = min(stop, first + self._chunk_bytes)
            yield chunk[start - first : end - first]
            start = end

    def finish(self) -> None:
        """The piece that was touched last is read to its end and compared; the same errors."""
        if self._at is not None:
            piece_stop = self._digest.piece_range(self._at // PIECE_BYTES)[1]
            while self._at + self._chunk_bytes < piece_stop:
                self._step(self._at + self._chunk_bytes)

    def close(self) -> None:
        """Give buffers and descriptor back."""
        self._drop_ahead()
        if self._chunk is not None:
            self._buffers.give(self._chunk)
            self._chunk = self._at = None
        self._stack.close()

    def _get(self, first: int) -> ByteArray:
        """Return the chunk that begins at ``first``; the pieces on the way are compared."""
        if self._at != first:
            piece = first - first % PIECE_BYTES
            at = self._at
            if at is None or not at < first or at < piece - self._chunk_bytes:
                # Not on the way: end the piece in hand, begin the other at its start.
                self.finish()
                self._step(piece)
            while self._at is not None and self._at < first:
                self._step(self._at + self._chunk_bytes)
        if self._chunk is None:
            raise RuntimeError("a chunk was read")
        return self._chunk

    def _step(self, at: int) -> None:
        """Have the chunk at ``at`` in hand, hashed, and the one behind it on its way."""
        if self._ahead is None or self._ahead[0] != at:
            self._drop_ahead()
            self._read_ahead(at)
        if self._chunk is not None:
            self._buffers.give(self._chunk)
            self._chunk = None
        if self._ahead is None:
            raise RuntimeError("the chunk is on its way")
        _, buffer, future = self._ahead
        future.result()  # what fails stays "on its way", so that `close` waits for it
        self._ahead = None
        self._at, self._chunk = at, buffer
        self._compare(at)
        if at + self._chunk_bytes < self._digest.size_bytes:
            self._read_ahead(at + self._chunk_bytes)

    def _read_ahead(self, at: int) -> None:
        buffer = self._buffers.take()
        stop = min(at + self._chunk_bytes, self._digest.size_bytes)
        try:
            future = self._pool.submit(self._file.fill, buffer.data, at, stop)
        except BaseException:
            self._buffers.give(buffer)
            raise
        self._ahead = (at, buffer, future)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            _, buffer, future = self._ahead
            if not future.cancel():
                future.exception()  # the buffer is in use until then; of no interest any more
            self._ahead = None
            self._buffers.give(buffer)

    def _compare(self, at: int) -> None:
        """Hash the chunk in hand; at the end of its piece, compare."""
        start, stop = self._digest.piece_range(at // PIECE_BYTES)
        end = min(at + self._chunk_bytes, stop)
        if at == start:
            self._hash.reset()
        if self._chunk is not None:
            self._hash.update(self._chunk[: end - at].data)
        if end == stop:
            require_same(self._label, at // PIECE_BYTES, self._digest, self._hash.hexdigest())
            self.compared.add(at // PIECE_BYTES)
