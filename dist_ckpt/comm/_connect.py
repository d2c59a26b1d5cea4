"""Choosing between one rank and many. Layer 2; imports torch only where ranks exist."""

from __future__ import annotations

import math
import os
import sys

from dist_ckpt.comm._base import Comm
from dist_ckpt.comm._solo import SoloComm
from dist_ckpt.errors import SettingError, UsageError

__all__ = ["connect"]


def connect(timeout_secs: float) -> Comm:
    """Return the `Comm` of this job; from then on its ranks can agree.

    A `SoloComm`, without any call to torch.distributed's groups, when the job has one rank.
    Otherwise collective: every rank comes here within ``timeout_secs``, on its main thread, and a
    gloo group of our own is made, whatever the backend of the default group.

    Args:
        timeout_secs: The limit of every wait between ranks, in seconds.

    Raises:
        UsageError: ``WORLD_SIZE`` is above one and ``init_process_group`` wasn't called.
        SettingError: The limit isn't a positive, finite number.
        RankTimeoutError: Some ranks didn't come.
    """
    if not (math.isfinite(timeout_secs) and timeout_secs > 0):
        raise SettingError(
            f"timeout_secs must be a positive number of seconds, not {timeout_secs!r}.",
            next_step="Leave it out for 600 seconds.",
            found=timeout_secs,
        )
    place = place_in_job()
    if place is not None:
        if place[1] == 1:
            return SoloComm()
        from dist_ckpt.comm._ranks import connect_ranks  # noqa: PLC0415 - costs seconds of import

        return connect_ranks(float(timeout_secs))
    _check_alone()
    return SoloComm()


def place_in_job() -> tuple[int, int] | None:
    """Return this process's rank and the world size; None where there is no process group.

    Not collective.
    """
    # A program that never imported it can't have initialised it: nothing to import, nothing to ask.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _check_alone() -> None:
    """Refuse a rank of several that has no group: alone, each would write over the others."""
    text = os.environ.get("WORLD_SIZE", "1").strip() or "1"
    if not text.isdecimal() or int(text) > 1:
        raise UsageError(
            f"WORLD_SIZE is {text}, but torch.distributed isn't initialised.",
            next_step="Call torch.distributed.init_process_group before building the Checkpointer, "
            "or unset WORLD_SIZE for a job of one process.",
            expected="an initialised process group",
            found=text,
        )
