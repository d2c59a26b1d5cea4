"""Which boxes of a global tensor this rank holds, and where. Layer 3, no collective.

A DTensor knows its mesh and, for each axis of the mesh, how it is placed there. What follows is
torch's own rule for cutting a dim, applied to index ranges instead of elements. torch's helper for
it (``compute_local_shape_and_global_offset``) isn't used: it was wrong for uneven strided shards
and for empty ones. A result that the local tensor's shape contradicts is refused.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from dist_ckpt.slices import Box, local_boxes
from dist_ckpt.tree import check_tensor, refuse_value

__all__ = ["boxes_of", "check_held", "is_sharded", "local_of", "parts_of", "placement_of"]

#: Half-open index ranges of one dim, in the order in which the local tensor holds them.
Ranges: TypeAlias = list[tuple[int, int]]

_NEXT_STEP = "Redistribute it to Shard or Replicate before it is given here."


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor: one global tensor that a mesh of ranks shares."""
    # A module that nobody imported has no instances, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, detached, sharing memory: the tensor itself if nothing shares it."""
    if is_sharded(tensor):
        local: Any = tensor._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001
        return local.detach()  # type: ignore[no-any-return]
    plain = tensor.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def parts_of(tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return each box that this rank holds with the view of its elements; none where it is empty.

    Raises:
        UnsupportedValueError: It is placed in a way that can't be kept.
    """
    boxes = boxes_of(tensor)
    local = local_of(tensor)
    if len(boxes) == 1:
        return [(boxes[0], local)]
    return [(box, cut(local, place)) for box, place in zip(boxes, local_boxes(boxes), strict=True)]


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``tensor`` that is its own box ``box``."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def boxes_of(tensor: torch.Tensor, path: str = "a tensor") -> tuple[Box, ...]:
    """Return the boxes of the global tensor that this rank holds, in order; () where it has none.

    A tensor without elements is one whole box on every rank that knows it.

    Raises:
        UnsupportedValueError: Partial sums, an unknown placement, or a local shape that contradicts
            the placement.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return (Box.whole(shape),)
    sharded: Any = tensor
    _check_placements(sharded, path)
    if tensor.numel() == 0:
        return (Box.whole(shape),)
    mesh, placements = sharded.device_mesh, sharded.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()  # this rank is outside the mesh
    local_shape = tuple(sharded._local_tensor.shape)  # noqa: SLF001
    axes = list(zip(placements, mesh.shape, coordinate, strict=True))
    rules = (_as_sharded, _as_declared) if _is_fsdps(axes) else (_as_declared,)
    for rule in rules:
        dims = [rule(size, dim, axes) for dim, size in enumerate(shape)]
        sizes = tuple(sum(stop - start for start, stop in ranges) for ranges in dims)
        if sizes == local_shape:
            return _boxes(dims)
        if 0 in sizes and 0 in local_shape:
            return ()  # FSDP2 leaves the other dims of an empty shard as they come
    return refuse_value(
        path,
        f"has a local shape {list(local_shape)} that {list(map(str, placements))} on a mesh of "
        f"{list(mesh.shape)} doesn't give for {list(shape)}",
        "Distribute it with torch's own functions, which cut as torch.chunk does.",
    )


def _check_placements(tensor: Any, path: str) -> None:
    for placement in tensor.placements:
        kind = type(placement).__name__
        if placement.is_partial():
            what = f"is placed as {placement!r}: sums that no rank holds yet"
            refuse_value(path, what, _NEXT_STEP)
        if kind not in {"Shard", "_StridedShard", "Replicate"}:
            refuse_value(path, f"is placed as {kind}, which isn't known", _NEXT_STEP)


_Axes: TypeAlias = Sequence[tuple[Any, int, int]]


def _is_fsdps(axes: _Axes) -> bool:
    """Return whether each strided shard is strided by just the shards of the axes behind it."""
    for number, (placement, _, _) in enumerate(axes):
        if _is_strided(placement):
            behind = [n for p, n, _ in axes[number + 1 :] if _cuts(p, placement.dim)]
            if int(placement.split_factor) != math.prod(behind):
                return False
    return True


def _as_sharded(size: int, dim: int, axes: _Axes) -> Ranges:
    """Cut as FSDP2 and tensor parallel did: plain shards first, then strided ones, last axis first.

    FSDP2 cuts what tensor parallel has left on the rank; `_StridedShard` is how torch writes that
    down with FSDP's axis of the mesh in front.
    """
    ranges: Ranges = [(0, size)]
    mine = [(p, n, i) for p, n, i in axes if _cuts(p, dim)]
    plain = [(n, i) for p, n, i in mine if not _is_strided(p)]
    strided = [(n, i) for p, n, i in mine if _is_strided(p)]
    for num_parts, index in (*plain, *reversed(strided)):
        ranges = _chunk(ranges, num_parts)(index)
    return ranges


def _as_declared(size: int, dim: int, axes: _Axes) -> Ranges:
    """Cut as the placements say, first axis first; a strided shard takes a part of every stride."""
    ranges: Ranges = [(0, size)]
    for placement, num_parts, index in axes:
        if not _cuts(placement, dim):
            continue
        if _is_strided(placement):
            count = int(placement.split_factor)
            strides = [_chunk(ranges, count)(stride) for stride in range(count)]
            ranges = [r for stride in strides for r in _chunk(stride, num_parts)(index)]
        else:
            ranges = _chunk(ranges, num_parts)(index)
    return ranges


def _cuts(placement: Any, dim: int) -> bool:
    return type(placement).__name__ != "Replicate" and int(placement.dim) == dim


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _chunk(ranges: Ranges, num_parts: int) -> Callable[[int], Ranges]:
    """Return a function of a part's number: its index ranges, as ``torch.chunk`` cuts them."""
    total = sum(stop - start for start, stop in ranges)
    step = -(-total // num_parts)

    def part(index: int) -> Ranges:
        low, high = min(index * step, total), min((index + 1) * step, total)
        found: Ranges = []
        at = 0
        for start, stop in ranges:
            begin, end = max(low - at, 0), min(high - at, stop - start)
            if begin < end:
                found.append((start + begin, start + end))
            at += stop - start
        return found

    return part


def _boxes(dims: Sequence[Ranges]) -> tuple[Box, ...]:
    """Return the grid that the dims' ranges span; neighbours in a dim are one range."""
    melted: list[Ranges] = []
    for ranges in dims:
        merged: Ranges = []
        for start, stop in ranges:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        melted.append(merged)
    if not all(melted):
        return ()
    return tuple(
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*melted)
    )


def check_held(tensor: torch.Tensor, path: str) -> None:
    """Return if this rank's part of ``tensor`` can be kept as it is.

    Raises:
        UnsupportedValueError: As `check_tensor`; or it is placed in a way that can't be kept.
    """
    if not is_sharded(tensor):
        check_tensor(tensor, path)
        return
    boxes_of(tensor, path)
    check_tensor(local_of(tensor), path)


def placement_of(tensor: torch.Tensor) -> str | None:
    """Return how a DTensor is placed, for people: ``"mesh [2, 4]: Replicate, Shard(0)"``."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    placed = ", ".join(repr(placement) for placement in sharded.placements)
    return f"mesh {list(sharded.device_mesh.shape)}: {placed}"
