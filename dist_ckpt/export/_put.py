"""A file made under a name of its own, then put in its place. Layer 5, not collective."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from dist_ckpt import announce, storage
from dist_ckpt.errors import StorageError

__all__ = ["put_whole"]

#: A file system takes 255 bytes, some fewer.
_LONGEST_BYTES = 190

_Answer = TypeVar("_Answer")


def put_whole(target: Path, make: Callable[[Path], _Answer]) -> _Answer:
    """Have what ``make`` makes beside ``target`` under that name, durable; return its answer.

    What is at ``target`` is replaced at once, and by something whole only. Of several calls at a
    time each makes a file of its own, and the last one's stays. What calls left whose process was
    killed is removed.
    """
    _clean(target)
    pid = os.getpid()
    owner = f"{pid}-{announce.process_start_time(pid) or 0}"
    beside = target.with_name(f".tmp-{_label(target)}-{owner}-{secrets.token_hex(4)}")
    try:
        answer = make(beside)
        storage.rename(beside, target)
        # Two links of one file: the rename did nothing, and left both.
        storage.unlink(beside, missing_ok=True)
    except BaseException:
        with suppress(StorageError):  # the first error is the one to tell
            storage.unlink(beside, missing_ok=True)
        raise
    storage.sync_dir(target.parent)
    return answer


def _label(target: Path) -> str:
    """Return the name, or of one that leaves no room for an owner something that stands for it."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST_BYTES else hashlib.sha256(name).hexdigest()


def _clean(target: Path) -> None:
    """Remove what killed calls for the same name left.

    A process of another machine isn't seen here and counts as killed: its call then fails, since
    there is nothing to give the name to.
    """
    # Without an owner: of versions that knew none.
    pattern = re.compile(rf"\.tmp-{re.escape(_label(target))}(?:-(\d+)-(\d+)-[0-9a-f]{{8}})?")
    for name in storage.list_names(target.parent):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if match[1] is None or not announce.process_alive(int(match[1]), int(match[2])):
            with suppress(StorageError):  # another user's, say: it's in nobody's way
                storage.unlink(target.parent / name, missing_ok=True)
