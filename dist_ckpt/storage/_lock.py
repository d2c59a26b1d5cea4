"""The run lock: one trainer in a run directory, named to whoever comes second. Layer 2, I/O."""

from __future__ import annotations

import fcntl
import json
import os
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from dist_ckpt.errors import (
    DistCkptError,
    LockedError,
    NoSpaceError,
    NotFoundError,
    UsageError,
)
from dist_ckpt.storage._files import open_regular, write_all
from dist_ckpt.storage._guard import guard, named
from dist_ckpt.storage._ops import get_ops
from dist_ckpt.storage._small import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from filelock import FileLock

    from dist_ckpt.storage._types import Path

_HOLDER_LIMIT_BYTES: Final = 64 * 2**10
#: What stands in the holder's text for programs alone.
_FOR_PROGRAMS: Final = frozenset({"start_time", "launch_id"})
_POLL_SECS: Final = 0.02
# `lock_holder` of another process takes a shared lock for an instant. A trainer that starts just
# then must not be turned away by it.
_LEAST_WAIT_SECS: Final = 0.2


class RunLock:
    """An exclusive lock on a file, with who holds it written in the file.

    The kernel frees it when its holder dies, however that happens. It is not inherited by forked
    children. The file stays; its text counts only while the lock is held.

    Args:
        path: The lock file; its parent exists.
    """

    def __init__(self, path: Path) -> None:
        self.path: str = os.fspath(path)
        self._holder = b""
        self._inode: tuple[int, int] | None = None
        self._lock = self._new()

    def _new(self) -> FileLock:
        from filelock import FileLock  # noqa: PLC0415 - only who takes a lock needs it

        return FileLock(
            self.path,
            timeout=0,
            mode=0o600,
            thread_local=False,
            fallback_to_soft=False,
            poll_interval=_POLL_SECS,
            on_acquired=self._write_holder,
        )

    def acquire(self, holder: Mapping[str, Any], *, wait_secs: float = 0.0) -> None:
        """Return when this object holds the lock and ``holder`` stands in the file.

        On a full disk it may hold the lock without the text: `lock_holder` then says ``{}``.

        Args:
            holder: Plain JSON values that tell a person who this is.
            wait_secs: How long to wait for another holder to leave.

        Raises:
            LockedError: Somebody else holds it; ``holder`` is what they wrote (None where it can't
                be read).
            UsageError: This object holds it already.
            StorageError: The system refused, or the file system has no locks.
        """
        from filelock import Timeout  # noqa: PLC0415 - as above

        if self._inode is not None:
            msg = f"{self.path} is already held by this object."
            raise UsageError(msg, next_step="Release it first.", path=self.path)
        self._holder = json.dumps(holder, allow_nan=False).encode()
        wait_secs = max(wait_secs, _LEAST_WAIT_SECS)
        with guard("lock", self.path, creating=True):
            get_ops().stat(os.path.dirname(self.path) or ".")  # filelock would make it
            try:
                self._lock.acquire(timeout=wait_secs)
            except Timeout:
                # Only now does the text count: it outlives the lock.
                raise _locked(self.path, _read_holder(self.path)) from None
            except BaseException:
                self._inode = None
                raise

    def retake(self) -> None:
        """Return when this object holds the file that ``path`` names now, as it held the old one.

        For a lock file that was removed or replaced while it was held. That the directory is still
        the holder's own is for the caller to know: another one may have come and gone meanwhile.

        Raises:
            LockedError: Somebody else holds it; this object holds what it held.
            StorageError: The system refused; likewise.
        """
        before, inode = self._lock, self._inode
        self._lock, self._inode = self._new(), None
        try:
            self.acquire(json.loads(self._holder))
        except BaseException:
            self._lock, self._inode = before, inode
            raise
        with guard("unlock", self.path):
            before.release()

    def release(self) -> None:
        """Return when the lock is free. Does nothing where it isn't held."""
        if self._inode is None:
            return
        self._inode = None
        with guard("unlock", self.path):
            self._lock.release()

    def check(self) -> None:
        """Return when this object still holds the lock of the file that ``path`` names.

        To be asked before each commit.

        Raises:
            LockedError: It doesn't: the file was removed or replaced, so that another job may hold
                the new one.
        """
        if self._inode is None:
            raise _lost(self.path, "is not held")
        try:
            status = get_ops().lstat(self.path)
        except FileNotFoundError:
            raise _lost(self.path, "was removed") from None
        except OSError as error:
            raise named(error, "look at", self.path) from error
        if (status.st_dev, status.st_ino) != self._inode:
            raise _lost(self.path, "was replaced by another file", _read_holder(self.path))

    def _write_holder(self, fd: int) -> None:
        ops = get_ops()
        ops.ftruncate(fd, 0)
        try:
            write_all(fd, self._holder, 0, self.path)
        except NoSpaceError:
            # The lock is what counts, and who frees a full disk needs it: it names nobody then.
            ops.ftruncate(fd, 0)
        status = ops.fstat(fd)
        self._inode = (status.st_dev, status.st_ino)


def lock_holder(path: Path) -> dict[str, Any] | None:
    """Return what the holder of a lock wrote, None where nobody holds it.

    ``{}`` where somebody does and the text can't be read. Takes a shared lock for an instant;
    ``RunLock.acquire`` waits long enough not to be turned away by that.

    Raises:
        ForeignFileError: Not a regular file.
        StorageError: The system refused.
    """
    try:
        with open_regular(path) as (fd, _):
            try:
                get_ops().flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(path) or {}
            except OSError as error:
                raise named(error, "lock", path) from error
            return None  # closing the descriptor frees the lock
    except NotFoundError:
        return None


def _read_holder(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    try:
        holder = json.loads(read_file(path, limit_bytes=_HOLDER_LIMIT_BYTES))
    except (DistCkptError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def _locked(path: str, holder: dict[str, Any] | None) -> LockedError:
    return LockedError(
        f"{os.path.dirname(path) or '.'} is in use by another process "
        f"({_who(holder or {}) or 'unnamed'}).",
        next_step="Stop that one, or wait for its end; another training needs another directory.",
        path=path,
        holder=holder,
    )


def _who(holder: Mapping[str, Any]) -> str:
    """Return the holder in words; what tells a person nothing is left to the error's ``holder``."""
    told = {key: value for key, value in holder.items() if key not in _FOR_PROGRAMS}
    started = told.get("started")
    if isinstance(started, int | float):
        told["started"] = _when(float(started))
    return ", ".join(f"{key} {value}" for key, value in told.items() if value is not None)


def _when(moment: float) -> str:
    """Return a time with its zone, and how long ago that is."""
    try:
        text = datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (OverflowError, OSError, ValueError):
        return str(moment)
    minutes, secs = divmod(max(0, int(time.time() - moment)), 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (secs, "s")]
    first = next((number for number, (count, _) in enumerate(parts) if count), len(parts) - 1)
    age = " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)
    return f"{text} ({age or '0 s'} ago)"


def _lost(path: str, what: str, holder: dict[str, Any] | None = None) -> LockedError:
    return LockedError(
        f"The lock {path} {what} while this process trains: another one may have started.",
        next_step="Where nobody else has it, this process takes it again.",
        path=path,
        holder=holder,
    )
