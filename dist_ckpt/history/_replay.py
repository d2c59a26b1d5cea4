"""The comparison of replayed losses with those logged before the crash. Pure: layer 4.

When a run resumes, the steps between the resume point and the crash are computed again
(decision 12): their losses are compared bit by bit with those in the loss file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dist_ckpt.history._loss_format import LossEntry, loss_kind
from dist_ckpt.history._marks import HISTORY_CUT

__all__ = [
    "REPLAYED",
    "ReplayResult",
    "ReplayWindow",
    "replay_summary",
    "replays_until",
    "spell_loss",
]

REPLAYED: Final = "replayed"
#: What an attempt begins with; each tells up to where it replays.
_BEGINNINGS = ("resumed", "fresh_start", "imported")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the replay of one attempt showed.

    Attributes:
        attempt: Which attempt replayed.
        resumed_step: Step of the resume point; 0 where the run began anew.
        agreed: Losses that came out bit-equal, before the first that differed.
        num_logged: Losses that were logged after the resume point (the journal's ``of``).
        first_difference: Step of the first loss that came out otherwise, or that hadn't been
            logged; None where all that were computed again agreed.
        first_step: First logged step of the window. Its loss needs nothing but a forward pass of
            what was restored, so ``first_difference == first_step`` says the state is another.
        complete: Whether the window was gone through, or ended by a difference; False where the
            attempt ended inside it.
        comparable: Whether bit-equality could be asked for (same world size, devices, versions,
            configuration).
        likely_cause: What explains the difference without a fault of the resume; None where nothing
            is known that would.
    """

    attempt: int | None
    resumed_step: int
    agreed: int
    num_logged: int
    first_difference: int | None
    first_step: int | None
    complete: bool
    comparable: bool
    likely_cause: str | None = None

    @property
    def all_agreed(self) -> bool:
        """Whether every loss of the window was computed again and came out the same."""
        return self.first_difference is None and self.agreed == self.num_logged

    def to_event(self) -> dict[str, Any]:
        """Return the fields of the journal's event."""
        return {
            "resumed_step": self.resumed_step,
            "agreed": self.agreed,
            "of": self.num_logged,
            "first_difference": self.first_difference,
            "first_step": self.first_step,
            "complete": self.complete,
            "comparable": self.comparable,
            "likely_cause": self.likely_cause,
        }


class ReplayWindow:
    """The losses logged after the resume point, to be met again in the order of steps.

    Args:
        entries: The canonical entries after the resume point, one at least.
        kinds: What the null ones were, as far as the journal knows.
    """

    def __init__(self, entries: Iterable[LossEntry], kinds: Mapping[int, str]) -> None:
        self._losses = dict(entries)
        self._kinds = kinds
        self.num_logged = len(self._losses)
        self.first_step = min(self._losses)
        self.last_step = max(self._losses)
        self.agreed = 0
        self.first_difference: int | None = None

    @property
    def differs_later(self) -> bool:
        """Whether a loss differs though the first, which needs a forward pass only, agreed."""
        return self.first_difference is not None and self.first_difference != self.first_step

    @property
    def is_hole(self) -> bool:
        """Whether what differs is that no loss is there: none was logged, or it was damaged."""
        return self.first_difference is not None and self.first_difference not in self._losses

    def agrees(self, step: int, loss: float) -> bool:
        """Return whether ``step`` came out bit for bit as logged, and count it.

        Call it for rising steps up to ``last_step``, until one differs.
        """
        if step in self._losses and self._same(step, loss):
            self.agreed += 1
            return True
        self.first_difference = step
        return False

    def lacks_kind(self, step: int) -> bool:
        """Return whether the logged loss isn't finite and nothing tells what it was."""
        return step not in self._kinds and self._losses.get(step, 0.0) is None

    def spelled(self, step: int) -> float | str | None:
        """Return the logged loss for the journal; None where none was logged."""
        loss = self._losses.get(step)
        if loss is None and step in self._losses:
            return self._kinds.get(step, "not finite")
        return loss

    def _same(self, step: int, loss: float) -> bool:
        logged, kind = self._losses[step], loss_kind(loss)
        if logged is None:
            # The kind is known from the journal only, whose last lines a crash may have taken.
            return kind is not None and self._kinds.get(step, kind) == kind
        return struct.pack("<d", loss) == struct.pack("<d", logged)


def spell_loss(loss: float) -> float | str:
    """Return a loss for the journal: itself, or ``"nan"``, ``"inf"``, ``"-inf"``."""
    return loss_kind(loss) or loss


def replay_summary(journal: Iterable[Mapping[str, Any]]) -> list[ReplayResult]:
    """Return the result of each replay that the journal tells of, in its order.

    An attempt that was killed inside its window has none: the next attempt replays again.
    """
    return [
        ReplayResult(
            attempt=event.get("attempt"),
            resumed_step=event.get("resumed_step", 0),
            agreed=event.get("agreed", 0),
            num_logged=event.get("of", 0),
            first_difference=event.get("first_difference"),
            first_step=event.get("first_step"),
            complete=event.get("complete", True),
            comparable=event.get("comparable", True),
            likely_cause=event.get("likely_cause"),
        )
        for event in journal
        if event.get("event") == REPLAYED
    ]


def replays_until(journal: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the last lost step that the newest attempt computes again; None: it has none left."""
    for event in reversed(journal):
        if event.get("event") in (REPLAYED, HISTORY_CUT):
            return None
        if event.get("event") in _BEGINNINGS:
            until = event.get("replays_until")
            return until if type(until) is int else None
    return None
