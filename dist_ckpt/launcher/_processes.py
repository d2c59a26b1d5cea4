"""Looking at and signalling processes: a tree, single pids, never groups. Layer 7, I/O, Linux.

A pid may be given to another process between looking and signalling. Every signal here goes through
a pidfd whose process was compared with its start time after the descriptor was opened, so it
reaches that process or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt.announce import LAUNCH_ID_ENV, process_alive, process_start_time

__all__ = ["Process", "adopt_orphans", "children_below", "launched_as", "send_signal"]

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one of the same pid by its start time."""

    pid: int
    parent: int
    start_time: int


def send_signal(pid: int, start_time: int, signum: int) -> bool:
    """The process has the signal pending, or was gone (False). Its children don't get it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not process_alive(pid, start_time):
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def children_below(root: int) -> list[Process]:
    """Return all living descendants of a process, without zombies, parents first."""
    by_parent: dict[int, list[Process]] = {}
    for pid in _all_pids():
        process = _look_at(pid)
        if process is not None:
            by_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        children = by_parent.pop(waiting.pop(), [])
        found += children
        waiting += [child.pid for child in children]
    return found


def launched_as(launch_id: str) -> list[Process]:
    """Return the living processes whose environment carries the launch's id, without this one."""
    wanted = f"{LAUNCH_ID_ENV}={launch_id}".encode()
    found = []
    for pid in _all_pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = _look_at(pid)
                found += [process] if process is not None else []
    return found


def adopt_orphans(*, adopt: bool) -> None:
    """Orphaned descendants become children of this process (or, with False, of init again)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _look_at(pid: int) -> Process | None:
    start_time = process_start_time(pid)
    if start_time is None:
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return Process(pid, int(text[text.rfind(")") + 1 :].split()[1]), start_time)
