"""The place of a run that is made: checked, worked on beside it, taken at once. Layer 5, I/O."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.errors import (
    DistCkptError,
    NoUsableGenerationError,
    SettingError,
    StorageError,
    UsageError,
)
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.lifecycle._hold import LOCK_NAME
from dist_ckpt.resume_point import RESUME_POINT_NAME, UNFINISHED_NAME

__all__ = [
    "check_target",
    "refuse_half_a_copy",
    "require_room_for_names",
    "taken",
    "workshop",
]

#: What a run's name gets behind it at most, with room for large numbers.
_LONGEST_SUFFIX: Final = b".journal.jsonl.torn-1000000-1000000"
#: What may lie below a run directory: archive/LABEL/step_N/FILE or the like.
_LONGEST_BELOW: Final = 160
_PATH_MAX: Final = 4096


def check_target(source: Path | None, target: Path) -> None:
    """Return if ``target`` can be the directory of a run that is made from what lies elsewhere.

    Args:
        source: What is read, in which nothing may be made; None where a generation lies alone.
        target: Absolute; nothing is there.

    Raises:
        UsageError: It lies in the source, its name is a generation's or too long for a run's, or
            its parent isn't there.
    """
    if source is not None and Path(os.path.realpath(target)).is_relative_to(
        os.path.realpath(source)
    ):
        raise UsageError(
            f"{target} lies inside the run that is read, which isn't touched.",
            next_step="Give a directory beside it.",
            path=str(target),
        )
    why = None
    if not storage.is_dir(target.parent):
        why = f"{target.parent} isn't a directory"
    elif parse_step_name(target.name) is not None:
        why = "its name is a generation's"
    if why is not None:
        raise UsageError(
            f"{target} can't be a run directory: {why}.",
            next_step="Give another path; its last component is the new run's name.",
            path=str(target),
        )
    require_room_for_names(target)


def require_room_for_names(run_dir: Path, name: str | None = None) -> None:
    """Return if every file that this run will ever have can get its name; found out at once.

    Args:
        run_dir: Absolute; needn't exist.
        name: What its files begin with, where some are there; None: as the directory is called.

    Raises:
        SettingError: They can't.
    """
    longest = os.fsencode(name or run_dir.name) + _LONGEST_SUFFIX
    there = run_dir
    while not _is_there(there):
        there = there.parent
    most = storage.longest_name_bytes(there)
    over = max(len(longest) - most, len(os.fsencode(run_dir)) + _LONGEST_BELOW - _PATH_MAX)
    if over > 0:
        raise SettingError(
            f"{run_dir} is too long by {over} bytes: the run's own files begin with its name, of "
            f"which this file system takes {most - len(_LONGEST_SUFFIX)} bytes, and whole paths "
            f"end at {_PATH_MAX - 1}.",
            next_step="Give the run directory a shorter name. Files of a run that is there keep "
            "theirs: `dist-ckpt fork RUN NEW` makes a new one of it.",
            setting="run_dir",
            path=str(run_dir),
        )


def _is_there(path: Path) -> bool:
    try:
        return storage.exists(path)
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def taken(target: Path) -> UsageError:
    """Return the error of a place where something is; durably, be it what an earlier call made."""
    with contextlib.suppress(DistCkptError):
        storage.sync_dir(target.parent)
    return UsageError(
        f"{target} is there already; nothing is ever replaced.",
        next_step="Give another path for the new run.",
        path=str(target),
    )


def refuse_half_a_copy(store: StoredGenerations) -> None:
    """Return if the directory isn't one that ``ship`` has begun to fill; before it is changed.

    Training would begin anew in it, and what is missing couldn't be sent any more. Once the resume
    point is there, which is sent last, every byte that a resume needs is.
    """
    path = store.run_dir / UNFINISHED_NAME
    if not storage.exists(path):
        return
    if any(storage.exists(store.path(step) / RESUME_POINT_NAME) for step in store.steps()):
        return
    raise NoUsableGenerationError(
        f"{store.run_dir} is a copy that hasn't arrived: {UNFINISHED_NAME} is there, and no resume "
        "point.",
        next_step="Give the same `dist-ckpt ship` command again, which goes on with it. To begin "
        f"at step 0 in this directory on purpose, remove {UNFINISHED_NAME}.",
        path=str(store.run_dir),
        skipped={},
    )


@contextlib.contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """Give an empty directory beside ``target`` that no other call works in.

    What a call that was cut off left in it is removed; the lock tells such a one from one that
    works.
    """
    beside = target.with_name(f".tmp-fork-{target.name}")
    storage.make_dir(beside, exist_ok=True, follow=False)  # it is emptied below
    lock = storage.RunLock(beside / LOCK_NAME)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": "fork"}
    lock.acquire({**holder, "started": time.time()})
    try:
        if storage.exists(target):  # made by the call that held the lock until now
            raise taken(target)
        for name in storage.list_names(beside):
            if name != LOCK_NAME:
                storage.remove_tree(beside / name)
        try:
            yield beside
        except BaseException:
            with contextlib.suppress(DistCkptError):  # the first error is the one to tell
                storage.remove_tree(beside)
            raise
    finally:
        lock.release()
