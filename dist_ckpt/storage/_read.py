"""Byte ranges of a file, read straight into the memory where they belong. Layer 2, I/O.

With a digest every piece that is touched is read whole and compared: what lies between the targets
goes into a scratch buffer, and the piece is hashed in the order of the file over targets and
scratch just filled, without a second copy. A piece that isn't in the page cache is read past it, by
more threads, and copied: from most devices that is far quicker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from dist_ckpt.errors import DigestMismatchError, UsageError
from dist_ckpt.storage._arena import Arena
from dist_ckpt.storage._digest import digest_piece
from dist_ckpt.storage._direct import DirectReader
from dist_ckpt.storage._files import IOV_MAX, ends_early, fill, open_regular
from dist_ckpt.storage._ops import PIECE_BYTES, get_ops
from dist_ckpt.storage._pool import for_each
from dist_ckpt.storage._shard import check_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dist_ckpt.storage._digest import FileDigest
    from dist_ckpt.storage._types import ByteArray, Path

# A gap up to this size is read along and thrown away: cheaper than another call.
_SMALL_GAP_BYTES: Final = 64 * 2**10
# Read and hashed in turns of this size, so that the hash finds the bytes in the processor's cache.
_TURN_BYTES: Final = 2 * 2**20


@dataclass(slots=True)
class Segment:
    """A byte range of a file and the memory that it belongs into.

    Attributes:
        offset: First byte in the file.
        target: Writable, flat, of bytes, ``length`` long; None where the range is only to be
            checked.
        length: Bytes; 0 is allowed and does nothing.
    """

    offset: int
    target: memoryview | None
    length: int


def read_segments(
    path: Path,
    segments: Sequence[Segment],
    digest: FileDigest | None,
    *,
    threads: int = 2,
    direct: bool = False,
    begin: float = 0.0,
    path_label: str | None = None,
) -> None:
    """Return when every target holds its bytes and every touched piece was as it must be.

    After an error the targets hold anything. The GIL is let go of while reading.

    Args:
        path: The file.
        segments: In the order of the file, not overlapping; gaps are fine.
        digest: What the file must be; without it, nothing but the size is checked.
        threads: How many read, the calling one included; twice as many, each with a buffer of 16
            MiB, past the page cache. Any thread may call.
        direct: With a digest, read past the page cache what isn't in it. Not where several
            processes read the same file: the cache has it for all of them.
        begin: Where to begin, as a share of the pieces from 0 up to 1; what lies before comes last.
        path_label: What to call the file in errors.

    Raises:
        UsageError: Segments out of order, or a target that isn't writable bytes of the right
            length.
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        CorruptFileError: The file has another size than the digest says, or is too short.
        DigestMismatchError: A piece isn't what was written; carries ``piece``, ``expected`` and
            ``found``.
        StorageError: The system refused.
    """
    check_threads(threads)
    label = os.fspath(path) if path_label is None else path_label
    plan = _Plan([segment for segment in segments if segment.length], label)
    with open_regular(path) as (fd, size):
        if digest is not None and size != digest.size_bytes:
            raise ends_early(label, digest.size_bytes, size)
        if plan.end > size:
            raise ends_early(label, plan.end, size)
        pieces = plan.pieces()
        first = int(begin * len(pieces))
        pieces = [*pieces[first:], *pieces[:first]]
        if digest is None:
            for_each(pieces, lambda: _unchecked(fd, plan), threads)
        else:
            checked = digest
            cold = _cold_pieces(fd, pieces) if direct else set()
            warm = [piece for piece in pieces if piece not in cold]
            for_each(warm, lambda: _checked(fd, plan, checked), threads)
            if cold:
                # A descriptor of its own: whether it is direct belongs to the open file.
                with open_regular(path) as (other, _):
                    file = DirectReader(other, label, size, direct=True)
                    for_each(sorted(cold), lambda: _bounced(file, plan, checked), 2 * threads)


def read_piece(path: Path, digest: FileDigest, number: int, buffer: ByteArray) -> None:
    """Have one whole piece of a file in ``buffer``, as it was written.

    Past the page cache, unless it is in there. The GIL is let go of while reading. Any thread.

    Args:
        path: The file.
        digest: What it must be.
        number: Of the piece.
        buffer: Page-aligned, of `PIECE_BYTES`, or of the file's size in whole pages.

    Raises:
        NotFoundError, ForeignFileError, CorruptFileError, DigestMismatchError, StorageError: As
            `read_segments`.
    """
    start, stop = digest.piece_range(number)
    with open_regular(path) as (fd, size):
        if size != digest.size_bytes:
            raise ends_early(path, digest.size_bytes, size)
        direct = not _is_cached(fd, start)
        DirectReader(fd, path, size, direct=direct).fill(buffer.data, start, stop)
    require_same(os.fspath(path), number, digest, digest_piece(buffer[: stop - start]))


class _Plan:
    """Segments, checked, and found again by piece."""

    def __init__(self, segments: list[Segment], label: str) -> None:
        self.label = label
        self._segments = segments
        count = len(segments)
        self._offsets: NDArray[np.int64] = np.fromiter(
            (segment.offset for segment in segments), np.int64, count
        )
        lengths = np.fromiter((segment.length for segment in segments), np.int64, count)
        self._ends: NDArray[np.int64] = self._offsets + lengths
        self._check(lengths)

    @property
    def end(self) -> int:
        """First byte behind the last segment."""
        return int(self._ends[-1]) if self._segments else 0

    def pieces(self) -> Sequence[int]:
        """Return the pieces that a segment touches, in order."""
        if not self._segments:
            return []
        first = self._offsets // PIECE_BYTES
        last = (self._ends - 1) // PIECE_BYTES
        marks = np.zeros(int(last[-1]) + 2, np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        touched: list[int] = np.flatnonzero(np.cumsum(marks)).tolist()
        return touched

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, memoryview | None]]:
        """Yield ``begin, end, target`` of each segment's part in a byte range, in order."""
        low = int(np.searchsorted(self._ends, start, side="right"))
        high = int(np.searchsorted(self._offsets, stop, side="left"))
        for segment in self._segments[low:high]:
            offset, length = segment.offset, segment.length
            begin, end = max(offset, start), min(offset + length, stop)
            target = segment.target
            if target is not None and end - begin != length:
                target = target[begin - offset : end - offset]
            yield begin, end, target

    def _check(self, lengths: NDArray[np.int64]) -> None:
        overlap = self._offsets[1:] < self._ends[:-1]
        if (lengths < 0).any() or (self._offsets[:1] < 0).any() or overlap.any():
            msg = f"The segments to read from {self.label} overlap or aren't in the file's order."
            raise UsageError(msg, next_step="Sort them by offset.", path=self.label)
        for segment in self._segments:
            target = segment.target
            if target is not None and (
                target.nbytes != segment.length
                or target.readonly
                or target.ndim != 1
                or target.itemsize != 1
                or not target.contiguous
            ):
                msg = (
                    f"The target for {segment.length:,} bytes at {segment.offset:,} of "
                    f"{self.label} has {target.nbytes:,} bytes, format {target.format!r}, "
                    f"{target.ndim} dimensions, read-only {target.readonly}."
                )
                step = "Give a writable, flat view of bytes of the same length."
                raise UsageError(msg, next_step=step, path=self.label)


