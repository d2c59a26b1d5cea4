"""What a rank's ``.state`` file will hold behind the layout's tensors. Layer 3, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_ckpt.layout import STATE_ALIGN, RankLayout
from dist_ckpt.slices import Role
from dist_ckpt.staging._state_file import OwnTensor, StateTail, encode_tail

__all__ = ["Composed", "RankValues", "compose"]


@dataclass(frozen=True)
class RankValues:
    """What a rank keeps beside its tensors.

    Attributes:
        encode: Called with a sink for tensors, returns tagged JSON (``Captured.rank_values``).
        shared: Tagged JSON of the values meant to be the same on every rank.
        rank: This rank.
        step: Finished updates.
        id: Name of this save.
    """

    encode: Callable[[Callable[[str, Any], Any]], Any]
    shared: Any
    rank: int
    step: int
    id: str


@dataclass(frozen=True)
class Composed:
    """The part of a ``.state`` file whose size is known at the save only.

    Attributes:
        tensors: Tensors inside the values, each with its place.
        tail_start: Where the JSON begins.
        tail: The JSON and its length.
    """

    tensors: tuple[tuple[OwnTensor, torch.Tensor], ...]
    tail_start: int
    tail: bytes

    @property
    def state_bytes(self) -> int:
        """Length of the whole file."""
        return self.tail_start + len(self.tail)


@dataclass
class _Sink:
    """Collects tensors inside values; gives each a number, and a place behind the layout's."""

    end: int
    items: list[tuple[OwnTensor, torch.Tensor]] = field(default_factory=list)

    def put(self, _path: str, value: torch.Tensor | np.ndarray[Any, Any]) -> int:
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value.detach()
        start = -(-self.end // STATE_ALIGN) * STATE_ALIGN
        own = OwnTensor(start, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self.items.append((own, tensor))
        self.end = own.byte_range.stop
        return len(self.items) - 1


def compose(plan: RankLayout, values: RankValues) -> Composed:
    """Return what comes behind the layout's tensors; nothing is copied.

    Raises:
        UnsupportedValueError: A value appeared that can't be kept.
    """
    sink = _Sink(plan.state_bytes)
    encoded = values.encode(sink.put)
    buffers = {
        owned.key: OwnTensor(owned.start, owned.dtype, owned.box.sizes)
        for owned in plan.state
        if owned.role is Role.BUFFER
    }
    tail = StateTail(
        rank=values.rank,
        step=values.step,
        id=values.id,
        buffers=buffers,
        values=encoded,
        shared=values.shared,
        tensors=tuple(own for own, _ in sink.items),
    )
    return Composed(tuple(sink.items), sink.end, encode_tail(tail))
