"""What a generation holds, and where it goes on other ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.layout import Layout, Owned, plan_layout
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.slices import Box, Role, TensorSpec
from dist_ckpt.snapshot_index import IndexedTensor, decode_name, encode_name

__all__ = ["Contents", "Piece", "Plan", "plan_reshard", "sort_tensors"]

_MOMENTS = {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}
_ORDER = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.OPTIMIZER, Role.BUFFER)


@dataclass(frozen=True)
class Contents:
    """The tensors of a generation by what they are.

    Attributes:
        specs: In the canonical order, each tied tensor once: weights, first moments, second
            moments, other optimizer tensors, buffers.
        aliases: Another key of a tied tensor → its kept one.
    """

    specs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]


def sort_tensors(
    index: Mapping[str, IndexedTensor], point: ResumePoint, *, path: object
) -> Contents:
    """Return a generation's tensors in canonical order.

    The file that a tensor lies in tells what it is: a shard holds parameters and moments, a
    ``.state`` file everything else.

    Args:
        index: Key → tensor.
        point: The resume point, whose ``canonical.names`` are the parameters.
        path: Of the generation, for errors.

    Raises:
        CorruptFileError: Index and resume point contradict each other.
    """
    kept = [f"model/{encode_name(name)}" for name in point.canonical.names]
    if missing := [key for key in kept if key not in index]:
        raise _contradiction(path, f"{missing[0]!r} is in no file")
    rank_of = {key: number for number, key in enumerate(kept)}
    # Of tied tensors, which are the same bytes, the parameters' own keys are the kept ones.
    owner: dict[object, str] = {}
    for key in (*kept, *index):
        if key.startswith("model/"):
            owner.setdefault(_identity(key, index[key]), key)
    specs: list[TensorSpec] = []
    aliases: dict[str, str] = {}
    for key, tensor in index.items():
        if not _is_tiled([place.box for place in tensor.placements]):
            raise _contradiction(path, f"parts of {key!r} overlap")
        known = key if key in rank_of else owner.get(_identity(key, tensor), key)
        if known != key:
            aliases[key] = known
            continue
        found = _role_of(key, tensor, rank_of)
        if found is None:
            raise _contradiction(path, f"{key!r} belongs to none of its parameters")
        role, param = found
        box = Box.whole(tensor.shape)
        specs.append(TensorSpec(key, role, tensor.dtype, tensor.shape, (box,), param))

    def place(spec: TensorSpec) -> tuple[int, int]:
        if spec.role is Role.BUFFER:
            return _ORDER.index(spec.role), 0
        return _ORDER.index(spec.role), rank_of[f"model/{encode_name(spec.param or '')}"]

    return Contents(tuple(sorted(specs, key=place)), aliases)


def _identity(key: str, tensor: IndexedTensor) -> object:
    """Return what tied tensors of the model have in common: the bytes that they lie in."""
    return key.partition("/")[0], tensor.placements, tensor.dtype, tensor.shape


def _role_of(
    key: str, tensor: IndexedTensor, parameters: Collection[str]
) -> tuple[Role, str | None] | None:
    """Return what a tensor is and of which parameter; None where that can't be."""
    in_shard = tensor.placements[0].location.endswith(".shard")
    group, _, rest = key.partition("/")
    if group == "model":
        if key in parameters:
            return Role.WEIGHT, decode_name(rest)
        return None if in_shard else (Role.BUFFER, None)
    name, _, state = rest.partition("/")
    if f"model/{name}" not in parameters or (in_shard and state not in _MOMENTS):
        return None
    return _MOMENTS[state] if in_shard else Role.OPTIMIZER, decode_name(name)


def _is_tiled(boxes: Sequence[Box]) -> bool:
    """Return whether no two boxes have an element in common; they add up to their tensor."""
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets):
        # Cut along the first dim, as nearly all are: one look at each.
        if box.offsets[:1] != (end,) or any(box.offsets[1:]):
            break
        end += box.sizes[0]
    else:
        return True
    filled = [box for box in boxes if box.numel]
    return all(one.intersect(other) is None for one, other in combinations(filled, 2))


def _contradiction(path: object, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{path} contradicts itself: {what}.",
        next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        path=str(path),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor for one new rank."""

    rank: int
    owned: Owned


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Attributes:
        layout: Of the new ranks.
        pieces: Key → the boxes of it, row by row; of a buffer, the whole of it for each rank.
    """

    layout: Layout
    pieces: Mapping[str, Sequence[Piece]]


def plan_reshard(specs: Sequence[Sequence[TensorSpec]], step: int) -> Plan:
    """Return where the tensors go on as many new ranks as there are lists of specs."""
    layout = plan_layout(specs, step=step)
    pieces: dict[str, list[Piece]] = {tensor.key: [] for tensor in layout.tensors}
    for rank, plan in enumerate(layout.ranks):
        for owned in (*plan.shard, *plan.state):
            pieces[owned.key].append(Piece(rank, owned))
    for parts in pieces.values():
        parts.sort(key=lambda piece: (piece.owned.box.offsets, piece.rank))
    return Plan(layout, pieces)
