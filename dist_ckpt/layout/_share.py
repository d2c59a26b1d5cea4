"""Replicas shared among the ranks that hold them, in equal bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dist_ckpt.slices import Box, Role, TensorSpec

__all__ = ["share_weights"]


def _holders(ranks: Sequence[Sequence[TensorSpec]]) -> dict[str, dict[Box, list[int]]]:
    """Return parameter name → box → ranks that hold it, in rank order."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, specs in enumerate(ranks):
        for spec in specs:
            if spec.role is Role.WEIGHT:
                boxes = holders.setdefault(spec.param or "", {})
                for box in spec.boxes:
                    boxes.setdefault(box, []).append(rank)
    return holders


def share_weights(
    weights: Sequence[TensorSpec],
    ranks: Sequence[Sequence[TensorSpec]],
    bytes_by_param: Mapping[str, int],
) -> dict[str, list[tuple[int, Box]]]:
    """Return parameter name → its boxes with the rank that owns each.

    Boxes that the same ranks hold form one stream in canonical order. The stream is cut at equal
    bytes, along dim 0 of the box that a cut falls into, so that every rank's part is one run of the
    canonical order.
    """
    holders = _holders(ranks)
    streams: dict[tuple[int, ...], list[tuple[TensorSpec, Box]]] = {}
    for spec in weights:
        for box, group in holders[spec.param or ""].items():
            streams.setdefault(tuple(group), []).append((spec, box))
    owned: dict[str, list[tuple[int, Box]]] = {}
    for sharers, stream in streams.items():
        costs = [
            bytes_by_param[spec.param or ""] * box.numel // max(spec.numel, 1)
            for spec, box in stream
        ]
        share = sum(costs) / len(sharers) or 1.0
        passed = 0
        for (spec, box), cost in zip(stream, costs, strict=True):
            parts = owned.setdefault(spec.param or "", [])
            for index, part in _cut(box, passed / share, cost / share, len(sharers)):
                parts.append((sharers[index], part))
            passed += cost
    return owned


def _cut(box: Box, start: float, length: float, num_parts: int) -> Iterator[tuple[int, Box]]:
    """Yield (part, box) for a box at ``start … start + length`` of ``num_parts`` units."""
    last = num_parts - 1
    rows = box.sizes[0] if box.sizes else 1
    if rows < 2 or length <= 0:
        yield min(int(start + length / 2), last), box
        return
    row = 0
    for part in range(min(int(start), last), num_parts):
        stop = rows if part == last else round((part + 1 - start) / length * rows)
        stop = min(max(stop, row), rows)
        if stop > row:
            offsets = (box.offsets[0] + row, *box.offsets[1:])
            yield part, Box(offsets, (stop - row, *box.sizes[1:]))
        row = stop
        if row == rows:
            return
