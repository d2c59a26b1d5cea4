"""Files gone through from front to back in bounded memory, read ahead and written behind. Layer 2.

Both ends of a copy whose bytes keep their order, however they are spread over files: a
`ForwardReader` compares every piece that it touches with its digest, a `ForwardWriter` takes the
digests of what it writes. Chunks lie in a fixed set of page-aligned `Buffers`, so that memory
doesn't depend on the files' sizes.
"""

from __future__ import annotations

import os
import queue
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import xxhash

from dist_ckpt.errors import SettingError, UsageError
from dist_ckpt.storage._arena import Arena
from dist_ckpt.storage._digest import FileDigest
from dist_ckpt.storage._direct import DirectReader, DirectWriter, preallocate
from dist_ckpt.storage._files import ends_early, new_file, open_regular
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._ops import PAGE_BYTES, PIECE_BYTES, get_ops, round_up
from dist_ckpt.storage._read import require_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor, Future
    from types import TracebackType
    from typing import Self

    from dist_ckpt.storage._types import ByteArray, Path

_LEAST_CHUNK_BYTES: Final = 16 * PAGE_BYTES


class Buffers:
    """Equal page-aligned buffers in one arena, handed out and taken back. Any thread.

    Args:
        least: So many there must be: what one thread may hold at a time, and one more.
        memory_bytes: How much they may take together.

    Attributes:
        chunk_bytes: Size of each, a power of two, `PIECE_BYTES` at most.

    Raises:
        SettingError: The memory is too small for that many.
        StorageError: The memory can't be had.
    """

    def __init__(self, least: int, memory_bytes: int) -> None:
        self.chunk_bytes = PIECE_BYTES
        while self.chunk_bytes > _LEAST_CHUNK_BYTES and self.chunk_bytes * least > memory_bytes:
            self.chunk_bytes //= 2
        if self.chunk_bytes * least > memory_bytes:
            need = _LEAST_CHUNK_BYTES * least
            raise SettingError(
                f"{memory_bytes:,} bytes of memory are too few for that many files at a time; "
                f"{need:,} are needed.",
                next_step=f"Give at least {-(-need // 2**20)} MiB.",
                expected=need,
                found=memory_bytes,
            )
        self._arena = Arena(self.chunk_bytes * least)
        self._free: queue.SimpleQueue[ByteArray] = queue.SimpleQueue()
        for at in range(0, self.chunk_bytes * least, self.chunk_bytes):
            self.give(self._arena.array[at : at + self.chunk_bytes])

    def take(self) -> ByteArray:
        """Return a buffer, once one is free; what it holds means nothing."""
        return self._free.get()

    def give(self, buffer: ByteArray) -> None:
        """Have a buffer back."""
        self._free.put(buffer)

    def close(self) -> None:
        """Give the memory back, once nobody holds a view of it."""
        self._free = queue.SimpleQueue()
        self._arena.close()


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


class ForwardWriter:
    """Context manager: a new file written from front to back; durable once left without an error.

    Left by an exception, the file is gone. Its mode is 0400. ``digest`` tells what was written.
    Holds one buffer, and one for each write under way. One thread.

    Args:
        path: Must not exist.
        size_bytes: What it will have; bytes that nobody gives are zeros.
        buffers: Where chunks lie.
        pool: Writes behind.

    Raises:
        StorageError, NoSpaceError: On entering, writing or leaving.
    """

    def __init__(self, path: Path, size_bytes: int, buffers: Buffers, pool: Executor) -> None:
        self.path = os.fspath(path)
        self.digest: FileDigest | None = None
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

        def work() -> None:
            try:
                file.put(buffer.data, start, stop)
            finally:
                buffers.give(buffer)

        for write in [write for write in self._writes if write.done()]:
            self._writes.remove(write)
            try:
                write.result()
            except BaseException:
                buffers.give(buffer)
                raise
        self._writes.append(self._pool.submit(work))
