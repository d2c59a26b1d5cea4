"""Copy from the GPU during the next forward and backward, fenced before the next update. Layer 3.

What only the optimizer changes stays as it is until its next step. So the copy runs on a side
stream, and a hook that the optimizer calls before its step makes the training stream (not the host)
wait for it. The hook is also the proof: if none has fired by the next boundary (CUDA graphs, an
optimizer inside backward), nobody knows what was copied, and the copy counts as dropped. So it does
where torch has counted a write into a tensor between the beginning of the copy and the hook; a
script that does that once will do it again, and nothing overlaps any more.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from dist_ckpt.errors import JobError, StorageError
from dist_ckpt.storage import Arena

__all__ = ["CudaStreams", "Overlap", "Streams"]

#: So many dropped copies in a row turn overlap off.
_PATIENCE = 3
_NO_HOOK = "the optimizer's pre-step hook didn't fire"

_Mark: TypeAlias = "list[tuple[torch.device, torch.cuda.Event]]"


class Streams(Protocol):
    """What :class:`Overlap` needs of a device; a test's own shows when each is called."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Queue the copies behind the work queued so far; return a mark of their end."""

    def hold(self, mark: Any) -> None:
        """Make work queued from now on wait for ``mark``; the host goes on."""

    def wait(self, mark: Any) -> None:
        """Return once ``mark`` is passed."""


class CudaStreams:
    """One side stream of each CUDA device that something is copied from.

    torch queues a copy on a stream of the tensor's own device, whatever device is the current one.
    """

    def __init__(self) -> None:
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Mark:
        """Queue the copies on side streams, behind what their devices' current streams have."""
        by_device = defaultdict(list)
        for target, source in pairs:
            by_device[source.device].append((target, source))
        marks: _Mark = []
        for device, group in by_device.items():
            side = self._side(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for target, source in group:
                    target.copy_(source, non_blocking=True)
                    # The allocator must not hand this memory out while the side stream reads it.
                    source.record_stream(side)
                mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
                mark.record(side)
            marks.append((device, mark))
        return marks

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._sides[device]

    def hold(self, mark: _Mark) -> None:
        """Make each device's current stream wait for the copies from that device."""
        for device, event in mark:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, mark: _Mark) -> None:
        """Wait on the host."""
        for _, event in mark:
            event.synchronize()


class Overlap:
    """The fence between one copy at a time and the optimizers' next update.

    Args:
        optimizers: Each gets a pre-step hook; removed by :meth:`close`.
        streams: How copies are queued.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], streams: Streams) -> None:
        self._streams = streams
        self._hooks = [opt.register_step_pre_hook(self._before_step) for opt in optimizers]
        self._mark: Any = None
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        self._is_off = False
        self._changed: str | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._fenced = False
        self._dropped = 0
        self._has_fired = False
        self._pinned: int | None = None

    @property
    def is_on(self) -> bool:
        """False once several copies in a row had to be dropped, or one that was written into."""
        return not self._is_off

    def start(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], keys: Sequence[str] = ()
    ) -> None:
        """Queue the copies of one instant; the one before must be settled.

        Args:
            pairs: Where each is copied to, and from.
            keys: What the tensors are called, for the warning; none or as many as pairs.
        """
        names = keys or ["a tensor"] * len(pairs)
        sources = [source for _, source in pairs]
        self._mark = self._streams.copy(pairs)
        self._watched = [(k, s, _writes(s)) for k, s in zip(names, sources, strict=True)]
        self._fenced = False
        self._changed = None
        self._settled.clear()

    def _before_step(self, *_: Any) -> None:
        if not self._settled.is_set():
            self._streams.hold(self._mark)
            self._has_fired = True
            # One that was written into is left to the next boundary, which makes it again.
            if self._is_untouched():
                self._end(fenced=True)

    def _is_untouched(self) -> bool:
        """Return whether nothing has been written since the start, as far as torch counts it."""
        if self._changed is None:
            for key, source, writes in self._watched:
                if _writes(source) != writes:
                    self._changed = f"{key} was changed before the optimizer's step"
                    break
        return self._changed is None

    def _end(self, *, fenced: bool) -> None:
        self._fenced = fenced
        self._watched = []
        self._settled.set()

    def settle(self) -> bool:
        """At the next boundary: return whether the copy stands; if not, it counts as dropped."""
        if self._settled.is_set():
            self._dropped = 0 if self._fenced else self._dropped
            return True
        # It may still be writing into the arena, where the next copy goes.
        self._streams.wait(self._mark)
        self._dropped += 1
        self._is_off = self._changed is not None or self._dropped >= _PATIENCE
        self._end(fenced=False)
        if self._is_off:
            no_hook = f"the optimizer's pre-step hook hasn't fired for {_PATIENCE} saves"
            why = self._changed or no_hook
            warnings.warn(
                f"dist_ckpt: {why}; saves copy at the boundary from now on.", stacklevel=2
            )
        return False

    def finish(self) -> None:
        """Wait on the host for a copy after which no boundary comes; training thread.

        It stands where the hook has fired for an earlier copy: then the hook would have fired for
        an update since, too. Else nobody knows what was copied, and it counts as dropped.
        """
        if not self._settled.is_set():
            self._streams.wait(self._mark)
            self._end(fenced=self._has_fired and self._is_untouched())

    def wait(self, timeout_secs: float) -> None:
        """Return once the copy is whole and of one instant; background thread.

        Raises:
            JobError: It was dropped, or no update came in time.
        """
        if not self._settled.wait(timeout_secs):
            raise JobError(
                f"No optimizer step came within {timeout_secs:g} s to settle the copy.",
                next_step="Raise timeout_secs if a step takes this long.",
            )
        if not self._fenced:
            raise JobError(
                f"The copy was dropped: {self._changed or _NO_HOOK}.",
                next_step="It is made again at this boundary.",
            )
        self._streams.wait(self._mark)

    def pin(self, arena: Arena) -> None:
        """Have the arena's pages registered with CUDA, so that copies into it can overlap."""
        if not torch.cuda.is_available():
            return
        self.unpin()
        address = arena.array.ctypes.data
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, arena.size_bytes, 0)
        if int(status) != 0:
            raise StorageError(
                f"CUDA refused to pin the arena of {arena.size_bytes} bytes (status {status}).",
                next_step="Raise the limit of locked memory (ulimit -l).",
                operation="cudaHostRegister",
            )
        self._pinned = address

    def unpin(self) -> None:
        """Take the registration back; must come before the arena's memory goes."""
        if self._pinned is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._pinned)
            self._pinned = None

    def close(self) -> None:
        """Remove the hooks and unpin the arena."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.unpin()


def _writes(tensor: torch.Tensor) -> int:
    """Return how many writes into the memory torch has counted, through any of its views.

    None in what was made in inference mode, as by an optimizer that steps there.
    """
    # Autograd's own count; there is no public name.
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
