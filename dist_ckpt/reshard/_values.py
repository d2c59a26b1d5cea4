"""What each new rank keeps beside its share of the tensors. No I/O.

The rule is that of a resume at another world size, so that both give the same training: buffers and
values are rank 0's on every rank, ranks that existed keep their random state, and new ones derive
theirs. At the same world size every rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt.layout import STATE_ALIGN, RankLayout
from dist_ckpt.resume import derived_states
from dist_ckpt.slices import Role
from dist_ckpt.staging import OwnTensor, StateTail, encode_tail

__all__ = ["RankState", "plan_states", "source_of"]


@dataclass(frozen=True)
class RankState:
    """A new rank's ``.state`` file behind the optimizer's tensors and the buffers.

    Attributes:
        source: The old rank whose buffers and values it has.
        tail: What its JSON says; encoded only when it is written.
        tail_start: Where the JSON begins.
        state_bytes: Length of the whole file.
    """

    source: int
    tail: StateTail
    tail_start: int
    state_bytes: int


def source_of(rank: int, *, old: int, new: int) -> int:
    """Return the old rank whose buffers and values a new rank has."""
    return rank if old == new else 0


def plan_states(
    layouts: Sequence[RankLayout], tails: Sequence[StateTail], *, old: int, id_: str
) -> list[RankState]:
    """Return what ends each new rank's ``.state`` file.

    Args:
        layouts: Of the new ranks.
        tails: Of the old ranks, as many as there are new ones if there were so many, at least one.
        old: How many ranks the generation was saved by.
        id_: Name of the new resume point.
    """
    new = len(layouts)
    states = []
    for rank, layout in enumerate(layouts):
        source = source_of(rank, old=old, new=new)
        given = tails[source]
        tensors, end = _place(given.tensors, layout.state_bytes)
        if rank < old:
            rng = tails[rank].values["rng"]
        else:
            rng = derived_states(tails[0].values["rng"], step=given.step, rank=rank)
        tail = StateTail(
            rank=rank,
            step=given.step,
            id=id_,
            buffers={
                owned.key: OwnTensor(owned.start, owned.dtype, owned.box.sizes)
                for owned in layout.state
                if owned.role is Role.BUFFER
            },
            values={**given.values, "rng": rng},
            shared=given.shared,
            tensors=tensors,
        )
        states.append(RankState(source, tail, end, end + len(encode_tail(tail))))
    return states


def _place(tensors: Sequence[OwnTensor], end: int) -> tuple[tuple[OwnTensor, ...], int]:
    """Return the tensors, each behind the one before, and where the last ends."""
    placed = []
    for tensor in tensors:
        start = -(-end // STATE_ALIGN) * STATE_ALIGN
        placed.append(OwnTensor(start, tensor.dtype, tensor.shape))
        end = placed[-1].byte_range.stop
    return tuple(placed), end