def _checked(fd: int, plan: _Plan, digest: FileDigest) -> Callable[[int], None]:
    scratch = np.empty(min(PIECE_BYTES, digest.size_bytes), np.uint8).data

    def read_piece(piece: int) -> None:
        start, stop = digest.piece_range(piece)
        hasher = xxhash.xxh3_128()
        at = start
        for turn in _turns(_whole_piece(plan, start, stop, scratch)):
            fill(fd, turn, at, plan.label)
            for buffer in turn:
                hasher.update(buffer)
            at += sum(map(len, turn))
        require_same(plan.label, piece, digest, hasher.hexdigest())

    return read_piece


def _cold_pieces(fd: int, pieces: Sequence[int]) -> set[int]:
    """Return the pieces whose first byte isn't in the page cache."""
    return {piece for piece in pieces if not _is_cached(fd, piece * PIECE_BYTES)}


def _is_cached(fd: int, offset: int) -> bool:
    try:
        return get_ops().is_cached(fd, offset)
    except OSError:
        return True  # the read itself will meet it, and name it


def _bounced(file: DirectReader, plan: _Plan, digest: FileDigest) -> Callable[[int], None]:
    arena = Arena(min(PIECE_BYTES, digest.size_bytes))
    buffer = arena.array

    def read_piece(piece: int) -> None:
        start, stop = digest.piece_range(piece)
        file.fill(buffer.data, start, stop)
        require_same(plan.label, piece, digest, digest_piece(buffer[: stop - start]))
        for begin, end, target in plan.parts(start, stop):
            if target is not None:
                # By numpy, which lets go of the GIL.
                np.copyto(np.frombuffer(target, np.uint8), buffer[begin - start : end - start])

    return read_piece


