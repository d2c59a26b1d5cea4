"""Copies between two places in host memory by a few threads. Layer 3, training thread.

Large tensors are cut into pieces and handed out one piece at a time: a thread whose core is busy
takes fewer, and nobody waits longer than for the end of one piece. torch's own ``copy_`` gives each
thread a fixed part of each tensor and waits for the slowest every time, and one thread alone has
about two thirds of what the memory can do.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

import torch

from dist_ckpt.storage import for_each

__all__ = ["LARGE_BYTES", "Moves", "is_plain"]

#: From this size on a call for a tensor costs nothing beside its bytes.
LARGE_BYTES: Final = 1 << 16
#: So small that the end of one is no wait (under a millisecond), so large that handing it out costs
#: nothing.
_PIECE_BYTES: Final = 4 << 20
#: More gain little on memory, and every rank of a host has its own.
_MOST_THREADS: Final = 4


class Moves:
    """A list of byte ranges to copy; knows addresses alone, the caller keeps the memory alive."""

    def __init__(self) -> None:
        self._moves: list[tuple[int, int, int]] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have the bytes of ``source`` copied; both as `is_plain` wants them."""
        to, start, size = target.data_ptr(), source.data_ptr(), target.nbytes
        for at in range(0, size, _PIECE_BYTES):
            self._moves.append((to + at, start + at, min(_PIECE_BYTES, size - at)))

    def run(self) -> None:
        """Return when everything is copied; can be run again. No thread is left behind."""
        moves = self._moves
        for_each(range(len(moves)), lambda: lambda at: _move(*moves[at]), _threads())


def is_plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the bytes of ``source``, in order, are those that ``target`` must hold."""
    return (
        source.is_cpu
        and source.dtype == target.dtype
        and source.nbytes == target.nbytes
        and source.is_contiguous()
        # Conjugated or negated lazily: only a real copy resolves that.
        and not source.is_complex()
        and not source.is_neg()
    )


def _move(to: int, start: int, size: int) -> None:
    ctypes.memmove(to, start, size)  # lets go of the GIL


@cache
def _threads() -> int:
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return min(len(allowed(0)) if allowed else os.cpu_count() or 1, _MOST_THREADS)
