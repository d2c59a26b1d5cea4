"""Tensors to be compared, wherever they are: large ones in pieces, many small ones in one go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dist_ckpt import storage
from dist_ckpt.errors import UnsupportedValueError
from dist_ckpt.layout import Run, plan_runs
from dist_ckpt.slices import Box, Placement, dtype_size
from dist_ckpt.staging import torch_dtype
from dist_ckpt.storage import FileDigest, Segment
from dist_ckpt.tree import TORCH_DTYPES

__all__ = [
    "LEAVES",
    "Leaf",
    "LiveArray",
    "LiveTensor",
    "RankFiles",
    "Request",
    "StoredTensor",
    "Zeros",
    "numel",
    "read_all",
]

#: Parts of a batch's buffer start at multiples of this, so that every dtype can be viewed in place.
_ALIGN = 16


class Leaf(Protocol):
    """A tensor or array with values, maybe still on disk."""

    @property
    def kind(self) -> str:
        """``tensor`` or ``array``."""

    @property
    def dtype(self) -> str:
        """Name of torch's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""


@dataclass(frozen=True, slots=True)
class Request:
    """Elements ``start <= i < stop`` of a leaf, row-major."""

    leaf: Leaf
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.start) * dtype_size(self.leaf.dtype)


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in memory, on any device, with any strides.

    Raises:
        UnsupportedValueError: It has no plain elements (sharded, sparse, meta, …).
    """

    tensor: torch.Tensor
    path: str = ""
    kind: str = "tensor"

    def __post_init__(self) -> None:
        """Refuse what has no elements that could be read one by one."""
        tensor = self.tensor
        is_plain = tensor.layout is torch.strided and self.dtype in TORCH_DTYPES
        if not is_plain or tensor.is_meta or hasattr(type(tensor), "__tensor_flatten__"):
            raise UnsupportedValueError(
                f"{self.path or 'The value'} is a {type(tensor).__name__} of {tensor.dtype}, "
                f"{tensor.layout}, on {tensor.device}, which can't be compared.",
                next_step="Compare dense tensors that have values, or two generations on disk.",
                path=self.path,
            )

    @property
    def dtype(self) -> str:
        """Name of torch's dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @cached_property
    def _flat(self) -> torch.Tensor:
        return self.tensor.detach().resolve_conj().resolve_neg().reshape(-1)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements on the CPU, contiguous."""
        return self._flat[start:stop].cpu()


@dataclass(frozen=True)
class LiveArray:
    """A NumPy array of numbers: read-only, mapped, strided, of foreign byte order, as it may be."""

    array: np.ndarray[Any, Any]
    kind: str = "array"

    @property
    def dtype(self) -> str:
        """Name of the dtype, the same in NumPy and torch."""
        return str(self.array.dtype.newbyteorder("="))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.array.shape)

    @cached_property
    def _flat(self) -> np.ndarray[Any, Any]:
        return self.array.reshape(-1)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of elements, in the machine's byte order."""
        native = self.array.dtype.newbyteorder("=")
        return torch.from_numpy(self._flat[start:stop].astype(native, copy=True))


@dataclass(frozen=True, slots=True)
class Zeros:
    """Moments that a parameter without optimizer state has in a canonical file."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str = "tensor"

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(stop - start, dtype=torch_dtype(self.dtype))


@dataclass
class RankFiles:
    """The files of one generation, each checked whole before its first use.

    Attributes:
        directory: Where they lie.
        digests: What each must be.
        progress: Told the bytes of each piece that was found good.
    """

    directory: Path
    digests: Mapping[str, FileDigest]
    progress: Callable[[int], None] | None = None
    _checked: set[str] = field(default_factory=set)

    def read(self, requests: Sequence[tuple[StoredTensor, int, int]]) -> list[torch.Tensor]:
        """Return the elements of every request, in order, each 1-D."""
        sizes = [(stop - start) * dtype_size(leaf.dtype_stored) for leaf, start, stop in requests]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGN) * _ALIGN)
        buffer = torch.empty(starts[-1], dtype=torch.uint8)
        target = buffer.numpy().data
        segments: dict[str, list[Segment]] = {}
        for (leaf, start, stop), base in zip(requests, starts, strict=False):
            for name, offset, at, num_bytes in leaf.ranges(start, stop):
                into = target[base + at : base + at + num_bytes]
                segments.setdefault(name, []).append(Segment(offset, into, num_bytes))
        for name, parts in segments.items():
            self._check(name)
            parts.sort(key=lambda part: part.offset)
            storage.read_segments(self.directory / name, parts, None)
        return [
            buffer[base : base + size]
            .view(torch_dtype(leaf.dtype_stored))
            .to(torch_dtype(leaf.dtype))
            for (leaf, _, _), base, size in zip(requests, starts, sizes, strict=False)
        ]

    def _check(self, name: str) -> None:
        # Whole and once: a piece of 16 MiB holds many tensors, and would be read again for each.
        if name not in self._checked:
            path, digest = self.directory / name, self.digests[name]
            storage.verify_file(path, digest, direct=False, progress=self.progress)
        self._checked.add(name)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose bytes lie in one or more files.

    Attributes:
        files: Where.
        dtype_stored: As it lies there.
        shape: Global shape.
        placements: Parts that cover it.
        widen_to: As what it is compared, where that isn't how it is stored.
        kind: ``tensor`` or ``array``.
    """

    files: RankFiles
    dtype_stored: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    widen_to: str | None = None
    kind: str = "tensor"

    @property
    def dtype(self) -> str:
        """Name of the dtype that it is compared as."""
        return self.widen_to or self.dtype_stored

    @cached_property
    def _runs(self) -> list[tuple[Placement, Run]]:
        whole = Box.whole(self.shape)
        return [(place, run) for place in self.placements for run in plan_runs(place.box, whole)]

    def ranges(self, start: int, stop: int) -> list[tuple[str, int, int, int]]:
        """Return where elements lie: ``(file, offset, position behind start, bytes)`` each."""
        element_bytes = dtype_size(self.dtype_stored)
        found = []
        for place, run in self._runs:
            low, high = max(run.target, start), min(run.target + run.count, stop)
            if low < high:
                offset = place.byte_range.start + (run.source + low - run.target) * element_bytes
                at, size = (low - start) * element_bytes, (high - low) * element_bytes
                found.append((place.location, offset, at, size))
        return found

    def numpy(self) -> StoredTensor:
        """Return the same as an array, as a tree of values asks for it."""
        return StoredTensor(
            self.files, self.dtype_stored, self.shape, self.placements, kind="array"
        )


#: Every kind of leaf.
LEAVES = (LiveTensor, LiveArray, StoredTensor, Zeros)


def numel(leaf: Leaf) -> int:
    """Return the number of elements."""
    return math.prod(leaf.shape)


def read_all(requests: Sequence[Request]) -> list[torch.Tensor]:
    """Return every request's elements on the CPU; what lies in one place is read in one go."""
    found: dict[int, torch.Tensor] = {}
    stored: dict[int, list[tuple[int, StoredTensor, Request]]] = {}
    for number, request in enumerate(requests):
        leaf = request.leaf
        if isinstance(leaf, StoredTensor):
            stored.setdefault(id(leaf.files), []).append((number, leaf, request))
        elif isinstance(leaf, LiveTensor | LiveArray | Zeros):
            found[number] = leaf.read(request.start, request.stop)
    for group in stored.values():
        files = group[0][1].files
        tensors = files.read([(leaf, request.start, request.stop) for _, leaf, request in group])
        found.update(zip((number for number, _, _ in group), tensors, strict=True))
    return [found[number] for number in range(len(requests))]
