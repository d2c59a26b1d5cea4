"""What all ranks agree on at a boundary: one vector of numbers, the largest of each wins. Pure.

Every rank decides by itself from the agreed vector, so all decide the same; rank 0's wishes (a
request from outside) travel in the same vector.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, fields
from operator import attrgetter

__all__ = ["PIVOT", "Decision", "Wishes", "decide"]

PIVOT = "pivot"
"""Reason of the checkpoint that a pivot waits for, and what then stopped the run."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one rank, or after agreement any rank, asks for.

    Attributes:
        stop_signal: Number of the signal that asks to stop, 0 for none.
        stop_age_ms: How long ago it came, so that the deadline counts from its arrival on any rank.
        usr1: SIGUSR1 came since the last checkpoint that answered one.
        save: ``Checkpointer.save()`` was called.
        stop: ``Checkpointer.stop()`` was called.
        redo: The last save's copy was dropped and has to be made again.
        rescue: The newest generation is gone from the disk.
        taken: Another job has the run directory.
        pivot: A request for a pivot came; it waits for the cadence.
        low_bytes: What the last save needed and the disk didn't have; 0: it had.
        orphaned: The stop came because launcher or agent of that rank has died: the other ranks are
            to go on without it.
    """

    stop_signal: int = 0
    stop_age_ms: int = 0
    usr1: int = 0
    save: int = 0
    stop: int = 0
    redo: int = 0
    rescue: int = 0
    taken: int = 0
    pivot: int = 0
    low_bytes: int = 0
    orphaned: int = 0

    def encode(self) -> list[int]:
        """Return the numbers in a fixed order."""
        return list(_NUMBERS(self))

    @classmethod
    def decode(cls, numbers: list[int]) -> Wishes:
        """Return what :meth:`encode` was given."""
        return cls(*numbers)

    @property
    def any(self) -> bool:
        """Anything is asked for."""
        return any((self.stop_signal, self.usr1, self.save, self.stop))


#: `dataclasses.astuple` copies what it finds, deeply: that would be half of a step without a save.
_NUMBERS = attrgetter(*(field.name for field in fields(Wishes)))


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens at this boundary.

    Attributes:
        reasons: Why a checkpoint is taken; none is taken where this is empty.
        stops: The run ends after it.
        answers_usr1: The checkpoint answers the signals that came so far.
        pivots: It stops for a pivot, if for nothing else.
    """

    reasons: tuple[str, ...]
    stops: bool
    answers_usr1: bool
    pivots: bool = False


def decide(
    agreed: Wishes,
    *,
    step: int,
    every: int,
    is_last: bool,
    usr1_waits: bool,
    is_start: bool = False,
) -> Decision:
    """Return what happens at the boundary of ``step``.

    Args:
        agreed: The wishes of all ranks.
        step: Finished updates.
        every: The cadence.
        is_last: ``until`` is reached.
        usr1_waits: SIGUSR1 is answered at the next multiple of ``every`` only.
        is_start: Before the first body, where the cadence doesn't count.
    """
    on_cadence = step % every == 0
    pivots = bool(agreed.pivot) and on_cadence and step > 0
    answers = bool(agreed.usr1) and (on_cadence or not usr1_waits)
    reasons: list[str] = []
    if on_cadence and not is_start:
        reasons.append("cadence")
    if answers or pivots:
        reasons.append("SIGUSR1")  # a pivot is asked for by one, too
    if pivots:
        reasons.append(PIVOT)
    if agreed.save:
        reasons.append("save")
    if agreed.stop_signal:
        reasons.append(signal.Signals(agreed.stop_signal).name)
    if agreed.stop:
        reasons.append("stop")
    if agreed.redo:
        reasons.append("redo")
    if agreed.rescue:
        reasons.append("rescue")
    if is_last:
        reasons.append("last")
    stops = is_last or pivots or bool(agreed.stop_signal or agreed.stop)
    return Decision(tuple(reasons), stops, answers or (stops and bool(agreed.usr1)), pivots)
