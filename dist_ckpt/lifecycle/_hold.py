"""A run held by a command rather than by training: its lock, its history. Layer 5, I/O."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dist_ckpt import announce, storage
from dist_ckpt.errors import DistCkptError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History, history_path, read_journal, run_name
from dist_ckpt.lifecycle._rewind import finish_rewind, is_rewinding

__all__ = ["LOCK_NAME", "end_rewind", "hold_open", "hold_run", "last_attempt", "open_history"]

LOCK_NAME: Final = "run.lock"
_RUN_FILE: Final = "run.json"
_RUN_FILE_LIMIT_BYTES: Final = 1 << 20


@contextlib.contextmanager
def hold_run(run_dir: Path, command: str) -> Iterator[None]:
    """Hold the run's lock: nobody trains in it, and no other command moves anything.

    Args:
        run_dir: The run directory.
        command: What holds it, for whoever comes meanwhile.

    Raises:
        LockedError: A job trains in it, or another command is at it; the error names it.
    """
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
        yield
    finally:
        lock.release()


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
    attempts = [0]
    with contextlib.suppress(DistCkptError, ValueError, TypeError, KeyError):
        data = storage.read_file(run_dir / _RUN_FILE, limit_bytes=_RUN_FILE_LIMIT_BYTES)
        attempts.append(int(json.loads(data)["attempt"]))
    with contextlib.suppress(DistCkptError):
        path = history_path(run_dir, name or run_name(run_dir), "journal")
        begun = read_journal(path, naming=("attempt_started",))
        attempts += [event["attempt"] or 0 for event in begun]
    return max(attempts)
