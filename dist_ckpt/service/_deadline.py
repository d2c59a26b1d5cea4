"""When a stop has to be over, and whether saves fit into that. Layer 6."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from dist_ckpt.errors import DistCkptError
from dist_ckpt.service._attempt import Attempt

__all__ = ["END_VARIABLES", "measured_save_secs", "stop_deadline", "warn_of_tight_deadline"]

#: When everything will be killed, in seconds since the epoch; the first that is set counts.
END_VARIABLES = ("DIST_CKPT_END_TIME", "SLURM_JOB_END_TIME")

#: So many of the last saves tell what one takes.
_NUM_SAVES = 5
#: A stop may find a save under way, which has to come to its commit first.
_SAVES_IN_A_STOP = 2


def stop_deadline(secs: float, age_secs: float) -> float:
    """Return the time.monotonic() by which a stop must be over.

    Args:
        secs: What a stop may take.
        age_secs: How long ago it was asked for.
    """
    left = secs - age_secs
    for name in END_VARIABLES:
        with contextlib.suppress(ValueError):
            end = float(os.environ.get(name, ""))
            if math.isfinite(end) and end > 0:
                left = min(left, end - time.time())
                break
    return time.monotonic() + left


def measured_save_secs(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return what a save of this run takes, from boundary to commit; None before the first. Pure.

    The median of the last saves, since one slow one says little.
    """
    saves = [event for event in events if event.get("event") == "saved"][-_NUM_SAVES:]
    secs = [event.get("durable_secs", 0.0) + event.get("blocked_secs", 0.0) for event in saves]
    return median(secs) if secs else None


def warn_of_tight_deadline(attempt: Attempt, secs: float, warn: Callable[[str], None]) -> None:
    """Rank 0, at a start: it is said and journalled where a stop couldn't save in time."""
    try:
        measured = measured_save_secs(attempt.events("saved"))
    except (DistCkptError, TypeError):
        return  # a journal that can't be read is told of elsewhere
    if measured is None or _SAVES_IN_A_STOP * measured <= secs:
        return
    need = _SAVES_IN_A_STOP * measured
    attempt.journal("tight_deadline", save_secs=round(measured, 3), deadline_secs=secs)
    warn(
        f"a save takes {measured:.1f} s here, so a stop, which may find one under way, needs "
        f"{need:.0f} s, but has {secs:g} s: raise deadline_secs (or DIST_CKPT_DEADLINE_SECS) and "
        "the grace of whatever stops the job"
    )
