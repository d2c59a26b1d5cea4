"""Whether a run is alive, and by what evidence. Layer 6, reads only.

The kernel frees the run's lock when its holder dies, however that happens, so a held lock means
alive. Where nobody holds it, the process that ``run.json`` names and the journal's last word tell
whether the run ended or died. A process on another host can't be judged from here.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dist_ckpt import announce, storage
from dist_ckpt.errors import DistCkptError
from dist_ckpt.runs._places import LOCK_FILE, read_run_file

__all__ = ["Evidence", "Liveness", "State", "look_alive"]


_KINDS: Mapping[str, type] = {"pid": int, "host": str, "attempt": int, "world_size": int}


class State(StrEnum):
    """What can be said of the newest attempt."""

    RUNNING = "running"
    SUSPENDED = "suspended"  # alive, and stands still until it gets SIGCONT
    STOPPED = "stopped"  # asked to, after a checkpoint
    ENDED = "ended"  # came to its end
    FAILED = "failed"  # left by an error, which the journal names
    DEAD = "dead"  # gone without a word: killed, crashed, power cut
    UNKNOWN = "unknown"  # on another host
    NEW = "new"  # never trained here


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that speaks for or against.

    Attributes:
        what: ``"lock"``, ``"process"``, ``"journal"`` or ``"last step"``.
        alive: It says alive, not alive, or nothing (None).
        text: A sentence without a full stop.
        is_suspended: The process stands still.
    """

    what: str
    alive: bool | None
    text: str
    is_suspended: bool = False


@dataclass(frozen=True, slots=True)
class Liveness:
    """The verdict and what it rests on.

    Attributes:
        state: The verdict.
        evidence: The facts, the weightiest first.
        facts: What ``run.json`` says of the newest attempt.
        is_locked: Somebody holds the run's lock.
    """

    state: State
    evidence: tuple[Evidence, ...]
    facts: Mapping[str, Any]
    is_locked: bool


def look_alive(run_dir: Path, journal: Sequence[Mapping[str, Any]]) -> Liveness:
    """Return whether a run is alive; takes its lock for an instant, shared, and writes nothing.

    Args:
        run_dir: The run directory.
        journal: Its events.
    """
    facts = _of_their_kinds(read_run_file(run_dir) or {})
    process = _ask_process(facts)
    end = _ask_journal(journal, facts)
    may_train = process is not None and process.alive is not False
    lock = _ask_lock(run_dir, may_train=may_train and (end is None or end.alive is not False))
    evidence = tuple(found for found in (lock, process, end) if found is not None)
    return Liveness(_judge(lock, process, end, journal), evidence, facts, lock.alive is True)


def _of_their_kinds(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without those of another kind than a start writes: they say nothing."""
    return {
        key: value
        for key, value in facts.items()
        if key not in _KINDS or type(value) is _KINDS[key]
    }


def _judge(
    lock: Evidence,
    process: Evidence | None,
    end: Evidence | None,
    journal: Sequence[Mapping[str, Any]],
) -> State:
    if lock.alive:
        return State.SUSPENDED if _is_suspended(process) else State.RUNNING
    if end is not None and end.alive is False:
        return State(_last_word(journal).removeprefix("attempt_"))
    if process is None:
        return State.NEW if end is None else State.DEAD
    if process.alive is None:
        return State.UNKNOWN
    # A process without its lock: somebody removed the lock's file.
    if _is_suspended(process):
        return State.SUSPENDED
    return State.RUNNING if process.alive else State.DEAD


def _is_suspended(process: Evidence | None) -> bool:
    return process is not None and process.is_suspended


def _ask_lock(run_dir: Path, *, may_train: bool) -> Evidence:
    """Return what the lock says; ``may_train``: nothing else says that nobody does."""
    try:
        holder = storage.lock_holder(run_dir / LOCK_FILE)
    except DistCkptError as error:
        return Evidence("lock", None, f"{LOCK_FILE} can't be asked: {error.message}")
    if holder is None:
        return Evidence("lock", False, f"nobody holds {LOCK_FILE}")
    who = f" by pid {holder['pid']} on {holder.get('host')}" if "pid" in holder else ""
    if "command" in holder:  # nobody trains: a command is moving things
        return Evidence("lock", None, f"`dist-ckpt {holder['command']}` holds {LOCK_FILE}{who}")
    if not holder and not may_train:  # a full disk had no room for the name of a command
        return Evidence("lock", None, f"{LOCK_FILE} is held by somebody who isn't named")
    return Evidence("lock", True, f"{LOCK_FILE} is held{who}")


def _ask_process(facts: Mapping[str, Any]) -> Evidence | None:
    pid, start, host = facts.get("pid"), facts.get("start_time"), facts.get("host")
    if type(pid) is not int:
        return None
    if host != socket.gethostname():
        text = f"pid {pid} is on host {host}; from {socket.gethostname()} it can't be judged"
        return Evidence("process", None, text)
    found = announce.process_start_time(pid)
    if found is None:
        return Evidence("process", False, f"no process {pid} on this host")
    if start is not None and found != start:
        text = f"pid {pid} is another process now: it started at another time than run.json says"
        return Evidence("process", False, text)
    if announce.process_suspended(pid):
        text = f"process {pid} is suspended (SIGSTOP); `kill -CONT {pid}` lets it go on"
        return Evidence("process", True, text, is_suspended=True)
    return Evidence("process", True, f"process {pid} lives on this host")


def _ask_journal(journal: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Evidence | None:
    word = _last_word(journal)
    if not word:
        return None
    number = facts.get("attempt")
    last = _last_attempt_event(journal)
    if word == "attempt_started" or last.get("attempt") != number:
        return Evidence("journal", None, f"attempt {number} has no end in the journal")
    how = word.removeprefix("attempt_")
    why = last.get("reason") or last.get("error")
    at = "" if last.get("step") is None else f" at step {last['step']}"
    text = f"attempt {number} {how}{at}" + (f": {why}" if why else "")
    return Evidence("journal", False, text)


def _last_attempt_event(journal: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    words = ("attempt_started", "attempt_stopped", "attempt_ended", "attempt_failed")
    return next((event for event in reversed(journal) if event.get("event") in words), {})


def _last_word(journal: Sequence[Mapping[str, Any]]) -> str:
    return str(_last_attempt_event(journal).get("event", ""))
