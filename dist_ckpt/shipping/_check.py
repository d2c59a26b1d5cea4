"""Whether something may be shipped to a place, before anything is changed there."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from dist_ckpt import storage
from dist_ckpt.canonical import step_name
from dist_ckpt.errors import ForeignFileError, UsageError
from dist_ckpt.history import history_path
from dist_ckpt.lifecycle import Origin
from dist_ckpt.resume_point import RESUME_POINT_NAME, ResumePoint
from dist_ckpt.shipping._contents import is_shipped_event
from dist_ckpt.shipping._folder import Folder
from dist_ckpt.shipping._place import Place
from dist_ckpt.shipping._texts import CONFIRMATION, MARKER

__all__ = ["check_folder", "check_place"]

_LIMIT_BYTES: Final = 1 << 26
_RUN_FILE: Final = "run.json"
_LOCK: Final = "run.lock"


def check_place(place: Place, origin: Origin) -> None:
    """Return if the place isn't inside of what is shipped.

    Raises:
        UsageError: It is.
    """
    if place.path is None:
        return
    real = Path(os.path.realpath(place.path))
    homes = [origin.store.path(origin.step), *([origin.run_dir] if origin.run_dir else [])]
    if any(real.is_relative_to(os.path.realpath(home)) for home in homes):
        raise UsageError(
            f"{place.label} lies inside the run that is shipped.",
            next_step="Give a directory elsewhere, on another disk at best.",
            path=place.label,
        )


def check_folder(folder: Folder, point: ResumePoint, run: str) -> bool:
    """Return whether the folder has files of this very shipment; False where it has none at all.

    Raises:
        UsageError: It holds another resume point, or has a life of its own by now.
        ForeignFileError: It holds something else.
    """
    names = folder.names()
    if not names:
        return False
    if (trace := _trace_of_life(folder, names, run)) is not None:
        raise UsageError(
            f"The run has gone on in {folder.label} ({trace}), so nothing in it is replaced.",
            next_step="Give another destination.",
            path=folder.label,
        )
    home = f"checkpoints/{step_name(point.step)}"
    for name in (CONFIRMATION, MARKER, f"{home}/{RESUME_POINT_NAME}"):
        found = _id_in(folder.read_small(name, _LIMIT_BYTES))
        if found is not None and found != point.id:
            raise UsageError(
                f"{folder.label} holds another resume point of step {point.step}: {found[:8]}, "
                f"not {point.id[:8]}.",
                next_step="Give another destination; nothing is replaced.",
                path=folder.label,
                expected=point.id,
                found=found,
            )
        if found is not None:
            return True
    raise ForeignFileError(
        f"{folder.label} holds files that no shipment left: {', '.join(sorted(names)[:3])}.",
        next_step="Give another destination; nothing is replaced.",
        path=folder.label,
    )


def _trace_of_life(folder: Folder, names: Collection[str], run: str) -> str | None:
    """Return what tells that the folder isn't only a copy any more; None where nothing does.

    The lock's file tells nothing: a fork of the copy, which changes nothing in it, leaves one too.
    """
    if _RUN_FILE in names:  # never shipped, and written by every training before anything else
        return f"{_RUN_FILE} is there"
    if folder.home is not None and storage.lock_holder(folder.home / _LOCK) is not None:
        return f"{_LOCK} is held"
    journal = folder.read_small(history_path("", run, "journal"), _LIMIT_BYTES) or b""
    for line in journal.splitlines():
        with suppress(ValueError, RecursionError):  # what can't be read is a damaged copy
            event = json.loads(line)
            if isinstance(event, dict) and not is_shipped_event(event):
                return f"its journal tells of `{event.get('event')}`"
    return None


def _id_in(data: bytes | None) -> str | None:
    if data is None:
        return None
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = json.loads(data)["id"]
        return found if isinstance(found, str) else None
    return None