def _unchecked(fd: int, plan: _Plan) -> Callable[[int], None]:
    scratch = memoryview(bytearray(_SMALL_GAP_BYTES))

    def read_piece(piece: int) -> None:
        start = piece * PIECE_BYTES
        for begin, buffers in _runs(plan, start, start + PIECE_BYTES, scratch):
            at = begin
            for first in range(0, len(buffers), IOV_MAX):
                turn = buffers[first : first + IOV_MAX]
                fill(fd, turn, at, plan.label)
                at += sum(map(len, turn))

    return read_piece


def _whole_piece(plan: _Plan, start: int, stop: int, scratch: memoryview) -> Iterator[memoryview]:
    """Yield buffers that together take the piece from ``start`` to ``stop``."""
    cursor = start
    for begin, end, target in plan.parts(start, stop):
        if begin > cursor:
            yield scratch[cursor - start : begin - start]
        yield scratch[begin - start : end - start] if target is None else target
        cursor = end
    if cursor < stop:
        yield scratch[cursor - start : stop - start]


def _turns(buffers: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the buffers in lists that one call fills, large ones cut."""
    turn: list[memoryview] = []
    room = _TURN_BYTES
    for buffer in buffers:
        rest = buffer
        while len(rest) >= room:
            turn.append(rest[:room])
            yield turn
            rest, turn, room = rest[room:], [], _TURN_BYTES
        if len(rest):
            turn.append(rest)
            room -= len(rest)
        if len(turn) == IOV_MAX:
            yield turn
            turn, room = [], _TURN_BYTES
    if turn:
        yield turn


def _runs(
    plan: _Plan, start: int, stop: int, scratch: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield ``begin, buffers`` of stretches without a large gap, what no target wants left out."""
    buffers: list[memoryview] = []
    run_start = cursor = start
    for begin, end, target in plan.parts(start, stop):
        if target is None:
            continue
        gap = begin - cursor
        if buffers and gap > len(scratch):
            yield run_start, buffers
            buffers = []
        if not buffers:
            run_start = begin
        elif gap:
            buffers.append(scratch[:gap])
        buffers.append(target)
        cursor = end
    if buffers:
        yield run_start, buffers


def require_same(label: str, piece: int, digest: FileDigest, found: str) -> None:
    """Return when ``found`` is the digest that the piece must have.

    Raises:
        DigestMismatchError: It isn't.
    """
    expected = digest.pieces[piece]
    if found != expected:
        start, stop = digest.piece_range(piece)
        raise DigestMismatchError(
            f"{label} changed after it was written: bytes {start:,} to {stop:,} (piece {piece}) "
            f"have digest {found}, not {expected}.",
            next_step="Use another generation, and check the disk.",
            path=label,
            piece=piece,
            expected=expected,
            found=found,
        )
