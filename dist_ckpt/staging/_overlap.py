"""Copy from the GPU during the next forward and backward, fenced before the next update. Layer 3.

What only the optimizer changes stays as it is until its next step. So the copy runs on a side
stream, and a hook that the optimizer calls before its step makes the training stream (not the host)
wait for it. The hook is also the proof: if none has fired by the next boundary (CUDA graphs, an
optimizer inside backward), nobody knows what was copied, and the copy counts as dropped.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dist_ckpt.errors import JobError, StorageError
from dist_ckpt.storage import Arena

__all__ = ["CudaStreams", "Overlap", "Streams"]

#: So many dropped copies in a row turn overlap off.
_PATIENCE = 3


class Streams(Protocol):
    """What :class:`Overlap` needs of a device; a test's own shows when each is called."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Queue the copies behind the work queued so far; return a mark of their end."""

    def hold(self, mark: Any) -> None:
        """Make work queued from now on wait for ``mark``; the host goes on."""

    def wait(self, mark: Any) -> None:
        """Return once ``mark`` is passed."""


class CudaStreams:
    """One side stream of the current CUDA device."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Queue the copies on the side stream, behind what the current stream has queued."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                # The allocator must not hand this memory out while the side stream reads it.
                source.record_stream(self._side)
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self._side)
        return mark

    def hold(self, mark: torch.cuda.Event) -> None:
        """Make the current stream wait for the mark."""
        torch.cuda.current_stream().wait_event(mark)

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait on the host."""
        mark.synchronize()


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
        self._settled = threading.Event()
        self._settled.set()
        self._fenced = False
        self._dropped = 0
        self._has_fired = False
        self._pinned: int | None = None

    @property
    def is_on(self) -> bool:
        """False once several copies in a row had to be dropped."""
        return self._dropped < _PATIENCE

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue the copies of one instant; the one before must be settled."""
        self._mark = self._streams.copy(pairs)
        self._fenced = False
        self._settled.clear()

    def _before_step(self, *_: Any) -> None:
        if not self._settled.is_set():
            self._streams.hold(self._mark)
            self._has_fired = self._fenced = True
            self._settled.set()

    def settle(self) -> bool:
        """At the next boundary: return whether the copy stands; if not, it counts as dropped."""
        if self._settled.is_set():
            self._dropped = 0 if self._fenced else self._dropped
            return True
        # It may still be writing into the arena, where the next copy goes.
        self._streams.wait(self._mark)
        self._dropped += 1
        self._settled.set()
        if not self.is_on:
            warnings.warn(
                "dist_ckpt: the optimizer's pre-step hook hasn't fired for "
                f"{_PATIENCE} saves; saves copy at the boundary from now on.",
                stacklevel=2,
            )
        return False

    def finish(self) -> None:
        """Wait on the host for a copy after which no boundary comes; training thread.

        It stands where the hook has fired for an earlier copy: then the hook would have fired for
        an update since, too. Else nobody knows what was copied, and it counts as dropped.
        """
        if not self._settled.is_set():
            self._streams.wait(self._mark)
            self._fenced = self._has_fired
            self._settled.set()

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
                "The copy was dropped: the optimizer's pre-step hook didn't fire.",
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
