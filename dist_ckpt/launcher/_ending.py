"""The end of a launch: what still runs is ended, and the exit status found. Layer 7, I/O."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

from dist_ckpt.announce import read_all_announcements
from dist_ckpt.launcher._names import RESULT_NAME, UNMET_STATUS, say, signal_name
from dist_ckpt.launcher._processes import children_below, send_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dist_ckpt.launcher._inbox import Inbox

__all__ = ["common_status", "end_leftovers", "exit_status"]

_POLL_SECS = 0.05
_GONE_SECS = 10.0  # from SIGKILL to giving up: a process stuck in the kernel can't be waited for


def end_leftovers(
    inbox: Inbox,
    reap: Callable[[], None],
    *,
    grace_secs: float,
    extended_until: Callable[[], float],
    num_sigints: int,
) -> int:
    """Nothing runs below this process any more; returns how many SIGINTs arrived meanwhile.

    Orphans get SIGTERM, so that workers write and end; after the grace, once no bytes of theirs
    move (``extended_until``, by time.monotonic()), or at the second SIGINT in all, everything is
    killed.
    """
    kill_time = time.monotonic() + grace_secs
    told: set[tuple[int, int]] = set()
    more_sigints = 0
    while left := children_below(os.getpid()):
        now = time.monotonic()
        extended = extended_until()
        if now < kill_time:
            kill_time = max(kill_time, extended)
        if now >= kill_time + _GONE_SECS:
            say(f"not gone after SIGKILL, left alone: pids {[one.pid for one in left]}.")
            break
        for process in left:
            key = (process.pid, process.start_time)
            if now >= kill_time:
                send_signal(*key, signal.SIGKILL)
            elif process.parent == os.getpid() and key not in told:
                # Only orphans: a trainer's loader workers are needed for its last step.
                told.add(key)
                send_signal(*key, signal.SIGTERM)
        inbox.wait(_POLL_SECS)
        reap()
        more_sigints += inbox.take().count(signal.SIGINT)
        if num_sigints + more_sigints > 1:
            kill_time = min(kill_time, now)
    reap()
    return more_sigints


def exit_status(directory: Path, agent_status: int, *, stopping: bool) -> int:
    """Return the status to end with, and say which rank ended how where it isn't 0.

    Args:
        directory: The launch's directory, with the announcements and the agent's result.
        agent_status: As `os.waitstatus_to_exitcode` gives it: negative when killed.
        stopping: Whether the launcher passed a stop on.
    """
    # The workers' own are those of before a restart for which the nodes didn't meet again.
    if agent_status == 0 or (agent_status == UNMET_STATUS and not stopping):
        return agent_status
    codes = _worker_codes(directory, stopping=stopping)
    withdrawn = read_all_announcements(directory).values()
    stopped = stopping or any(record.stopped for record in withdrawn)
    status = common_status(codes, stopped=stopped)
    if status is None:
        status = agent_status if agent_status > 0 else 128 - agent_status
    if status != 0 and codes:
        ends = ", ".join(f"rank {rank}: {_ending(code)}" for rank, code in codes.items())
        say(f"ending with status {status} ({ends}).")
    return status


def common_status(codes: Mapping[int, int], *, stopped: bool) -> int | None:
    """Return the status that all workers ended with, where it says more than torchrun's."""
    distinct = set(codes.values())
    if len(distinct) != 1:
        return None
    code = distinct.pop()
    # Without a stop, workers that ended with 0 don't excuse an agent that failed.
    return code if code > 0 or (code == 0 and stopped) else None


def _worker_codes(directory: Path, *, stopping: bool) -> dict[int, int]:
    """Return each local rank's exit code; not of those that torchrun ended once stopped."""
    try:
        result = json.loads((directory / RESULT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    codes = {int(rank): int(code) for rank, code in result["exit_codes"].items()}
    done = {
        rank
        for rank, record in read_all_announcements(directory).items()
        if record.stopped or (stopping and not record.ready)
    }
    return {
        rank: code for rank, code in codes.items() if code != -signal.SIGTERM or rank not in done
    }


def _ending(code: int) -> str:
    return f"status {code}" if code >= 0 else f"killed by {signal_name(-code)}"
