"""One lifetime of the job in a run directory: its number, its lock, its files. Layer 6."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_ckpt import announce, storage
from dist_ckpt.comm import Comm
from dist_ckpt.errors import (
    CorruptFileError,
    DistCkptError,
    ForeignFileError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import (
    History,
    NullHistory,
    history_path,
    read_journal,
    read_policy,
    run_name,
    write_policy,
    write_state,
)
from dist_ckpt.lifecycle import (
    Pivot,
    finish_pivot,
    last_attempt,
    refuse_half_a_copy,
    require_room_for_names,
    settle,
)
from dist_ckpt.storage import RunLock

__all__ = ["Attempt", "open_attempt"]

_RUN_FILE = "run.json"


@dataclass
class Attempt:
    """An open run directory.

    Attributes:
        number: Counted from 1 over the life of the run.
        name: The run's name.
        nonce: Random text of this attempt, the same on every rank.
        store: Its generations.
        history: Its sidecars; a stand-in on other ranks than 0.
        lock: Held by rank 0, None elsewhere.
        facts: What ``run.json`` says.
        removed: Temporary remains of earlier attempts that were removed.
        pivot: The pivot that this start carried out, where one was left to do.
        settings: The policy's, as this attempt found them in the run directory.
    """

    number: int
    name: str
    nonce: str
    store: GenerationStore
    history: History | NullHistory
    lock: RunLock | None
    facts: Mapping[str, Any]
    removed: tuple[str, ...] = ()
    pivot: Pivot | None = None
    settings: dict[str, Any] | None = None
    warn: Callable[[str], None] = field(default=lambda _text: None, repr=False)
    is_abandoned: bool = False

    def journal(
        self, event: str, *, step: int | None = None, sync: bool = True, **fields: Any
    ) -> None:
        """Add an event to the journal; a disk that refuses it doesn't end training. Any thread.

        Between two steps, where training would wait for the disk, without ``sync``: what the
        background thread journals next, or the end, makes it durable.
        """
        if self.is_abandoned:
            return
        try:
            self.history.journal.append(event, step=step, sync=sync, **fields)
        except (DistCkptError, OSError, ValueError) as error:
            self.warn(f"the journal could not take {event!r}: {error}")

    def events(self, *naming: str) -> list[dict[str, Any]]:
        """Return the journal's events in whose lines one of these words stands. Rank 0.

        Raises:
            NotFoundError: It was removed.
        """
        path = history_path(self.store.run_dir, self.name, "journal")
        return read_journal(path, naming=naming)

    def keep_policy(self, state: bytes) -> None:
        """``NAME.state.json`` holds the policy's state, durably; on the background thread."""
        write_state(self.store.run_dir, self.name, state)

    def write_settings(self) -> None:
        """``NAME.policy.json`` is there, where this attempt found one at its start."""
        run_dir = self.store.run_dir
        if self.settings is not None and read_policy(run_dir, self.name) is None:
            write_policy(run_dir, self.name, self.settings)

    def check_lock(self) -> None:
        """Return if the run directory is still this job's."""
        if self.lock is not None:
            self.lock.check()

    def write_run_file(self) -> None:
        """Have ``run.json`` say who runs the run; durable. Rank 0."""
        _write_run_file(self.store.run_dir, self.facts)

    def abandon(self) -> None:
        """Nothing is written any more: the run directory is another job's now."""
        self.is_abandoned = True

    def close(self) -> None:
        """Close the files and let go of the lock."""
        try:
            if self.is_abandoned:
                self.history.abandon()
            else:
                self.history.close()
        finally:
            if self.lock is not None:
                self.lock.release()


def open_attempt(
    run_dir: Path, comm: Comm, *, settings: Mapping[str, Any] | None = None
) -> Attempt:
    """Return the run directory, made if need be, locked and cleaned; every rank sees the same one.

    Collective, main thread.

    Args:
        run_dir: The run directory.
        comm: The job's ranks.
        settings: More facts for ``run.json``, for commands that ask what the run is told.

    Raises:
        LockedError: Another process trains in it; the error names it.
        StorageError: It can't be written, or another rank doesn't see it.
    """
    store = GenerationStore(run_dir)
    with contextlib.ExitStack() as undo:

        def start() -> _Started | None:
            return _start(run_dir, store, comm, undo, settings or {}) if comm.rank == 0 else None

        started = comm.together("opening the run directory", start)
        facts = json.loads(comm.broadcast(json.dumps(started.facts).encode() if started else None))
        comm.together("looking for the run directory", lambda: _check_shared(run_dir, facts))
        undo.pop_all()
    return Attempt(
        number=facts["attempt"],
        name=facts["name"],
        nonce=facts["nonce"],
        store=store,
        history=started.history if started else NullHistory(),
        lock=started.lock if started else None,
        facts=facts,
        removed=tuple(started.removed) if started else (),
        pivot=started.pivot if started else None,
    )


