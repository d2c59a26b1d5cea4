"""One rank's arena and the copy of one instant into it. Layer 3, training thread.

The arena holds the two files that the rank writes, one behind the other, in the order of their
bytes. It is allocated and touched once and reused by every save: copying into fresh pages runs at a
fifth of the speed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dist_ckpt.canonical import encode_header
from dist_ckpt.capture import LiveTensor
from dist_ckpt.collecting import without_collection
from dist_ckpt.errors import StorageError
from dist_ckpt.layout import Layout, Owned, RankLayout
from dist_ckpt.slices import dtype_size
from dist_ckpt.staging._compose import Composed, RankValues, compose
from dist_ckpt.staging._known_copy import KnownCopy
from dist_ckpt.staging._moves import LARGE_BYTES, Moves, is_plain
from dist_ckpt.staging._overlap import Overlap
from dist_ckpt.staging._staged import Staged, Streamed, Writable, optimizer_end, part_of
from dist_ckpt.staging._state_file import OwnTensor
from dist_ckpt.storage import PAGE_BYTES, Arena

__all__ = ["Staging", "torch_dtype"]

#: Room for values whose size is known at the save only (RNG, cursor, user's state); grows when it
#: must.
_SLACK_BYTES = 1 << 20


class Staging:
    """Owns the arena; turns live tensors into the bytes of this rank's files.

    Args:
        overlap: Copies what an optimizer updates during the next step (CUDA), None where
            everything is copied at the boundary.
        warn: Told once where there is no memory for an arena; saves stream then, blocking.
    """

    def __init__(
        self, overlap: Overlap | None = None, *, warn: Callable[[str], None] = lambda _text: None
    ) -> None:
        self._warn = warn
        self._is_short = False
        self._arena: Arena | None = None
        self._bytes: torch.Tensor | None = None
        self._plan: RankLayout | None = None
        self._optimizer_bytes = 0
        self._targets: list[tuple[Owned, torch.Tensor]] = []
        self._overlap = overlap
        self._known = KnownCopy()

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory that the arena takes now."""
        return self._arena.size_bytes if self._arena else 0

    def close(self) -> None:
        """Give the arena back; the bytes of an earlier :class:`Staged` are gone."""
        if self._overlap is not None:
            self._overlap.close()
        self._drop_arena()

    def _drop_arena(self) -> None:
        self._targets, self._bytes, self._plan = [], None, None
        self._known = KnownCopy()  # it holds addresses of the arena
        arena, self._arena = self._arena, None
        if arena is not None:
            if self._overlap is not None:
                self._overlap.unpin()
            arena.close()

    def settle(self) -> bool:
        """At a boundary: return whether the last copy stands; False where it must be made again."""
        return self._overlap is None or self._overlap.settle()

    def finish(self) -> None:
        """Let the last copy be whole though no update follows; training thread, before waiting."""
        if self._overlap is not None:
            self._overlap.finish()

    def adopt(self, plan: RankLayout, *, values_bytes: int = 0) -> bool:
        """Have an arena that fits ``plan``, its pages touched; costs time only for a new plan.

        Returns:
            False where the memory can't be had: there is no arena then, and isn't asked for again.
        """
        if not self._is_short:
            try:
                self._adopt(plan, values_bytes)
            except StorageError as error:
                self._is_short = True
                self._drop_arena()
                self._warn(f"saves block training until they are written: {error}")
        return not self._is_short

    @without_collection()
    def _adopt(self, plan: RankLayout, values_bytes: int) -> None:
        need = _pages(plan.shard_bytes) + _pages(plan.state_bytes + values_bytes + _SLACK_BYTES)
        if need <= self.size_bytes and (plan is self._plan or plan == self._plan):
            return
        if self._arena is None or need > self.size_bytes:
            self._drop_arena()  # two at once might not fit
            arena = Arena(need)
            arena.populate()
            self._arena, self._bytes = arena, torch.from_numpy(arena.array)
            self._pin(arena)
        else:
            # Gaps and zeros of the new plan may lie where the old one had values.
            self._arena.array.fill(0)
        self._plan = plan
        self._optimizer_bytes = optimizer_end(plan)
        base = _pages(plan.shard_bytes)
        self._targets = [(owned, self._view(owned, 0)) for owned in plan.shard]
        self._targets += [(owned, self._view(owned, base)) for owned in plan.state]

    def _pin(self, arena: Arena) -> None:
        """Have copies from the device overlap, or give that up and say so."""
        if self._overlap is None:
            return
        try:
            self._overlap.pin(arena)
        except StorageError as error:
            self._warn(f"saves copy at the boundary, without overlap: {error}")
            self._overlap.close()
            self._overlap = None

    def _view(self, owned: Owned | OwnTensor, base: int) -> torch.Tensor:
        if self._bytes is None:
            raise RuntimeError("the arena isn't there yet")
        if isinstance(owned, Owned):
            start, stop, shape = owned.start, owned.stop, owned.box.sizes
        else:
            start, stop = owned.byte_range.start, owned.byte_range.stop
            shape = owned.shape
        flat = self._bytes[base + start : base + stop]
        return flat.view(torch_dtype(owned.dtype)).view(shape)

    def stage(
        self,
        layout: Layout,
        tensors: Sequence[LiveTensor],
        values: RankValues,
        *,
        may_overlap: bool = False,
    ) -> Writable:
        """Copy one instant into the arena.

        Everything is copied when this returns, except, with ``may_overlap`` on CUDA, what an
        optimizer updates: that is copied before the optimizer's next update, and ``wait`` of what
        is returned waits for it. Where there is no memory for an arena nothing is copied: what is
        returned ``blocks``.

        Raises:
            UnsupportedValueError: A value appeared that can't be kept.
        """
        plan = layout.ranks[values.rank]
        composed = compose(plan, values)
        header = b""
        if layout.canonical.is_shard:
            header = encode_header(values.step, layout.canonical.num_params)
        if not self.adopt(plan, values_bytes=composed.state_bytes - plan.state_bytes):
            live = {item.spec.key: (item.tensor, item.spec.boxes) for item in tensors}
            return Streamed(plan, live, composed, header)
        overlap = self._overlap if may_overlap and self._overlap and self._overlap.is_on else None
        self._copy(tensors, overlap=overlap)
        self._copy_values(composed, plan)
        array, base = self._array, _pages(plan.shard_bytes)
        array[: len(header)] = np.frombuffer(header, np.uint8)
        return Staged(
            shard=array[:base],
            shard_bytes=plan.shard_bytes,
            state=array[base : base + _pages(composed.state_bytes)],
            state_bytes=composed.state_bytes,
            header_bytes=len(header),
            optimizer_bytes=self._optimizer_bytes,
            overlap=overlap,
        )

    def _copy_values(self, composed: Composed, plan: RankLayout) -> None:
        array, base = self._array, _pages(plan.shard_bytes)
        end = plan.state_bytes
        for own, tensor in composed.tensors:
            # Zeros, as between the layout's tensors: an earlier save may have had values there.
            array[base + end : base + own.start] = 0
            self._view(own, base).copy_(tensor)
            end = own.byte_range.stop
        tail = np.frombuffer(composed.tail, np.uint8)
        array[base + composed.tail_start : base + composed.state_bytes] = tail

    @property
    def _array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._arena is None:
            raise RuntimeError("the arena isn't there yet")
        return self._arena.array

    @without_collection()
    def _copy(self, tensors: Sequence[LiveTensor], *, overlap: Overlap | None) -> None:
        if overlap is None and self._known.copy(tensors, self._targets):
            return
        live: Mapping[str, LiveTensor] = {item.spec.key: item for item in tensors}
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        keys: list[str] = []
        moves = Moves()
        with torch.no_grad():
            for owned, target in self._targets:
                item = live[owned.key]
                source = part_of(item.tensor, item.spec.boxes, owned.box)
                # What no optimizer updates a forward may change: buffers, averaged encoders. And of
                # what was made in inference mode nobody could tell that something has.
                may_wait = item.is_updated and source.is_cuda and not source.is_inference()
                if overlap is not None and may_wait:
                    later.append((target, source))
                    keys.append(owned.key)
                elif not is_plain(source, target):
                    target.copy_(source)
                elif target.nbytes < LARGE_BYTES:
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
                else:
                    moves.add(target, source)
        moves.run()
        if overlap is not None:
            overlap.start(later, keys)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that the format calls ``name``.

    Raises:
        KeyError: The format knows no such dtype.
    """
    dtype_size(name)  # the format's own table decides, not torch's namespace
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise KeyError(name)
    return dtype
