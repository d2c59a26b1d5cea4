"""A job of one rank: it agrees with itself. Layer 2, pure: no torch, no group, no store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dist_ckpt.errors import UsageError

__all__ = ["SoloComm"]

T = TypeVar("T")


class SoloComm:
    """The `Comm` of world size one."""

    rank: int = 0
    world_size: int = 1

    def agree(self, values: Sequence[int], *, phase: str = "agreement") -> list[int]:
        """Return the values. See `Comm.agree`."""
        del phase
        return list(values)

    def mean(self, value: float, *, phase: str = "mean") -> float:
        """Return the value. See `Comm.mean`."""
        del phase
        return float(value)

    def gather(self, payload: bytes, *, phase: str = "gather") -> list[bytes]:
        """Return the payload alone. See `Comm.gather`."""
        del phase
        return [payload]

    def broadcast(self, payload: bytes | None, *, phase: str = "broadcast") -> bytes:
        """Return the payload. See `Comm.broadcast`."""
        if payload is None:
            raise UsageError(f"Rank 0 had nothing to send in {phase}.", phase=phase)
        return payload

    def together(self, phase: str, fn: Callable[[], T]) -> T:
        """Run ``fn``; what it raises is raised. See `Comm.together`."""
        del phase
        return fn()

    def exchange(self, phase: str, report: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return ``decide([report])``. See `Comm.exchange`."""
        del phase
        return decide([report])

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
