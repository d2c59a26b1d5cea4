"""The new run directory: under another name until it is whole, with the history up to its step."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import LockedError, StorageError
from dist_ckpt.history import (
    History,
    carry_kinds,
    read_policy,
    run_name,
    write_past,
    write_policy,
)
from dist_ckpt.lifecycle import Origin, past_of, pivot_due
from dist_ckpt.resume_point import ResumePoint

__all__ = ["carry_history", "carry_policy", "new_run"]

_LOCK_FILE = "run.lock"


@contextmanager
def new_run(out: Path) -> Iterator[Path]:
    """Give an empty directory that gets the name ``out``, durably, when it is left without error.

    Left by an error, it is gone. What an earlier call left that was killed is removed. It is locked
    meanwhile, so that nobody trains in it before it is ready.

    Raises:
        StorageError: Something is at ``out`` now, or the system refused.
    """
    _clean(out)
    temporary = out.parent / f".tmp-{out.name}-{secrets.token_hex(4)}"
    storage.make_dir(temporary)
    lock = storage.RunLock(temporary / _LOCK_FILE)
    try:
        lock.acquire({"pid": os.getpid(), "host": socket.gethostname(), "command": "reshard"})
        yield temporary
        storage.sync_dir(temporary)
        storage.rename_durable(temporary, out)
    except BaseException:
        with suppress(StorageError):  # the first error is the one to tell
            storage.remove_tree(temporary)
        raise
    finally:
        lock.release()


def _clean(out: Path) -> None:
    """Remove what killed calls for the same name left; those that are alive hold their lock."""
    pattern = re.compile(rf"\.tmp-{re.escape(out.name)}-[0-9a-f]{{8}}")
    for name in storage.list_names(out.parent):
        if not pattern.fullmatch(name):
            continue
        lock = storage.RunLock(out.parent / name / _LOCK_FILE)
        with suppress(LockedError):
            storage.require_no_link(out.parent / name)  # even a lock file would lie elsewhere
            lock.acquire({"pid": os.getpid()})
            storage.remove_tree(out.parent / name)
        lock.release()


def carry_history(origin: Origin, target: Path, name: str, *, facts: Mapping[str, Any]) -> None:
    """Have the history that led to a generation in a new run, and how it came there in its journal.

    Args:
        origin: Where the generation lies: in a run, in the archive of one, or in none.
        target: The new run directory.
        name: The new run's.
        facts: Of the journal's event ``resharded``.
    """
    past = past_of(origin)
    write_past(target, name, past)
    with History(target, name, 0) as history:
        carry_kinds(history.journal, past)  # durable with the next event
        history.journal.append("resharded", step=origin.step, **facts)


def carry_policy(origin: Origin, target: Path, name: str, point: ResumePoint) -> None:
    """Have the settings that the policy goes on with in a new run, and the pivot that is due.

    Those that the resume point was made under; but where the run has pivoted behind its newest
    point, that is what the next start would have followed, and so does the new run's.

    Args:
        origin: Where the generation lies.
        target: The new one, whose history is there.
        name: The new run's.
        point: The resume point that is rewritten.
    """
    settings = point.notes.get("policy")
    if origin.run_dir is not None and origin.is_newest:
        settings = read_policy(origin.run_dir, run_name(origin.run_dir))
        pivot = pivot_due(origin, point)
        if pivot is not None:
            with History(target, name, 0) as history:
                history.journal.append(
                    "pivot",
                    step=point.step,
                    id=pivot.id,
                    by="reshard",
                    archive=None,
                    archived=[],
                    policy=settings,
                    previous=pivot.previous,
                )
    if settings is not None:
        write_policy(target, name, dict(settings))
