"""How much room a file system has left for this user. Layer 2, I/O."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from dist_ckpt.storage._guard import guard, no_space
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Path


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of ``path``.

    What is kept back for root doesn't count. Quotas, and space that others take in the meantime,
    aren't seen.

    Raises:
        NotFoundError: No such path.
        StorageError: The file system refused to tell.
    """
    with guard("look up free space of", path):
        status = get_ops().statvfs(path)
    return status.f_bavail * status.f_frsize


def check_space(path: Path, need_bytes: int, reserve_bytes: int = 0) -> None:
    """Return when ``need_bytes`` fit and ``reserve_bytes`` stay free after them.

    Some network file systems don't tell their size at all; there nothing is refused beforehand.

    Raises:
        NoSpaceError: They don't fit; ``need_bytes``, ``reserve_bytes`` and ``free_bytes`` say by
            how much.
        NotFoundError: No such path.
    """
    with guard("look up free space of", path):
        status = get_ops().statvfs(path)
    if status.f_blocks == 0:
        return
    free = status.f_bavail * status.f_frsize
    if need_bytes + reserve_bytes <= free:
        return
    reserve = f" and {reserve_bytes:,} bytes are to stay free" if reserve_bytes else ""
    error = no_space(
        f"{os.fspath(path)} has {free:,} bytes left, {need_bytes:,} are needed{reserve}.",
        path=os.fspath(path),
        code=errno.ENOSPC,
        operation="write to",
        need_bytes=need_bytes,
        free_bytes=free,
    )
    error.values["reserve_bytes"] = reserve_bytes
    raise error
