"""The one place where the system's errors become ours. Layer 2.

Its only I/O is a look at the free space, after the system said that there is none.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_ckpt.errors import (
    DistCkptError,
    ForeignFileError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dist_ckpt.storage._types import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NEXT_STEPS = {
    errno.EACCES: "Check who owns the directory and its permissions.",
    errno.EPERM: "Check who owns the directory and its permissions.",
    errno.EROFS: "The file system is mounted read-only: choose another directory, or find out why.",
    errno.EEXIST: "Move away what lies there.",
    errno.ENOTEMPTY: "Move away what lies there.",
    errno.EIO: "The device reports errors: look at the kernel's log and check the disk.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or choose another file system.",
    errno.EMFILE: "Too many open files in this process: raise ulimit -n.",
    errno.ENOENT: "Check that the directory still exists.",
}


@contextmanager
def guard(
    operation: str, path: Path, *, need_bytes: int | None = None, creating: bool = False
) -> Iterator[None]:
    """Turn an ``OSError`` from inside into the named error that says what failed where.

    Args:
        operation: The verb for the message and the error's ``operation``.
        path: What was worked on.
        need_bytes: How much room the work needs, for ``NoSpaceError``.
        creating: A missing name is then a missing parent: ``StorageError`` and not
            ``NotFoundError``.
    """
    try:
        yield
    except DistCkptError:
        raise
    except OSError as error:
        raise named(error, operation, path, need_bytes=need_bytes, creating=creating) from error


def named(
    error: OSError,
    operation: str,
    path: Path,
    *,
    need_bytes: int | None = None,
    creating: bool = False,
) -> DistCkptError:
    """Return our error for what the system said about ``operation`` on ``path``."""
    path = os.fspath(path)
    code = error.errno or errno.EIO
    reason = f"{os.strerror(code)} [{errno.errorcode.get(code, code)}]"
    message = f"Could not {operation} {path}: {reason}."
    if code == errno.ENOENT and not creating:
        missing = NotFoundError(
            f"{path} does not exist ({operation}).", next_step="Check the path.", path=path
        )
        missing.errno = code
        return missing
    if code == errno.ELOOP:
        return ForeignFileError(
            f"{path} is a symbolic link, which dist_ckpt never writes nor follows ({operation}).",
            next_step="Move it away, or put there what it leads to: only the run directory itself "
            "may be a link.",
            path=path,
        )
    if code in _NO_ROOM:
        return no_space(
            message,
            path=path,
            code=code,
            operation=operation,
            need_bytes=need_bytes,
            free_bytes=_free_bytes_near(path),
        )
    failed = StorageError(
        message,
        next_step=_NEXT_STEPS.get(code, "Look at the file system and the kernel's log."),
        path=path,
        operation=operation,
        errno=code,
    )
    failed.errno = code
    return failed


def no_space(
    message: str,
    *,
    path: str,
    code: int,
    operation: str,
    need_bytes: int | None,
    free_bytes: int | None,
) -> NoSpaceError:
    """Return the error of a file system, or of a quota, without enough room."""
    full = NoSpaceError(
        message,
        next_step="Free some space, keep fewer generations, or choose another file system.",
        path=path,
        operation=operation,
        errno=code,
        need_bytes=need_bytes,
        free_bytes=free_bytes,
    )
    full.errno = code
    return full


def _free_bytes_near(path: str) -> int | None:
    try:
        status = get_ops().statvfs(os.path.dirname(path) or ".")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
