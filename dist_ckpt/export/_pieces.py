"""A generation's tensors in the order of the global tensor, whatever way they are cut. Layer 5.

Files are read in whole digested pieces, since nothing unchecked is used; a few of the last ones are
kept, and a thread reads ahead. Canonical order mostly goes along the files. Where a tensor is cut
along another dim than its first, every stretch of it comes from each of the files that hold a part,
so as many pieces are kept as that takes, within a limit.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt import storage
from dist_ckpt.slices import Box, Placement, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor
from dist_ckpt.storage import FileDigest

__all__ = ["Pieces"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

#: So many pieces are kept at most: 512 MiB. Beyond, pieces are read more than once.
_MOST_PIECES = 32
#: So many more are on their way at most, one a file: 128 MiB.
_MOST_AHEAD = 8

_Key = tuple[str, int]


class Pieces:
    """A generation's files, one digested piece at a time; holds memory and a thread until closed.

    Args:
        directory: Of the generation.
        digests: Of its files.
    """

    def __init__(self, directory: Path, digests: Mapping[str, FileDigest]) -> None:
        self._directory = directory
        self._digests = digests
        self._kept: OrderedDict[_Key, ByteArray] = OrderedDict()
        self._ahead: dict[_Key, tuple[ByteArray, Future[None]]] = {}
        self._pool = ThreadPoolExecutor(1, "dist-ckpt-read")
        # A tensor that is cut by rows goes from one file to the next, and so does the next tensor:
        # with fewer pieces than files each of them would be read for every tensor in it.
        num_ranks = len(digests) // 2  # each has two files
        self._most = min(num_ranks + 1, _MOST_PIECES)
        # Ranks' files are gone through at one pace: all come to their next piece at a time.
        self._most_ahead = min(num_ranks, _MOST_AHEAD)
        num_buffers = self._most + self._most_ahead
        self._buffers = storage.Buffers(num_buffers, num_buffers * storage.PIECE_BYTES)

    def close(self) -> None:
        """Give memory and thread back."""
        self._pool.shutdown(cancel_futures=True)
        self._kept.clear()
        self._ahead.clear()
        self._buffers.close()

    def in_order(self, tensor: IndexedTensor) -> Iterator[ByteArray]:
        """Yield a tensor's bytes, row-major over the global tensor, at most 16 MiB at a time.

        What was yielded is only valid until the next is asked for.
        """
        places = [place for place in tensor.placements if place.box.numel]
        if all(place.box.sizes[1:] == tensor.shape[1:] for place in places):
            for place in sorted(places, key=lambda place: place.box.offsets):
                yield from self._read(place.byte_range.start, place.byte_range.stop, place.location)
            return
        element_bytes = dtype_size(tensor.dtype)
        for block in _blocks(tensor.shape, storage.PIECE_BYTES // element_bytes):
            yield self._assembled(block, places, element_bytes)

    def _assembled(self, block: Box, places: list[Placement], element_bytes: int) -> ByteArray:
        """Return the bytes of a block, each from the saved box that it lies in."""
        out = np.empty((*block.sizes, element_bytes), np.uint8)
        for place in places:
            common = place.box.intersect(block)
            if common is None:
                continue
            # A block is single rows in its first dims and whole in its last: what it shares with a
            # saved box is one run of that box's bytes.
            strides = [math.prod(place.box.sizes[dim + 1 :]) for dim in range(len(block.sizes))]
            sides = zip(common.offsets, place.box.offsets, strides, strict=True)
            first = sum((at - origin) * stride for at, origin, stride in sides)
            start = place.byte_range.start + first * element_bytes
            where = tuple(
                slice(at - origin, at - origin + size)
                for at, origin, size in zip(
                    common.offsets, block.offsets, common.sizes, strict=True
                )
            )
            raw = self._bytes(start, start + common.numel * element_bytes, place.location)
            out[where] = raw.reshape((*common.sizes, element_bytes))
        return out.reshape(-1)

    def _bytes(self, start: int, stop: int, name: str) -> ByteArray:
        parts = list(self._read(start, stop, name))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, start: int, stop: int, name: str) -> Iterator[ByteArray]:
        """Yield bytes of a file in order, as views of the pieces that they lie in."""
        while start < stop:
            first = start - start % storage.PIECE_BYTES
            piece = self._piece(name, start // storage.PIECE_BYTES)
            yield piece[start - first : min(stop - first, storage.PIECE_BYTES)]
            start = first + storage.PIECE_BYTES

    def _piece(self, name: str, number: int) -> ByteArray:
        key = (name, number)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._fetched(key)
            self._read_ahead((name, number + 1))
        self._kept.move_to_end(key)
        return kept[: self._digests[name].piece_range(number)[1] - number * storage.PIECE_BYTES]

    def _fetched(self, key: _Key) -> ByteArray:
        """Return the buffer that holds a piece, compared with its digest."""
        ahead = self._ahead.pop(key, None)
        if len(self._kept) >= self._most:
            self._buffers.give(self._kept.popitem(last=False)[1])
        if ahead is None:
            buffer = self._buffers.take()
            self._read_into(buffer, key)
            return buffer
        buffer, done = ahead
        done.result()
        return buffer

    def _read_ahead(self, key: _Key) -> None:
        name, number = key
        if number >= len(self._digests[name].pieces) or len(self._ahead) >= self._most_ahead:
            return
        if key in self._kept or key in self._ahead:
            return
        buffer = self._buffers.take()
        done = storage.hand_on(self._pool, lambda: self._read_into(buffer, key))
        self._ahead[key] = (buffer, done)

    def _read_into(self, buffer: ByteArray, key: _Key) -> None:
        name, number = key
        storage.read_piece(self._directory / name, self._digests[name], number, buffer)


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes that follow each other in row-major order, of at most ``most`` elements each."""
    dim = 0
    while math.prod(shape[dim + 1 :]) > most:
        dim += 1
    rows = max(most // max(math.prod(shape[dim + 1 :]), 1), 1)
    for index in itertools.product(*map(range, shape[:dim])):
        for begin in range(0, shape[dim], rows):
            size = min(rows, shape[dim] - begin)
            yield Box(
                (*index, begin, *(0 for _ in shape[dim + 1 :])),
                (*(1 for _ in index), size, *shape[dim + 1 :]),
            )
