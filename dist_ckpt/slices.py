"""Frozen values that say which part of which tensor lies where. Pure: no torch, no I/O.

Layer 1. Offsets and sizes count elements, byte ranges count bytes, both half-open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Box", "ByteRange", "Placement", "Role", "TensorSpec", "dtype_size", "local_boxes"]

_DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


def dtype_size(dtype: str) -> int:
    """Return the bytes of one element of the torch dtype called ``dtype`` (``"float32"`` → 4).

    Raises:
        KeyError: No such dtype is known to the format.
    """
    return _DTYPE_BYTES[dtype]


class Role(StrEnum):
    """What a tensor is to the training state; decides in which file it is kept and by whom."""

    WEIGHT = "weight"  # a parameter: a replica, owned by one rank, lies in a shard
    EXP_AVG = "exp_avg"  # first Adam moment, follows its parameter, lies in a shard
    EXP_AVG_SQ = "exp_avg_sq"  # second Adam moment, follows its parameter, lies in a shard
    OPTIMIZER = "optimizer"  # any other optimizer tensor: a replica, lies in its owner's .state
    BUFFER = "buffer"  # may differ by rank: each rank keeps its own in its .state
    SHARED_BUFFER = "shared_buffer"  # a buffer that ranks share (DTensor): as OPTIMIZER


@dataclass(frozen=True, slots=True)
class Box:
    """An N-d box of a global tensor: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of ``shape``; a 0-d tensor has one element."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None where there is no common element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def contains(self, other: Box) -> bool:
        """Return whether the other lies within this one; an empty one does where its bounds do."""
        bounds = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a <= b and b + m <= a + n for a, n, b, m in bounds)


def local_boxes(boxes: Sequence[Box]) -> list[Box]:
    """Return where each of a rank's boxes lies in the one local tensor that holds them all.

    They are a grid, as sharding dim by dim makes them: in each dim the local tensor is the boxes'
    ranges side by side, in the order of the global tensor.
    """
    starts: list[dict[int, int]] = []
    for dim in range(len(boxes[0].sizes) if boxes else 0):
        ranges = sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        place: dict[int, int] = {}
        end = 0
        for offset, size in ranges:
            place[offset] = end
            end += size
        starts.append(place)
    return [
        Box(tuple(place[o] for place, o in zip(starts, box.offsets, strict=True)), box.sizes)
        for box in boxes
    ]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start <= i < stop`` of a file or buffer."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the training state as one rank sees it.

    Attributes:
        key: ``model/<name>`` or ``optimizer/<name>/<state path>``, unique in a generation.
        role: What it is to the state.
        dtype: torch's name of the dtype without the ``torch.`` prefix.
        shape: Global shape.
        boxes: The parts that this rank holds; one whole box when the tensor is not sharded.
        param: Name of the parameter that it belongs to (a weight's own name), None for buffers.
    """

    key: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    param: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel * dtype_size(self.dtype)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one box of one tensor lies: contiguous, row-major bytes of one file of a generation."""

    location: str
    box: Box
    byte_range: ByteRange
