"""At which steps the proof cuts, from what the continuous run showed. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from dist_ckpt.errors import UsageError
from dist_ckpt.proof._tracks import Track

__all__ = ["check_cuts", "choose_cuts", "kinds_of"]

_NUM_CUTS = 3

MID_EPOCH = "mid-epoch"
END_OF_EPOCH = "end of an epoch"
AFTER_SCHEDULER = "right after the learning rate changed"
OFF_PERIOD = "between two changes of the learning rate"


def choose_cuts(track: Track, until: int) -> list[int]:
    """Return up to three cuts, rising, that show as many kinds of place as there are.

    The first chosen is the step next to the middle; then what shows a kind not shown yet; what is
    left to choose makes the cuts lie apart.

    Args:
        track: Rank 0 of the continuous run.
        until: Its last step, 2 at least.
    """
    steps = sorted(range(1, until), key=lambda step: (abs(2 * step - until), step))
    chosen = [steps[0]]
    shown = set(kinds_of(track, steps[0]))
    while len(chosen) < _NUM_CUTS:
        new = {step: len(set(kinds_of(track, step)) - shown) for step in steps}
        best = max(steps, key=lambda step: new[step])
        if new[best] == 0:
            break
        chosen.append(best)
        shown |= set(kinds_of(track, best))
    while len(chosen) < min(_NUM_CUTS, len(steps)):
        rest = [step for step in steps if step not in chosen]
        chosen.append(max(rest, key=lambda step: _distance(step, [0, until, *chosen])))
    return sorted(chosen)


def _distance(step: int, others: Collection[int]) -> int:
    return min(abs(step - other) for other in others)


def kinds_of(track: Track, step: int) -> list[str]:
    """Return what sort of place the boundary of ``step`` is, as far as that is known."""
    kinds = []
    here, before = track.at(step), track.at(step - 1)
    data = None if here is None else here["data"]
    if isinstance(data, dict) and isinstance(data.get("cursor"), int):
        is_end = data["cursor"] in {0, data.get("num_samples")}
        kinds.append(END_OF_EPOCH if is_end else MID_EPOCH)
    if here is not None and before is not None and _changes(track):
        kinds.append(AFTER_SCHEDULER if here["lr"] != before["lr"] else OFF_PERIOD)
    return kinds


def _changes(track: Track) -> bool:
    return len({json.dumps(line["lr"]) for line in track.steps.values()}) > 1


def check_cuts(cuts: Sequence[int], until: int) -> list[int]:
    """Return the user's cuts, each once and rising.

    Raises:
        UsageError: One isn't between the first step and the last.
    """
    for cut in cuts:
        if not 1 <= cut < until:
            raise UsageError(
                f"--cut {cut} doesn't lie between steps 1 and {until - 1}.",
                next_step=f"The scenarios end at step {until}; --until gives another end.",
                found=cut,
            )
    return sorted(set(cuts))
