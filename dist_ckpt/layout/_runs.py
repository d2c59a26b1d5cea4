"""Which elements of one box lie where in another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt.slices import Box

__all__ = ["Run", "plan_runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` elements side by side in two boxes, from ``source`` and from ``target`` on."""

    source: int
    target: int
    count: int


def plan_runs(source: Box, target: Box) -> list[Run]:
    """Return the runs of elements to move from one row-major box to another."""
    common = source.intersect(target)
    if common is None:
        return []
    # Trailing dims that both boxes hold whole melt into one run.
    dim = len(common.sizes)
    while dim > 0 and common.sizes[dim - 1] == source.sizes[dim - 1] == target.sizes[dim - 1]:
        dim -= 1
    split = max(dim - 1, 0)
    count = 1
    for size in common.sizes[split:]:
        count *= size
    runs = []
    for index in _indices(common.sizes[:split]):
        at = (*index, *(0 for _ in common.sizes[split:]))
        corner = [offset + i for offset, i in zip(common.offsets, at, strict=True)]
        runs.append(Run(_flat(source, corner), _flat(target, corner), count))
    return runs


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _indices(sizes[1:]):
            yield (first, *rest)


def _flat(box: Box, corner: Sequence[int]) -> int:
    flat = 0
    for offset, size, position in zip(box.offsets, box.sizes, corner, strict=True):
        flat = flat * size + (position - offset)
    return flat
