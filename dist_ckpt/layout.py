"""Which rank writes which slice where, and which bytes a restore must read. Layer 3, pure.

Parameters and their optimizer state are replicas wherever several ranks hold the same box. Each
such group of ranks shares the work in equal bytes, decided before anything is copied. Buffers may
differ by rank, so every rank writes its own and the index points at rank 0's. The same input gives
the same layout on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.canonical import HEADER_BYTES, MAX_PARAMS
from dist_ckpt.errors import MismatchError
from dist_ckpt.resume_point import Canonical, shard_name, state_name
from dist_ckpt.slices import Box, ByteRange, Placement, Role, TensorSpec, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor

__all__ = [
    "Layout",
    "Owned",
    "RankLayout",
    "Run",
    "decode_specs",
    "encode_specs",
    "plan_layout",
    "plan_runs",
]

#: Tensors of a `.state` file start at multiples of this: every dtype can be viewed in place.
STATE_ALIGN = 64
_IN_SHARD = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class Owned:
    """One box that a rank writes, from byte ``start`` of its shard or of its ``.state`` on."""

    key: str
    role: Role
    dtype: str
    box: Box
    start: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.box.numel * dtype_size(self.dtype)

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank writes.

    Attributes:
        shard: Boxes of the shard, in the order of the file.
        shard_bytes: True length of the shard.
        state: Boxes at the start of the ``.state`` file, in its order.
        state_bytes: Where the values behind those boxes may start.
        zeros: Byte ranges of the shard that hold zeros (moments of parameters without state).
    """

    shard: tuple[Owned, ...]
    shard_bytes: int
    state: tuple[Owned, ...]
    state_bytes: int
    zeros: tuple[ByteRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Who writes what, for all ranks, with the index and the canonical file that follow from it."""

    ranks: tuple[RankLayout, ...]
    tensors: tuple[IndexedTensor, ...]
    canonical: Canonical


def encode_specs(specs: Sequence[TensorSpec]) -> bytes:
    """Return one rank's specs as JSON, for the other ranks."""
    rows = [
        [s.key, s.role, s.dtype, s.shape, [[b.offsets, b.sizes] for b in s.boxes], s.param]
        for s in specs
    ]
    return json.dumps(rows, allow_nan=False).encode()


def decode_specs(data: bytes) -> list[TensorSpec]:
    """Return what :func:`encode_specs` was given."""
    return [
        TensorSpec(
            key=key,
            role=Role(role),
            dtype=dtype,
            shape=tuple(shape),
            boxes=tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes),
            param=param,
        )
        for key, role, dtype, shape, boxes, param in json.loads(data)
    ]


