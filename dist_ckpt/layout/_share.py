"""Tensors shared among the ranks that hold them, in equal bytes. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from dist_ckpt.errors import MismatchError
from dist_ckpt.slices import Box, Role, TensorSpec

__all__ = ["Cuts", "share_tensors"]

#: Key → its boxes with the rank that writes each.
Cuts = Mapping[str, Sequence[tuple[int, Box]]]
_Holders = dict[Box, tuple[int, ...]]


def share_tensors(
    merged: Mapping[str, TensorSpec], ranks: Sequence[Sequence[TensorSpec]]
) -> dict[str, list[tuple[int, Box]]]:
    """Return key → its boxes with the rank that writes each, of all but the ranks' own buffers.

    What one rank alone holds it writes. Boxes that the same ranks hold form one stream in the order
    of ``merged``. Each stream is cut where the bytes of all its ranks come out level, counted with
    what they write already, along dim 0 of the box that a cut falls into: so every rank's part is
    one run of the canonical order. Optimizer state of a parameter's shape that lies where the
    parameter lies is cut with it; other small state goes to the rank with the parameter's beginning
    if that rank has it.

    Raises:
        MismatchError: The ranks' boxes of a tensor together don't make the tensor.
    """
    holders = _holders(merged, ranks)
    leaders = _leaders(merged, holders)
    costs: dict[str, int] = {}
    for key, leader in leaders.items():
        costs[leader] = costs.get(leader, 0) + merged[key].num_bytes
    streams: dict[tuple[int, ...], list[tuple[str, Box, int]]] = {}
    for key, cost in costs.items():
        numel = max(merged[key].numel, 1)
        for box, group in holders[key].items():
            streams.setdefault(group, []).append((key, box, cost * box.numel // numel))
    loads = [0.0] * len(ranks)
    cuts: dict[str, list[tuple[int, Box]]] = {key: [] for key in merged}
    for group in sorted(streams, key=len):
        for key, rank, box, num_bytes in _cut_stream(streams[group], group, loads):
            cuts[key].append((rank, box))
            loads[rank] += num_bytes
    for key, leader in leaders.items():
        if key == leader:
            continue
        if merged[key].shape == merged[leader].shape:
            cuts[key] = cuts[leader]
        else:
            cuts[key] = [(cuts[leader][0][0], Box.whole(merged[key].shape))]
    return cuts


def _holders(
    merged: Mapping[str, TensorSpec], ranks: Sequence[Sequence[TensorSpec]]
) -> dict[str, _Holders]:
    """Return key → box → ranks that hold it, in rank order."""
    found: dict[str, dict[Box, list[int]]] = {
        key: {} for key, spec in merged.items() if spec.role is not Role.BUFFER
    }
    for rank, specs in enumerate(ranks):
        for spec in specs:
            if spec.role is not Role.BUFFER:
                for box in spec.boxes:
                    found[spec.key].setdefault(box, []).append(rank)
    for key, boxes in found.items():
        covered = sum(box.numel for box in boxes)
        if covered != merged[key].numel or not boxes:
            raise MismatchError(
                f"Together the ranks hold {covered} of {merged[key].numel} elements of {key}: "
                f"{len(boxes)} boxes that overlap or leave gaps.",
                next_step="Shard it over one mesh that holds all its parts, on every rank alike.",
                key=key,
            )
    return {key: {b: tuple(group) for b, group in boxes.items()} for key, boxes in found.items()}


def _leaders(merged: Mapping[str, TensorSpec], holders: Mapping[str, _Holders]) -> dict[str, str]:
    """Return key → the key of the tensor with which it is cut and written; often its own."""
    weights = {spec.param: spec for spec in merged.values() if spec.role is Role.WEIGHT}
    leaders: dict[str, str] = {}
    for key in holders:
        spec = merged[key]
        weight = weights.get(spec.param) if spec.param is not None else None
        leaders[key] = key
        if weight is None or spec.role is Role.WEIGHT:
            continue
        if spec.shape == weight.shape:
            follows = holders[key] == holders[weight.key]
        else:
            # Held whole wherever a part of the parameter is.
            anyone = {rank for group in holders[weight.key].values() for rank in group}
            follows = anyone <= set(holders[key].get(Box.whole(spec.shape), ()))
        if follows:
            leaders[key] = weight.key
    return leaders


def _cut_stream(
    stream: Sequence[tuple[str, Box, int]], group: tuple[int, ...], loads: Sequence[float]
) -> Iterator[tuple[str, int, Box, float]]:
    """Yield key, rank, box and bytes of each part that a rank of the group writes."""
    shares = _level([loads[rank] for rank in group], sum(cost for *_, cost in stream))
    ends = list(accumulate(shares))
    passed = 0
    for key, box, cost in stream:
        for part, piece in _cut(box, passed, cost, ends):
            yield key, group[part], piece, cost * piece.numel / max(box.numel, 1)
        passed += cost


def _level(loads: Sequence[float], total: float) -> list[float]:
    """Return what each gets of ``total`` so that the lowest loads are raised to one level."""
    level, rising, left = 0.0, 0, total
    for load in sorted(loads):
        step = (load - level) * rising
        if rising and step >= left:
            break
        left -= step
        level, rising = load, rising + 1
    level += left / max(rising, 1)
    return [max(level - load, 0.0) for load in loads]


def _cut(box: Box, start: float, length: float, ends: Sequence[float]) -> Iterator[tuple[int, Box]]:
    """Yield (part, box) of a box at ``start … start + length`` in a stream of parts that end so."""
    last = len(ends) - 1
    rows = box.sizes[0] if box.sizes else 1
    if rows < 2 or length <= 0:
        middle = start + length / 2
        yield min(bisect_right(ends, middle), last) if middle else 0, box
        return
    row = 0
    for part in range(min(bisect_right(ends, start), last), last + 1):
        stop = rows if part == last else round((ends[part] - start) / length * rows)
        stop = min(max(stop, row), rows)
        if stop > row:
            offsets = (box.offsets[0] + row, *box.offsets[1:])
            yield part, Box(offsets, (stop - row, *box.sizes[1:]))
        row = stop
        if row == rows:
            return
