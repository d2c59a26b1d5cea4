"""One contender, its turns on all ranks together, and what was measured of it. Layer 7."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dist_ckpt.bench._contender import Contender

__all__ = ["Entrant", "FailedError", "compare", "first_line", "largest", "meet", "together"]

_T = TypeVar("_T")
_own_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}


@dataclass
class Entrant:
    """A contender and what was measured of it, in seconds.

    Attributes:
        contender: Who.
        correct: ``yes``, or what differs; empty until its first turn is over.
        error: Why it failed; None while it hasn't.
        left_out: Why it makes no further rounds; None while it makes them.
        stored_bytes: What its last save left on the disk.
        samples: Figure → one number a round.
        turn_secs: What its last turn took, on the slowest rank.
    """

    contender: Contender
    correct: str = ""
    error: str | None = None
    left_out: str | None = None
    stored_bytes: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)
    turn_secs: float = 0.0

    @property
    def takes_part(self) -> bool:
        """Whether it makes further rounds."""
        return self.error is None and self.left_out is None

    def add(self, figure: str, secs: float) -> None:
        """Keep one more sample."""
        self.samples.setdefault(figure, []).append(secs)

    def turn(self, work: Callable[[Entrant], None]) -> None:
        """Let it make its turn; what fails is kept as its error. Collective."""
        began = time.monotonic()
        try:
            work(self)
        except FailedError as error:
            self.error = str(error)
        self.turn_secs = largest(time.monotonic() - began)

    def to_json(self) -> dict[str, Any]:
        """Return what the answer says about it."""
        return {
            "correct": self.correct,
            "error": self.error,
            "left_out": self.left_out,
            "stored_bytes": self.stored_bytes,
            "samples": self.samples,
        }


class FailedError(Exception):
    """A contender failed on some rank; all ranks know."""


def together(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns, once it has on every rank; collective.

    Raises:
        FailedError: It failed somewhere; on every rank.
    """
    fault, result = "", None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - told in the table
        fault = first_line(error)
    if largest(float(bool(fault))):
        raise FailedError(fault or "it failed on another rank")
    return cast("_T", result)


def compare(expected: dict[str, str], found: dict[str, str]) -> str:
    """Return ``yes``, or what differs."""
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    if not wrong:
        return "yes"
    kinds = {
        f"{expected[n].split()[0]} became {found[n].split()[0]}"
        for n in wrong
        if expected[n].split()[0] != found[n].split()[0]
    }
    cast = f" ({', '.join(sorted(kinds)).replace('torch.', '')})" if kinds else ""
    return f"no: {len(wrong):,} of {len(expected):,} tensors differ{cast}"


def largest(number: float) -> float:
    """Return the largest of all ranks' numbers; collective."""
    box = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=_own_group())
    return float(box)


def meet() -> None:
    """All ranks have come here; collective."""
    dist.barrier(_own_group())


def _own_group() -> dist.ProcessGroup:
    """Return a group for the benchmark alone.

    Peers that save in the background talk meanwhile on the default group: two threads on one would
    take each other's messages, and wait for ever.
    """
    world = dist.group.WORLD
    if world not in _own_groups:
        _own_groups.clear()
        _own_groups[world] = dist.new_group(backend="gloo")
    return _own_groups[world]


def first_line(error: Exception) -> str:
    """Return kind and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
