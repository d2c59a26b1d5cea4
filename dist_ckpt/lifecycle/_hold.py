"""A run held by a command rather than by training: its lock, its history. Layer 5, I/O."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dist_ckpt import announce, storage
from dist_ckpt.canonical import step_name
from dist_ckpt.errors import (
    DistCkptError,
    ForeignFileError,
    LockedError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.generations import GenerationStore, SingleGeneration, StoredGenerations
from dist_ckpt.history import History, history_path, read_journal, run_name
from dist_ckpt.lifecycle._rewind import finish_rewind, is_rewinding
from dist_ckpt.lifecycle._settle import settle

__all__ = [
    "LOCK_NAME",
    "end_rewind",
    "hold_open",
    "hold_or_watch",
    "hold_run",
    "last_attempt",
    "open_history",
]

LOCK_NAME: Final = "run.lock"
_RUN_FILE: Final = "run.json"
#: What a system says where one may look and not write.
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_RUN_FILE_LIMIT_BYTES: Final = 1 << 20


@contextlib.contextmanager
def hold_run(run_dir: Path, command: str) -> Iterator[None]:
    """Hold the run's lock: nobody trains in it, and no other command moves anything.

    What a process left pending that was killed is durable then: what is found counts.

    Args:
        run_dir: The run directory.
        command: What holds it, for whoever comes meanwhile.

    Raises:
        ForeignFileError: Nothing there tells that it is a run's directory, or its ``checkpoints``
            is a symbolic link; nothing is left in it.
        LockedError: A job trains in it, or another command is at it; the error names it.
    """
    _require_run(run_dir)
    pid = os.getpid()
    lock = storage.RunLock(run_dir / LOCK_NAME)
    lock.acquire(
        {
            "pid": pid,
            "start_time": announce.process_start_time(pid),
            "host": socket.gethostname(),
            "command": command,
            "started": time.time(),
        }
    )
    try:
        settle(run_dir)
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def hold_or_watch(run_dir: Path, command: str) -> Iterator[Callable[[], None] | None]:
    """Hold a run that is only read; give None then. One that can't be written is watched instead.

    Without a lock nobody is kept out: what is given then is to be called at the end, and what was
    read counts only if it returns.

    Raises:
        LockedError: A job trains in it, or another command is at it; or one came meanwhile.
        StorageError: It can neither be held nor read; or a rewind of it was cut off.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(hold_run(run_dir, command))
        except StorageError as error:
            if error.errno not in _READ_ONLY:
                raise
            yield _watch(run_dir, error)
            return
        end_rewind(run_dir)
        yield None


def _watch(run_dir: Path, refused: StorageError) -> Callable[[], None]:
    """Return what finds out whether anybody came since; nobody is there now."""
    if is_rewinding(run_dir):
        raise StorageError(
            f"A rewind of {run_dir} was cut off, and can't be ended where nothing can be written: "
            f"{refused.message}",
            next_step="End it where the run can be written: run `dist-ckpt rewind` again.",
            **refused.values,
        ) from refused

    def require_nobody() -> None:
        holder = storage.lock_holder(run_dir / LOCK_NAME)
        if holder is not None:
            raise LockedError(
                f"{run_dir} is in use ({holder.get('command') or 'a job trains in it'}).",
                next_step="Wait for its end; nothing was made.",
                path=str(run_dir),
                holder=holder,
            )

    require_nobody()
    before = _standing(run_dir)

    def require_same() -> None:
        require_nobody()
        if _standing(run_dir) != before:
            raise LockedError(
                f"Somebody has worked in {run_dir} while it was read.",
                next_step="Try again; nothing was made.",
                path=str(run_dir),
                holder=None,
            )

    return require_same


def _standing(run_dir: Path) -> tuple[int | None, int]:
    """Return what no attempt and no command leaves as it is: attempt, and length of the journal."""
    try:
        length = storage.file_size(Path(history_path(run_dir, run_name(run_dir), "journal")))
    except NotFoundError:
        length = 0
    return _told_attempt(run_dir), length


def _require_run(run_dir: Path) -> None:
    """Return if an attempt, a history or a generation is there; a name alone may be anybody's."""
    store = GenerationStore(run_dir)
    storage.require_no_link(store.directory)
    archived = (
        SingleGeneration(store.archive / home / step_name(step)) for home, step in store.archived()
    )
    if (
        _told_attempt(run_dir) is not None
        or _has_events(run_dir)
        or any(_has_manifest(one) for one in (store, *archived))
    ):
        return
    raise ForeignFileError(
        f"{run_dir} can't be told to be a run's directory: no run.json of an attempt, no journal "
        "and no whole resume point is in it. Nothing was changed.",
        next_step="Give the directory that Checkpointer was given.",
        path=str(run_dir),
    )


def _has_events(run_dir: Path) -> bool:
    try:
        return any(event["attempt"] is not None for event in read_journal(run_dir))
    except DistCkptError:
        return False


def _has_manifest(store: StoredGenerations) -> bool:
    for step in store.steps():
        with contextlib.suppress(DistCkptError):
            store.manifest(step)
            return True
    return False


def open_history(run_dir: Path) -> History:
    """Return the history of a run that is held, repaired where a crash has torn it."""
    return History(run_dir, run_name(run_dir), last_attempt(run_dir))


def end_rewind(run_dir: Path) -> None:
    """No rewind of a run that is held is left half done: of two histories it has one again."""
    if is_rewinding(run_dir):
        with open_history(run_dir) as history:
            finish_rewind(GenerationStore(run_dir), history)


@contextlib.contextmanager
def hold_open(run_dir: Path, command: str) -> Iterator[tuple[GenerationStore, History]]:
    """Hold the run with its history open, a rewind that was cut off ended before anything else.

    Raises:
        LockedError: A job trains in it, or another command is at it; the error names it.
    """
    with hold_run(run_dir, command), open_history(run_dir) as history:
        store = GenerationStore(run_dir)
        finish_rewind(store, history)
        yield store, history


def last_attempt(run_dir: Path, name: str | None = None) -> int:
    """Return the number of the newest attempt, 0 where there was none; ``name`` is the run's."""
    attempts = [_told_attempt(run_dir) or 0]
    with contextlib.suppress(DistCkptError):
        path = history_path(run_dir, name or run_name(run_dir), "journal")
        begun = read_journal(path, naming=("attempt_started",))
        attempts += [event["attempt"] or 0 for event in begun]
    return max(attempts)


def _told_attempt(run_dir: Path) -> int | None:
    """Return which attempt ``run.json`` is of, None where it tells of none."""
    with contextlib.suppress(DistCkptError, ValueError, TypeError, KeyError):
        data = storage.read_file(run_dir / _RUN_FILE, limit_bytes=_RUN_FILE_LIMIT_BYTES)
        return int(json.loads(data)["attempt"])
    return None
