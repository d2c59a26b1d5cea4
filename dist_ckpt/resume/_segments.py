"""Which bytes of which files make a rank's part of a tensor. Layer 5, pure but for the copies.

Where a wanted box and a saved one share long runs of elements, each run is read straight into its
place. Where the runs are short and many (cut along another dim), the saved rows are read as they
lie and copied from there: a million reads of a hundred bytes would take longer than everything
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_ckpt.layout import plan_runs
from dist_ckpt.slices import Box, Placement
from dist_ckpt.storage import Segment

__all__ = ["FileSegments", "Scatter", "add_place", "batches_of", "bytes_of"]

#: Runs shorter than this are read with what lies between them, if they are many.
_SHORT_BYTES = 64 << 10
_FEW_RUNS = 16


@dataclass
class FileSegments:
    """What is to be read of one file."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes wanted."""
        return sum(segment.length for segment in self.segments)

    def add(self, start: int, target: memoryview) -> None:
        """Have the file's bytes from ``start`` on in ``target``."""
        if target.nbytes:
            self.segments.append(Segment(start, target, target.nbytes))


@dataclass(frozen=True)
class Scatter:
    """Saved rows that are read as they lie; what is wanted of them is copied out.

    Attributes:
        location: The file.
        start: First byte there.
        rows: Box of the global tensor that these bytes hold.
        wanted: The part of ``rows`` that belongs into ``target``.
        target: A contiguous CPU tensor that is the box ``held``.
        held: Its box.
    """

    location: str
    start: int
    rows: Box
    wanted: Box
    target: torch.Tensor
    held: Box

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.rows.numel * self.target.element_size()

    def copy_from(self, scratch: torch.Tensor) -> None:
        """Put what is wanted in its place; ``scratch`` holds the bytes that were read."""
        rows = scratch.view(self.target.dtype).view(self.rows.sizes)
        _part(self.target, self.held, self.wanted).copy_(_part(rows, self.rows, self.wanted))


def _part(tensor: torch.Tensor, holds: Box, wanted: Box) -> torch.Tensor:
    sides = zip(holds.offsets, wanted.offsets, wanted.sizes, strict=True)
    for dim, (origin, start, size) in enumerate(sides):
        tensor = tensor.narrow(dim, start - origin, size)
    return tensor


def add_place(
    file: FileSegments, place: Placement, box: Box, target: torch.Tensor, *, limit_bytes: int
) -> list[Scatter]:
    """Note what of a saved box belongs into ``target``; return what can't be read straight in.

    Args:
        file: Where to note what can.
        place: The saved box, and its bytes in that file.
        box: The box that ``target`` is.
        target: Contiguous, on the CPU.
        limit_bytes: Most bytes of one scatter.
    """
    if place.box == box:  # as most are: with 100,000 tensors what follows would take a second
        file.add(place.byte_range.start, bytes_of(target))
        return []
    common = place.box.intersect(box)
    if common is None:
        return []
    element_bytes = target.element_size()
    if _is_short(place.box, box, common, element_bytes):
        return list(_scatters(place, box, common, target, limit_bytes))
    into = bytes_of(target)
    for run in plan_runs(place.box, box):
        start = run.target * element_bytes
        stop = start + run.count * element_bytes
        file.add(place.byte_range.start + run.source * element_bytes, into[start:stop])
    return []


def _is_short(source: Box, target: Box, common: Box, element_bytes: int) -> bool:
    """Return whether there are many short runs; as `plan_runs` counts them, without making them."""
    dim = len(common.sizes)
    while dim > 0 and common.sizes[dim - 1] == source.sizes[dim - 1] == target.sizes[dim - 1]:
        dim -= 1
    run_elements = math.prod(common.sizes[max(dim - 1, 0) :])
    num_runs = common.numel // run_elements
    return num_runs > _FEW_RUNS and run_elements * element_bytes < _SHORT_BYTES


def _scatters(
    place: Placement, box: Box, common: Box, target: torch.Tensor, limit_bytes: int
) -> Iterator[Scatter]:
    """Yield the saved rows that hold ``common``, in bands of at most ``limit_bytes`` if need be."""
    sizes = place.box.sizes
    dim = next(d for d, size in enumerate(sizes) if size > 1)  # every dim before it is 1
    row_bytes = target.element_size() * math.prod(sizes[dim + 1 :])
    first, last = common.offsets[dim], common.offsets[dim] + common.sizes[dim]
    step = max(limit_bytes // row_bytes, 1)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        yield Scatter(
            location=place.location,
            start=place.byte_range.start + (begin - place.box.offsets[dim]) * row_bytes,
            rows=_cut(place.box, dim, begin, end),
            wanted=_cut(common, dim, begin, end),
            target=target,
            held=box,
        )


def _cut(box: Box, dim: int, begin: int, end: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = begin, end - begin
    return Box(tuple(offsets), tuple(sizes))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, of any dtype and number of dims."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # One element may have any stride, which view(-1) would keep.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    content: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return content.data


def batches_of(items: Sequence[Any], sizes: Sequence[int], limit_bytes: int) -> Iterator[list[Any]]:
    """Yield the items in lists whose sizes together keep to a limit, if one item alone does."""
    batch: list[Any] = []
    num_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and num_bytes + size > limit_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch
