"""What a run does when the disk has no room for a save. Layer 6, training thread, collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._boundary import Wishes
from dist_ckpt.service._settings import Settings
from dist_ckpt.service._voice import Voice

__all__ = ["heed_low_disk"]

_POLL_SECS: Final = 1.0
#: Whoever hasn't made room within a day isn't coming.
_LIMIT_SECS: Final = 86_400.0


def heed_low_disk(
    agreed: Wishes,
    agree: Callable[[int, bool], Wishes],
    *,
    attempt: Attempt,
    settings: Settings,
    step: int,
    voice: Voice,
) -> Wishes:
    """Return what is wished for, once it was heeded that the last save found no room.

    With ``disk_low="stop"`` the run ends here, after one more try; with ``"wait"`` this returns
    when there is room, or a stop is asked for, and a save is due then; a day at most.

    Args:
        agreed: What all ranks wish for; ``low_bytes`` is what the save needs.
        agree: Agrees anew, given the bytes that this rank finds missing and whether it gives up.
        attempt: The run directory.
        settings: What the user set.
        step: Finished updates.
        voice: Says it.
    """
    need = agreed.low_bytes
    if not need or settings.disk_low is None:
        return agreed
    store = attempt.store
    free = _free_bytes(store.run_dir)
    attempt.journal(
        "disk_low", step=step, action=settings.disk_low, need_bytes=need, free_bytes=free
    )
    word = "stops" if settings.disk_low == "stop" else "waits for room"
    left = "can't be looked at" if free is None else f"has {free:,} bytes left"
    voice.warn(f"the disk {left}, a save needs {need:,}: the run {word}")
    if settings.disk_low == "stop" or agreed.stop_signal or agreed.stop:
        return replace(agreed, stop=1)
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        # Rank 0 alone looks, since its disk is where the others write, too.
        missing = 0
        if attempt.lock is not None and not _has_room(store.run_dir, need, settings):
            missing = need
        now = agree(missing, attempt.lock is not None and waited > _LIMIT_SECS)
        if not now.low_bytes or now.stop_signal or now.stop:
            break
        time.sleep(_POLL_SECS)
    attempt.journal("disk_low_over", step=step, waited_secs=round(waited, 3))
    return replace(now, save=1, redo=agreed.redo, rescue=agreed.rescue)


def _free_bytes(run_dir: Path) -> int | None:
    try:
        return storage.free_bytes(run_dir)
    except DistCkptError:
        return None


def _has_room(run_dir: Path, need: int, settings: Settings) -> bool:
    try:
        storage.check_space(run_dir, need, settings.reserve_bytes)
    except DistCkptError:  # a disk that was unmounted meanwhile has no room either, and may return
        return False
    return True