def specs_digest(specs: Sequence[TensorSpec]) -> int:
    """Return 63 bits that differ where two ranks' or two saves' specs differ."""
    digest = hashlib.blake2b(encode_specs(specs), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def plan_layout(ranks: Sequence[Sequence[TensorSpec]]) -> Layout:
    """Return who writes what.

    Args:
        ranks: Every rank's own specs, by rank, each in capture's order: weights, first moments,
            second moments, other optimizer tensors, buffers.

    Raises:
        MismatchError: Two ranks hold a tensor of one key with different shapes, dtypes or roles.
    """
    merged = _merge(ranks)
    weights = [spec for spec in merged.values() if spec.role is Role.WEIGHT]
    holders = _holders(ranks)
    cuts = _share(weights, holders, _bytes_by_param(merged))
    canonical = _canonical(merged, weights, num_ranks=len(ranks))
    shards = [_Packer(start=HEADER_BYTES if canonical.is_shard else 0) for _ in ranks]
    zeros = _fill_shards(shards, merged, cuts, weights if canonical.is_shard else None)
    states = [_Packer(align=STATE_ALIGN) for _ in ranks]
    _fill_states(states, merged, cuts, ranks)
    plans = tuple(
        RankLayout(
            shard=tuple(shard.owned),
            shard_bytes=shard.end,
            state=tuple(state.owned),
            state_bytes=state.end,
            zeros=tuple(zeros) if rank == 0 else (),
        )
        for rank, (shard, state) in enumerate(zip(shards, states, strict=True))
    )
    return Layout(plans, _index(merged, plans), canonical)


_Cuts = Mapping[str, Sequence[tuple[int, Box]]]


def _fill_shards(
    shards: Sequence[_Packer],
    merged: Mapping[str, TensorSpec],
    cuts: _Cuts,
    fill_for: Sequence[TensorSpec] | None,
) -> list[ByteRange]:
    """Put weights and moments into the shards; return where zeros stand for absent moments."""
    zeros: list[ByteRange] = []
    for role in _IN_SHARD:
        for spec in _with_role(merged, role, fill_for):
            if isinstance(spec, _Absent):
                zeros.append(shards[0].skip(spec.num_bytes))
                continue
            for rank, box in cuts[spec.param or ""]:
                shards[rank].add(spec, box)
    return zeros


def _fill_states(
    states: Sequence[_Packer],
    merged: Mapping[str, TensorSpec],
    cuts: _Cuts,
    ranks: Sequence[Sequence[TensorSpec]],
) -> None:
    """Put the other optimizer tensors with their parameters' owners, and buffers with all ranks."""
    shapes = {spec.param: spec.shape for spec in merged.values() if spec.role is Role.WEIGHT}
    for spec in merged.values():
        if spec.role is Role.OPTIMIZER:
            parts = cuts[spec.param or ""]
            follows = spec.shape == shapes[spec.param]
            for rank, box in parts if follows else ((parts[0][0], Box.whole(spec.shape)),):
                states[rank].add(spec, box)
    for rank, specs in enumerate(ranks):
        for spec in specs:
            if spec.role is Role.BUFFER:
                states[rank].add(spec, Box.whole(spec.shape))


class _Packer:
    """Puts boxes behind each other, each aligned to its element size (or to ``align``)."""

    def __init__(self, start: int = 0, align: int = 0) -> None:
        self.owned: list[Owned] = []
        self.end = start
        self._align = align

    def add(self, spec: TensorSpec, box: Box) -> None:
        align = self._align or dtype_size(spec.dtype)
        start = -(-self.end // align) * align
        owned = Owned(spec.key, spec.role, spec.dtype, box, start)
        self.owned.append(owned)
        self.end = owned.stop

    def skip(self, num_bytes: int) -> ByteRange:
        gap = ByteRange(self.end, self.end + num_bytes)
        self.end = gap.stop
        return gap


@dataclass(frozen=True, slots=True)
class _Absent:
    """A moment that doesn't exist (yet) and is zeros in the canonical file."""

    num_bytes: int


def _with_role(
    merged: Mapping[str, TensorSpec], role: Role, fill_for: Sequence[TensorSpec] | None
) -> Iterator[TensorSpec | _Absent]:
    """Yield a role's tensors in canonical order; with ``fill_for``, stand-ins for absent ones."""
    if fill_for is None:
        yield from (spec for spec in merged.values() if spec.role is role)
        return
    by_param = {spec.param: spec for spec in merged.values() if spec.role is role}
    for weight in fill_for:
        spec = by_param.get(weight.param)
        yield _Absent(4 * weight.numel) if spec is None else spec


def _merge(ranks: Sequence[Sequence[TensorSpec]]) -> dict[str, TensorSpec]:
    merged: dict[str, TensorSpec] = {}
    for rank, specs in enumerate(ranks):
        for spec in specs:
            known = merged.setdefault(spec.key, spec)
            if (known.shape, known.dtype, known.role) != (spec.shape, spec.dtype, spec.role):
                raise MismatchError(
                    f"Rank {rank} holds {spec.key} as {spec.dtype}{list(spec.shape)}, an earlier "
                    f"rank as {known.dtype}{list(known.shape)}.",
                    next_step="Build the same model and optimizer on every rank.",
                    key=spec.key,
                    rank=rank,
                )
    return merged


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


def _bytes_by_param(merged: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return parameter name → bytes of its weight and of everything that follows it."""
    total: dict[str, int] = {}
    for spec in merged.values():
        if spec.param is not None:
            total[spec.param] = total.get(spec.param, 0) + spec.num_bytes
    return total


def _share(
    weights: Sequence[TensorSpec],
    holders: Mapping[str, Mapping[Box, Sequence[int]]],
    bytes_by_param: Mapping[str, int],
) -> dict[str, list[tuple[int, Box]]]:
    """Return parameter name → its boxes with the rank that owns each.

    Boxes that the same ranks hold form one stream in canonical order. The stream is cut at equal
    bytes, along dim 0 of the box that a cut falls into, so that every rank's part is one run of the
    canonical order.
    """
    streams: dict[tuple[int, ...], list[tuple[TensorSpec, Box]]] = {}
    for spec in weights:
        for box, ranks in holders[spec.param or ""].items():
            streams.setdefault(tuple(ranks), []).append((spec, box))
    owned: dict[str, list[tuple[int, Box]]] = {}
    for ranks, stream in streams.items():
        costs = [
            bytes_by_param[spec.param or ""] * box.numel // max(spec.numel, 1)
            for spec, box in stream
        ]
        share = sum(costs) / len(ranks) or 1.0
        passed = 0
        for (spec, box), cost in zip(stream, costs, strict=True):
            parts = owned.setdefault(spec.param or "", [])
            for index, part in _cut(box, passed / share, cost / share, len(ranks)):
                parts.append((ranks[index], part))
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


def _canonical(
    merged: Mapping[str, TensorSpec], weights: Sequence[TensorSpec], *, num_ranks: int
) -> Canonical:
    moments: dict[str | None, set[Role]] = {}
    others: dict[str | None, str] = {}
    for spec in merged.values():
        if spec.role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
            moments.setdefault(spec.param, set()).add(spec.role)
        elif spec.role is Role.OPTIMIZER:
            others.setdefault(spec.param, spec.key)
    stateful = set(moments) | set(others)
    whole = {Role.EXP_AVG, Role.EXP_AVG_SQ}
    in_shard = [spec for spec in merged.values() if spec.role in _IN_SHARD]
    num_params = sum(spec.numel for spec in weights)
    refused = None
    if num_params > MAX_PARAMS:
        refused = f"{num_params} parameters are more than an int32 counts ({MAX_PARAMS})"
    elif wide := [spec for spec in in_shard if spec.dtype not in _NARROW]:
        refused = f"{wide[0].key} is {wide[0].dtype}, which float32 can't hold"
    elif lacking := [p for p in stateful if moments.get(p) != whole]:
        refused = f"the optimizer keeps no Adam moments for {min(map(str, lacking))!r}"
    return Canonical(
        names=tuple(spec.param or "" for spec in weights),
        num_params=num_params,
        is_shard=(
            refused is None
            and num_ranks == 1
            and all(spec.dtype == "float32" for spec in in_shard)
            and all(spec.boxes == (Box.whole(spec.shape),) for spec in in_shard)
        ),
        refused=refused,
        stateless=tuple(spec.param or "" for spec in weights if spec.param not in stateful),
    )


_NARROW = ("float32", "bfloat16", "float16")


def _index(
    merged: Mapping[str, TensorSpec], plans: Sequence[RankLayout]
) -> tuple[IndexedTensor, ...]:
    places: dict[str, list[Placement]] = {key: [] for key in merged}
    for rank, plan in enumerate(plans):
        for name, boxes in ((shard_name(rank), plan.shard), (state_name(rank), plan.state)):
            for owned in boxes:
                if owned.role is Role.BUFFER and places[owned.key]:
                    continue  # the first rank that has the buffer stands for all
                place = Placement(name, owned.box, ByteRange(owned.start, owned.stop))
                places[owned.key].append(place)
    return tuple(
        IndexedTensor(key, spec.dtype, spec.shape, tuple(places[key]))
        for key, spec in merged.items()
    )


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
