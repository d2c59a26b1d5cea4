"""The copy of a list of tensors that was copied before, in a few calls. Layer 3, training thread.

A list is known by being the same object, with the same targets: `capture` returns the same list
only where no tensor of it has moved. Then all addresses are known, and many small tensors that lie
side by side in the arena are one call of ``np.concatenate``, instead of one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_ckpt.capture import LiveTensor
from dist_ckpt.layout import Owned
from dist_ckpt.staging._moves import LARGE_BYTES, Moves, is_plain
from dist_ckpt.staging._staged import part_of

__all__ = ["KnownCopy"]

_Target = tuple[Owned, torch.Tensor]
#: Target and source.
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Calls:
    """What copies a whole list."""

    joins: list[Callable[[], Any]] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)


class KnownCopy:
    """Remembers the last list, and from its second copy on how to copy it quickly."""

    def __init__(self) -> None:
        self._tensors: Sequence[LiveTensor] | None = None
        self._targets: Sequence[_Target] | None = None
        self._calls: _Calls | None = None
        self.is_possible = True

    def copy(self, tensors: Sequence[LiveTensor], targets: Sequence[_Target]) -> bool:
        """Return whether all was copied; False where the list is new, or needs more than that."""
        if tensors is not self._tensors or targets is not self._targets:
            self._tensors, self._targets = tensors, targets
            self._calls, self.is_possible = None, True
            return False
        if self._calls is None and self.is_possible:
            self._calls = _plan_calls(tensors, targets)
            self.is_possible = self._calls is not None
        if self._calls is None:
            return False
        for join in self._calls.joins:
            join()
        self._calls.moves.run()
        return True


def _plan_calls(tensors: Sequence[LiveTensor], targets: Sequence[_Target]) -> _Calls | None:
    """Return the calls that copy everything; None where a tensor isn't plain bytes."""
    live = {item.spec.key: item for item in tensors}
    pairs = []
    for owned, target in targets:
        item = live[owned.key]
        source = part_of(item.tensor, item.spec.boxes, owned.box)
        if not is_plain(source, target):
            return None
        if target.nbytes:
            pairs.append((target, source))
    calls = _Calls()
    for run, pitch in _runs(pairs):
        if len(run) == 1 and run[0][0].nbytes >= LARGE_BYTES:
            calls.moves.add(*run[0])
        else:
            calls.joins.append(_join([source for _, source in run], run[0][0], pitch))
    return calls


def _runs(pairs: Sequence[_Pair]) -> Iterator[tuple[list[_Pair], int]]:
    """Yield pairs that one call can copy, with their pitch: large ones alone.

    Small ones go together that lie side by side without a gap (0), or that are of one size at one
    distance from each other (which is the pitch).
    """
    run: list[_Pair] = []
    pitch: int | None = None
    for pair in pairs:
        if run:
            last = run[-1][0]
            distance, size = pair[0].data_ptr() - last.data_ptr(), pair[0].nbytes
            found = 0 if distance == last.nbytes else distance
            fits = size < LARGE_BYTES and last.nbytes < LARGE_BYTES
            fits &= found == 0 or (size == last.nbytes and found > size)
            if fits and pitch in (None, found):
                run.append(pair)
                pitch = found
                continue
            yield run, pitch or 0
        run, pitch = [pair], None
    if run:
        yield run, pitch or 0


def _join(sources: Sequence[torch.Tensor], first: torch.Tensor, pitch: int) -> Callable[[], Any]:
    """Return the call that copies small tensors to where the ``first`` target begins."""
    flat = first.view(-1).view(torch.uint8)
    # One element may have any stride, which view(-1) would keep.
    rows = [source.as_strided((source.numel(),), (1,)) for source in sources]
    arrays = [row.view(torch.uint8).numpy() for row in rows]
    if pitch == 0:
        total = sum(source.nbytes for source in sources)
        packed = flat.as_strided((total,), (1,)).numpy()
        return lambda: np.concatenate(arrays, out=packed)
    lines = [array.reshape(1, -1) for array in arrays]
    pitched = flat.as_strided((len(lines), first.nbytes), (pitch, 1)).numpy()
    return lambda: np.concatenate(lines, out=pitched)