@dataclass(frozen=True)
class _Started:
    lock: RunLock
    history: History
    facts: dict[str, Any]
    removed: list[str]
    pivot: Pivot | None


def _start(
    run_dir: Path,
    store: GenerationStore,
    comm: Comm,
    undo: contextlib.ExitStack,
    settings: Mapping[str, Any],
) -> _Started:
    if storage.exists(run_dir) and not storage.is_dir(run_dir):
        raise ForeignFileError(
            f"{run_dir} is a file, not a run directory. A file of weights holds no random state, "
            "no place in the data and no schedule, so no training can be resumed from it.",
            next_step="Give the run directory itself. A new run can be started from a .bin: "
            "dist-ckpt import FILE.bin RUN -- COMMAND",
            path=str(run_dir),
        )
    require_room_for_names(run_dir)
    refuse_half_a_copy(store)
    store.create()
    name = run_name(run_dir)
    require_room_for_names(run_dir, name)
    holder: dict[str, Any] = {
        "pid": os.getpid(),
        "start_time": announce.process_start_time(os.getpid()),
        "host": socket.gethostname(),
        "world_size": comm.world_size,
        "started": time.time(),
        "launch_id": announce.launch_id(),
    }
    lock = RunLock(run_dir / "run.lock")
    lock.acquire(holder)
    undo.callback(lock.release)
    settle(run_dir)  # held now: whoever left something pending does nothing more
    removed = store.clean()
    facts = {**settings, **holder, "name": name, "attempt": last_attempt(run_dir, name) + 1}
    facts |= {"nonce": secrets.token_hex(8), **_how_started()}
    # Before anything of the run is opened: it goes on from what a pivot leaves.
    pivot = finish_pivot(run_dir, name, facts["attempt"])
    history = History(run_dir, name, facts["attempt"])
    undo.callback(history.close)
    _write_run_file(run_dir, facts)
    history.journal.append(
        "attempt_started",
        pid=holder["pid"],
        host=holder["host"],
        world_size=comm.world_size,
        launch_id=holder["launch_id"],
        nonce=facts["nonce"],
        scheduler=_scheduler(),
    )
    if removed:
        history.journal.append("cleaned", removed=removed)
    return _Started(lock, history, facts, removed, pivot)


def _scheduler() -> dict[str, Any] | None:
    """Return which job of a scheduler this is, and how often that was started again."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    count = int(restarts) if restarts.isascii() and restarts.isdigit() else 0
    return {"name": "slurm", "job": job, "restarts": count}


def _how_started() -> dict[str, Any]:
    """Return by what command, from where, and below which launcher this process was started."""
    agent = announce.agent_pid()
    return {
        "command": announce.launch_command(),
        "directory": os.getcwd(),
        "agent_pid": agent,
        "agent_start_time": None if agent is None else announce.process_start_time(agent),
    }


def _write_run_file(run_dir: Path, facts: Mapping[str, Any]) -> None:
    data = json.dumps(facts, allow_nan=False).encode()
    storage.replace_durable(run_dir / _RUN_FILE, data)


def _check_shared(run_dir: Path, facts: dict[str, Any]) -> None:
    """Every rank must see what rank 0 has just written, or shards would end up on several disks."""
    # What the disk refuses for another reason is its own error.
    with contextlib.suppress(NotFoundError, CorruptFileError, ForeignFileError, ValueError):
        body = json.loads(storage.read_file(run_dir / _RUN_FILE, limit_bytes=1 << 20))
        if body.get("nonce") == facts["nonce"]:
            return
    raise StorageError(
        f"{run_dir} on {socket.gethostname()} isn't the directory that rank 0 sees on "
        f"{facts['host']}.",
        next_step="Put the run directory on a file system that all hosts share.",
        path=str(run_dir),
        operation="read",
    )
