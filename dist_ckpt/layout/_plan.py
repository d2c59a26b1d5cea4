"""Which rank writes which slice to which place of which file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.canonical import HEADER_BYTES, MAX_PARAMS, MAX_STEP
from dist_ckpt.errors import MismatchError
from dist_ckpt.layout._share import Cuts, share_tensors
from dist_ckpt.resume_point import Canonical, shard_name, state_name
from dist_ckpt.slices import Box, ByteRange, Placement, Role, TensorSpec, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor

__all__ = ["STATE_ALIGN", "Layout", "Owned", "RankLayout", "plan_layout"]

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


def plan_layout(
    ranks: Sequence[Sequence[TensorSpec]], order: Sequence[str] | None = None, *, step: int = 0
) -> Layout:
    """Return who writes what.

    Args:
        ranks: Every rank's own specs, by rank, each in capture's order: weights, first moments,
            second moments, other optimizer tensors, buffers.
        order: Names of all parameters in the order of the canonical file; None takes the order in
            which the ranks have them, which makes one only where each rank has all.
        step: Of the save; all steps have one plan that the canonical file's header can count.

    Raises:
        MismatchError: Two ranks hold a tensor of one key with different shapes, dtypes or roles;
            the ranks' boxes of a tensor don't make it up; ``order`` lacks a parameter.
    """
    merged = _in_order(_merge(ranks), order)
    weights = [spec for spec in merged.values() if spec.role is Role.WEIGHT]
    cuts = share_tensors(merged, ranks)
    has_order = order is not None or _all_have_all(weights, ranks)
    canonical = _canonical(merged, weights, num_ranks=len(ranks), has_order=has_order, step=step)
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


#: The order of files and listings.
_ROLES = (*_IN_SHARD, Role.OPTIMIZER, Role.SHARED_BUFFER, Role.BUFFER)


def _in_order(
    merged: Mapping[str, TensorSpec], order: Sequence[str] | None
) -> dict[str, TensorSpec]:
    """Return the specs by role, in each role in the order of the parameters."""
    weights = [spec.param or "" for spec in merged.values() if spec.role is Role.WEIGHT]
    places = {name: place for place, name in enumerate(weights if order is None else order)}
    missing = [name for name in weights if name not in places]
    if missing:
        shown = ", ".join(missing[:20])
        raise MismatchError(
            f"order= lacks {len(missing)} of {len(weights)} parameters: {shown}.",
            next_step="Give the names of all ranks' parameters, in the order of the whole model.",
            missing=missing,
        )
    buffers = {Role.BUFFER: len(_ROLES), Role.SHARED_BUFFER: len(_ROLES)}  # as the model has them
    rank_of = {role: number for number, role in enumerate(_ROLES)} | buffers

    def place(item: tuple[str, TensorSpec]) -> tuple[int, int]:
        spec = item[1]
        return rank_of[spec.role], 0 if spec.param is None else places[spec.param]

    return dict(sorted(merged.items(), key=place))


def _all_have_all(weights: Sequence[TensorSpec], ranks: Sequence[Sequence[TensorSpec]]) -> bool:
    counts = (sum(spec.role is Role.WEIGHT for spec in specs) for specs in ranks)
    return all(count == len(weights) for count in counts)


def _fill_shards(
    shards: Sequence[_Packer],
    merged: Mapping[str, TensorSpec],
    cuts: Cuts,
    fill_for: Sequence[TensorSpec] | None,
) -> list[ByteRange]:
    """Put weights and moments into the shards; return where zeros stand for absent moments."""
    zeros: list[ByteRange] = []
    for role in _IN_SHARD:
        for spec in _with_role(merged, role, fill_for):
            if isinstance(spec, _Absent):
                zeros.append(shards[0].skip(spec.num_bytes))
                continue
            for rank, box in cuts[spec.key]:
                shards[rank].add(spec, box)
    return zeros


def _fill_states(
    states: Sequence[_Packer],
    merged: Mapping[str, TensorSpec],
    cuts: Cuts,
    ranks: Sequence[Sequence[TensorSpec]],
) -> None:
    """Put what ranks share with those that write it, and each rank's own buffers with itself."""
    for role in (Role.OPTIMIZER, Role.SHARED_BUFFER):
        for spec in merged.values():
            if spec.role is role:
                for rank, box in cuts[spec.key]:
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


def _canonical(
    merged: Mapping[str, TensorSpec],
    weights: Sequence[TensorSpec],
    *,
    num_ranks: int,
    has_order: bool,
    step: int,
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
    if not has_order:
        refused = "ranks have different parameters, and no order= says how they follow each other"
    elif step > MAX_STEP:
        refused = f"steps above {MAX_STEP} don't fit its int32"
    elif num_params > MAX_PARAMS:
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
