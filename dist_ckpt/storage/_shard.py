"""Big files from a page-aligned buffer, by a few threads, past the page cache. Layer 2, I/O."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dist_ckpt.errors import SettingError
from dist_ckpt.storage._digest import FileDigest, digest_piece, piece_count
from dist_ckpt.storage._direct import DirectWriter, preallocate
from dist_ckpt.storage._files import new_file
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._ops import PAGE_BYTES, PIECE_BYTES, get_ops, round_up
from dist_ckpt.storage._pool import for_each
from dist_ckpt.storage._space import check_space

if TYPE_CHECKING:
    from dist_ckpt.storage._types import ByteArray, Path


def write_shard(path: Path, buffer: ByteArray, size_bytes: int, *, threads: int = 4) -> FileDigest:
    """Return the digest of a new, durable file of the first ``size_bytes`` of ``buffer``.

    Its mode is 0400. Written with O_DIRECT in pieces of 16 MiB, each digested by the thread that
    writes it; up to one piece, by the calling thread. Where the file system has no O_DIRECT, or
    refuses it at a write, through the page cache. The GIL is let go of in all long calls. The name
    isn't durable until its directory is synced.

    Args:
        path: Must not exist.
        buffer: Flat ``uint8``, page-aligned, no shorter than ``size_bytes`` rounded up to whole
            pages; not changed by anybody during the call. An ``Arena``'s array, or a part of one
            from a page on.
        size_bytes: True size of the file.
        threads: How many write, the calling one included. Any thread may call.

    Raises:
        SettingError: The buffer isn't aligned, flat or long enough.
        NoSpaceError: Not enough room, found before or while writing.
        StorageError: The system refused; carries ``path``, ``operation`` and ``errno``.

    After any error the file is gone. A failed sync isn't tried again.
    """
    _check(buffer, size_bytes, threads)
    padded_bytes = round_up(size_bytes)
    check_space(os.path.dirname(os.fspath(path)) or ".", padded_bytes)
    with new_file(path, mode=0o400, need_bytes=padded_bytes) as fd:
        preallocate(fd, path, padded_bytes)
        writer = _PieceWriter(fd, path, buffer, size_bytes)
        for_each(range(len(writer.pieces)), lambda: writer.write, threads)
        if padded_bytes != size_bytes:
            with guard("truncate", path):
                get_ops().ftruncate(fd, size_bytes)
    return FileDigest.from_pieces(size_bytes, writer.pieces)


class _PieceWriter:
    """Writes pieces of one buffer to one file; ``pieces`` has the digests of those written."""

    def __init__(self, fd: int, path: Path, buffer: ByteArray, size_bytes: int) -> None:
        self.pieces: list[str] = [""] * piece_count(size_bytes)
        self._view = buffer.data
        self._size_bytes = size_bytes
        self._file = DirectWriter(fd, path, size_bytes)

    def write(self, piece: int) -> None:
        """Write one piece whole and keep its digest."""
        start = piece * PIECE_BYTES
        stop = min(start + PIECE_BYTES, self._size_bytes)
        self.pieces[piece] = digest_piece(self._view[start:stop])
        self._file.put(self._view[start:], start, stop)


def _check(buffer: ByteArray, size_bytes: int, threads: int) -> None:
    flat = buffer.ndim == 1 and buffer.dtype == "uint8" and buffer.flags.c_contiguous
    aligned = buffer.ctypes.data % PAGE_BYTES == 0
    if size_bytes < 0 or not flat or not aligned or buffer.nbytes < round_up(size_bytes):
        msg = (
            f"A file of {size_bytes:,} bytes can't be written from this buffer: "
            f"{buffer.nbytes:,} bytes of {buffer.dtype}, "
            f"{buffer.ndim} dimensions, address {buffer.ctypes.data:#x}."
        )
        step = f"Give a flat uint8 buffer aligned to {PAGE_BYTES} bytes that holds whole pages."
        raise SettingError(msg, next_step=step, size_bytes=size_bytes)
    check_threads(threads)


def check_threads(threads: int) -> None:
    """Return when ``threads`` is one or more.

    Raises:
        SettingError: It isn't.
    """
    if threads < 1:
        msg = f"{threads} threads were asked for."
        raise SettingError(msg, next_step="Give 1 or more.", threads=threads)
