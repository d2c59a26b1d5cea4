"""Tensors of a generation read row by row, wherever their parts lie. I/O through ``storage``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from dist_ckpt.layout import plan_runs
from dist_ckpt.slices import Box, ByteRange, Placement, dtype_size
from dist_ckpt.storage import Buffers, FileDigest, ForwardReader

__all__ = ["Fetch"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


class Fetch:
    """Reads boxes of tensors in row-major order; context manager, which closes the files.

    Fast where files are gone through from front to back, and right in any order. What was read is
    known to be what was written once `finish` has returned. Holds two buffers a file and two more.

    Args:
        directory: The generation's.
        digests: What its files must be.
        buffers: Where bytes lie.
        pool: Reads ahead.
        direct: Past the page cache.

    Attributes:
        compared: File → numbers of its pieces that were found good, of files that are done.
    """

    def __init__(
        self,
        directory: Path,
        digests: Mapping[str, FileDigest],
        buffers: Buffers,
        pool: Executor,
        *,
        direct: bool = False,
    ) -> None:
        self.compared: dict[str, set[int]] = {}
        self._directory = directory
        self._digests = digests
        self._buffers = buffers
        self._pool = pool
        self._direct = direct
        self._files: dict[str, ForwardReader] = {}
        self._stack = ExitStack()
        self._slab: ByteArray | None = None
        self._part: ByteArray | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(self, suffix: str = "") -> None:
        """Every piece that was touched was compared with its digest; files of ``suffix`` are done.

        Raises:
            DigestMismatchError, CorruptFileError, StorageError: A piece isn't what was written.
        """
        for name in [name for name in self._files if name.endswith(suffix)]:
            file = self._files.pop(name)
            file.finish()
            file.close()
            self.compared.setdefault(name, set()).update(file.compared)

    def bytes_of(self, name: str, where: ByteRange) -> Iterator[ByteArray]:
        """Yield a range of a file in order, as views that are good until the next is asked for."""
        if where.num_bytes:
            yield from self._file(name).read(where.start, where.stop)

    def rows(self, placements: Sequence[Placement], dtype: str, box: Box) -> Iterator[ByteArray]:
        """Yield a box's elements in row-major order, as views as above.

        Args:
            placements: The tensor's parts; together they hold the box, none of it twice.
            dtype: Of the elements.
            box: Any box of the tensor.
        """
        size = dtype_size(dtype)
        parts = _parts(placements, box)
        if all(_is_run(common, box) and _is_run(common, p.box) for p, common in parts):
            for place, common in sorted(parts, key=lambda part: part[1].offsets):
                yield from self.bytes_of(place.location, _range(place, common, size))
            return
        for slab in _slabs(box, self._buffers.chunk_bytes // size):
            yield self._assemble(_parts(placements, slab), slab, size)

    def _assemble(self, parts: Sequence[tuple[Placement, Box]], slab: Box, size: int) -> ByteArray:
        """Return a box's elements, put together from parts that lie side by side."""
        if self._slab is None or self._part is None:
            self._slab, self._part = self._borrow(), self._borrow()
        whole = self._slab[: slab.numel * size]
        grid = whole.reshape(*slab.sizes, size)
        for place, common in parts:
            piece = self._part[: common.numel * size]
            self._collect(place, common, size, piece)
            at = tuple(
                slice(start - origin, start - origin + length)
                for start, origin, length in zip(
                    common.offsets, slab.offsets, common.sizes, strict=True
                )
            )
            grid[at] = piece.reshape(*common.sizes, size)
        return whole

    def _collect(self, place: Placement, common: Box, size: int, target: ByteArray) -> None:
        """Have the elements of ``common``, row-major, in ``target``."""
        for run in plan_runs(place.box, common):
            start = place.byte_range.start + run.source * size
            at = run.target * size
            where = ByteRange(start, start + run.count * size)
            for data in self.bytes_of(place.location, where):
                target[at : at + data.nbytes] = data
                at += data.nbytes

    def _borrow(self) -> ByteArray:
        buffer = self._buffers.take()
        self._stack.callback(self._buffers.give, buffer)
        return buffer

    def _file(self, name: str) -> ForwardReader:
        file = self._files.get(name)
        if file is None:
            path, digest = self._directory / name, self._digests[name]
            file = ForwardReader(path, digest, self._buffers, self._pool, direct=self._direct)
            self._stack.callback(file.close)
            self._files[name] = file
        return file


def _parts(placements: Sequence[Placement], box: Box) -> list[tuple[Placement, Box]]:
    pairs = ((place, place.box.intersect(box)) for place in placements)
    return [(place, common) for place, common in pairs if common is not None]


def _is_run(inner: Box, outer: Box) -> bool:
    """Return whether the elements of ``inner`` lie side by side in row-major ``outer``."""
    dim = len(inner.sizes)
    while dim > 0 and inner.sizes[dim - 1] == outer.sizes[dim - 1]:
        dim -= 1
    return all(size == 1 for size in inner.sizes[: max(dim - 1, 0)])


def _range(place: Placement, common: Box, size: int) -> ByteRange:
    """Return where a run of a placement lies in its file."""
    first = 0
    for offset, origin, length in zip(
        common.offsets, place.box.offsets, place.box.sizes, strict=True
    ):
        first = first * length + (offset - origin)
    start = place.byte_range.start + first * size
    return ByteRange(start, start + common.numel * size)


def _slabs(box: Box, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements that are runs of ``box`` and follow each other."""
    dim, inner = len(box.sizes), 1
    while dim > 0 and inner * box.sizes[dim - 1] <= most:
        inner *= box.sizes[dim - 1]
        dim -= 1
    if dim == 0:
        yield box
        return
    step = most // inner
    for index in np.ndindex(*box.sizes[: dim - 1]):
        head = tuple(o + i for o, i in zip(box.offsets, index, strict=False))
        for start in range(0, box.sizes[dim - 1], step):
            length = min(step, box.sizes[dim - 1] - start)
            yield Box(
                (*head, box.offsets[dim - 1] + start, *box.offsets[dim:]),
                (*(1 for _ in head), length, *box.sizes[dim:]),
            )
