"""Loss curves that share a beginning, compared from where they part. Pure: layer 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_ckpt.history._loss_format import LossEntry

__all__ = ["Branches", "Window", "compare_branches"]

_NUM_WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Window:
    """A range of steps and each branch's mean loss in it.

    Attributes:
        first_step: Of the range.
        last_step: Of the range, which contains it.
        num_steps: Steps that every branch has a finite loss of; only these count.
        means: Of the branches in their order; None where no step counts.
        lowest: Which branch has the lowest mean; None where several have.
    """

    first_step: int
    last_step: int
    num_steps: int
    means: tuple[float | None, ...]
    lowest: int | None


@dataclass(frozen=True, slots=True)
class Branches:
    """How loss curves go on from where they part.

    Attributes:
        fork_step: The last step up to which all curves are the same; None where they share none.
        windows: From there on to where the shortest ends, in equal ranges of steps.
        whole: The same, in one window; None where a curve has nothing behind the fork.
    """

    fork_step: int | None
    windows: tuple[Window, ...]
    whole: Window | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def compare_branches(curves: Sequence[Sequence[LossEntry]]) -> Branches:
    """Return where curves part and their means from there on, over the steps that all have.

    Args:
        curves: Canonical histories, two at least, each rising in step.
    """
    fork = _fork_step(curves)
    start = 0 if fork is None else fork + 1
    # A curve that has nothing behind the fork has nothing to compare.
    ends = [curve[-1][0] for curve in curves if curve and curve[-1][0] >= start]
    if len(ends) < len(curves):
        return Branches(fork, (), None)
    stop = min(ends) + 1
    first = min(max(_first_step(curve, start) for curve in curves), stop - 1)
    count = min(_NUM_WINDOWS, stop - first)
    edges = [first + number * (stop - first) // count for number in range(count + 1)]
    later = [{step: loss for step, loss in curve if step >= first} for curve in curves]
    windows = tuple(_window(later, edges[number], edges[number + 1]) for number in range(count))
    return Branches(fork, windows, _window(later, first, stop))


def _first_step(curve: Sequence[LossEntry], start: int) -> int:
    """Return the first step of a curve that isn't below ``start``."""
    return next((step for step, _ in curve if step >= start), start)


def _fork_step(curves: Sequence[Sequence[LossEntry]]) -> int | None:
    fork = None
    for entries in zip(*curves, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        fork = entries[0][0]
    return fork


def _window(later: Sequence[dict[int, float | None]], first: int, stop: int) -> Window:
    finite = [
        values
        for step in range(first, stop)
        if None not in (values := [curve.get(step) for curve in later])
    ]
    columns = list(zip(*finite, strict=True))
    means: tuple[float | None, ...] = tuple(
        math.fsum(value for value in column if value is not None) / len(finite)
        for column in columns
    ) or (None,) * len(later)
    known = [mean for mean in means if mean is not None]
    best = [number for number, mean in enumerate(means) if known and mean == min(known)]
    return Window(first, stop - 1, len(finite), means, best[0] if len(best) == 1 else None)
