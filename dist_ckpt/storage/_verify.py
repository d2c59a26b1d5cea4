"""Whole files, read back and compared with what was written. Layer 2, I/O."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from dist_ckpt.errors import UsageError
from dist_ckpt.storage._arena import Arena
from dist_ckpt.storage._digest import digest_piece
from dist_ckpt.storage._direct import DirectReader
from dist_ckpt.storage._files import ends_early, fill, open_regular
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._ops import PIECE_BYTES
from dist_ckpt.storage._pool import for_each
from dist_ckpt.storage._read import require_same
from dist_ckpt.storage._shard import check_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dist_ckpt.storage._digest import FileDigest
    from dist_ckpt.storage._types import ByteArray, Path

_CHUNK_BYTES: Final = 4 * 2**20


def verify_file(
    path: Path,
    digest: FileDigest,
    *,
    direct: bool = True,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    pieces: Collection[int] | None = None,
) -> int:
    """Return the number of bytes read, past the page cache, all of them as they must be.

    Where O_DIRECT is refused, the kernel is asked to forget its pages before and after, which it
    may decline.

    Args:
        path: The file.
        digest: What it must be.
        direct: False reads through the page cache on purpose.
        threads: How many read, the calling one included; each takes a buffer of 16 MiB. Any thread
            may call.
        progress: Told the bytes of each piece when it was found good, by the thread that read it,
            one at a time.
        pieces: Which ones; default all.

    Raises:
        UsageError: A piece that the file doesn't have.
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        CorruptFileError: Another size.
        DigestMismatchError: A piece isn't what was written; carries ``piece``, ``expected`` and
            ``found``.
        StorageError: The system refused.
    """
    check_threads(threads)
    label = os.fspath(path)
    chosen = _choose(digest, pieces, label)
    with open_regular(path) as (fd, size):
        if size != digest.size_bytes:
            raise ends_early(label, digest.size_bytes, size)
        reader = _PieceReader(fd, label, digest, direct=direct, progress=progress)
        for_each(chosen, reader.worker, threads)
    ranges = map(digest.piece_range, chosen)
    return sum(stop - start for start, stop in ranges)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, 64 hexadecimal digits, read through the page cache.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused.
    """
    hasher = hashlib.sha256()
    with open_regular(path) as (fd, size):
        buffer = memoryview(bytearray(min(size, _CHUNK_BYTES)))
        for start in range(0, size, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, size - start)]
            fill(fd, [chunk], start, path)
            hasher.update(chunk)
    return hasher.hexdigest()


def map_file(path: Path) -> ByteArray:
    """Return a regular file's bytes as a read-only array that is paged in when touched.

    Reading a page that can't be read from the device, or that was cut off meanwhile, kills the
    process (SIGBUS): for files that nobody changes.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused.
    """
    with open_regular(path) as (fd, size), guard("map", path):
        if size == 0:
            empty: ByteArray = np.frombuffer(b"", dtype=np.uint8)
            return empty
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=np.uint8)


class _PieceReader:
    """Reads pieces of one file into a page-aligned buffer a thread, and compares them."""

    def __init__(
        self,
        fd: int,
        label: str,
        digest: FileDigest,
        *,
        direct: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._label = label
        self._digest = digest
        self._progress = progress
        self._telling = threading.Lock()
        self._file = DirectReader(fd, label, digest.size_bytes, direct=direct)

    def worker(self) -> Callable[[int], None]:
        """Return what reads a piece, with a buffer of its own."""
        arena = Arena(min(PIECE_BYTES, self._digest.size_bytes))
        buffer = arena.array.data

        def read_piece(piece: int) -> None:
            start, stop = self._digest.piece_range(piece)
            self._file.fill(buffer, start, stop)
            require_same(self._label, piece, self._digest, digest_piece(buffer[: stop - start]))
            if self._progress is not None:
                with self._telling:
                    self._progress(stop - start)

        return read_piece


def _choose(digest: FileDigest, pieces: Collection[int] | None, label: str) -> list[int]:
    count = len(digest.pieces)
    if pieces is None:
        return list(range(count))
    chosen = sorted(set(pieces))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < count:
        msg = f"{label} has {count} pieces; {chosen[0]} to {chosen[-1]} were asked for."
        raise UsageError(msg, next_step="Ask for pieces that it has.", path=label)
    return chosen
