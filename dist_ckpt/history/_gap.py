"""What the loss file lacks of what had been logged when a generation was saved. Layer 4, pure.

A resume point notes how many losses count up to its step, and a digest of them: ``notes.history``,
``{"losses", "last_step", "digest"}``. A loss file that was cut, removed or edited since shows.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt.storage import digest_bytes

__all__ = ["LossGap", "find_gap", "mark_of_columns"]


@dataclass(frozen=True, slots=True)
class LossGap:
    """What isn't as it was logged.

    Attributes:
        step: Of the generation that knows.
        num_logged: Losses that counted up to it when it was saved.
        num_found: Those that count now.
        last_found: The last of those, None where there is none.
    """

    step: int
    num_logged: int
    num_found: int
    last_found: int | None

    @property
    def num_missing(self) -> int:
        """How many are missing at least; 0 where some were only changed."""
        return max(0, self.num_logged - self.num_found)

    def __str__(self) -> str:
        if not self.num_missing:
            return f"the losses up to step {self.step} aren't those that were logged"
        last = (
            "none is left" if self.last_found is None else f"the last is of step {self.last_found}"
        )
        return (
            f"{self.num_missing:,} of the {self.num_logged:,} losses up to step {self.step} are "
            f"missing from the loss file ({last})"
        )


def mark_of_columns(steps: array[int], losses: array[float]) -> dict[str, Any]:
    """Return what a resume point notes of the losses that count up to its step.

    Args:
        steps: Theirs, rising.
        losses: Beside them, null as NaN. Both are the caller's own: they may be changed.
    """
    if sys.byteorder == "big":
        steps.byteswap()
        losses.byteswap()
    last = steps[-1] if steps else None
    digest = digest_bytes(steps.tobytes() + losses.tobytes())
    return {"losses": len(steps), "last_step": last, "digest": digest}


def find_gap(step: int, mark: Any, found: Mapping[str, Any]) -> LossGap | None:
    """Return what is missing of ``mark``, None where nothing is or where it can't be told.

    More than were logged is a file that was put back after a generation was saved without it.

    Args:
        step: The generation's.
        mark: What it notes; None of a generation that notes nothing.
        found: `mark_of_columns` of the losses that count now up to ``step``.
    """
    if not isinstance(mark, Mapping) or type(mark.get("losses")) is not int:
        return None
    if mark["losses"] < found["losses"]:
        return None
    if mark["losses"] == found["losses"] and mark.get("digest") == found["digest"]:
        return None
    return LossGap(step, mark["losses"], found["losses"], found["last_step"])
