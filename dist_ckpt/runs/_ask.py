"""Asking a live run for a checkpoint, or to stop, and waiting until that is done. Layer 6.

The signal goes to rank 0's own process: the ranks agree at the next boundary, whoever got it. The
answer is read from the journal, which rank 0 writes only after the commit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import announce, storage
from dist_ckpt.errors import (
    DistCkptError,
    JobError,
    NotRunningError,
    RankTimeoutError,
    SaveFailedError,
)
from dist_ckpt.history import parse_journal
from dist_ckpt.runs._liveness import State, look_alive
from dist_ckpt.runs._places import journal_path
from dist_ckpt.runs._run import Run

__all__ = ["Answered", "ask_save", "ask_stop", "handles", "sender_to"]

_POLL_SECS = 0.05
_ENDS = ("attempt_stopped", "attempt_ended", "attempt_failed")


@dataclass(frozen=True, slots=True)
class Answered:
    """What the run did.

    Attributes:
        step: The step whose generation is committed.
        event: The journal's word: ``saved``, ``already_saved``, ``attempt_stopped``, …
        pid: Process that was asked.
        secs: How long it took.
    """

    step: int
    event: str
    pid: int
    secs: float


def ask_save(run: Run, *, timeout_secs: float = 600.0) -> Answered:
    """Have a committed generation that is no older than this call; training goes on.

    Args:
        run: The run; its rank 0 runs on this host.
        timeout_secs: How long to wait; with ``sigusr1="boundary"`` it takes up to ``every`` steps.

    Raises:
        NotRunningError: It doesn't run, not on this host, or ended without a checkpoint.
        SaveFailedError: The run tried and failed.
        RankTimeoutError: No answer in time; the run may still answer later.
    """
    asked = _ask(run, signal.SIGUSR1, timeout_secs)
    since: int | None = None
    for event in asked.events():
        word, step = event.get("event"), event.get("step")
        if word == "signal" and "SIGUSR1" in (event.get("signals") or ()):
            since = step
        elif word in _ENDS:
            # It ended before it answered: its last checkpoint is newer than the request.
            return asked.ended(event)
        elif since is None:
            continue
        elif word in ("saved", "already_saved") and type(step) is int and step >= since:
            return asked.answer(step, str(word))
        elif word == "save_failed" and step in (None, since):
            raise SaveFailedError(
                f"The run could not save: {event.get('error')}.",
                next_step="Earlier generations are untouched; mend the cause and ask again.",
                step=since,
                cause=event.get("error"),
            )
    raise asked.silent()


def ask_stop(run: Run, *, timeout_secs: float = 600.0) -> Answered:
    """Have the run's rank 0 ended, after a committed checkpoint.

    Raises:
        NotRunningError: It doesn't run, or not on this host.
        JobError: It ended by an error; the message is the run's own.
        RankTimeoutError: It hasn't ended in time; the run may still do so later.
    """
    asked = _ask(run, signal.SIGTERM, timeout_secs)
    end: dict[str, Any] | None = None
    for event in asked.events():
        if event.get("event") in _ENDS:
            end = event
            break
    if end is None:
        raise asked.silent()
    while asked.is_alive():
        if asked.is_late():
            raise RankTimeoutError(
                f"The training has stopped at step {end.get('step')} and is saved, "
                f"but its process {asked.pid} goes on after {timeout_secs:g} s.",
                next_step="The script does something after its training; wait for it.",
                phase="stop",
                missing=[0],
                timeout_secs=timeout_secs,
            )
        time.sleep(_POLL_SECS)
    return asked.ended(end)


class _Asked:
    """A process that was sent a signal, and the journal from that moment on."""

    def __init__(
        self, run: Run, pid: int, start_time: int, journal: _Tail, timeout_secs: float
    ) -> None:
        self.pid = pid
        self._run = run
        self._start_time = start_time
        self._journal = journal
        self._timeout_secs = timeout_secs
        self._began = time.monotonic()

    def is_alive(self) -> bool:
        return announce.process_alive(self.pid, self._start_time)

    def is_late(self) -> bool:
        return time.monotonic() - self._began > self._timeout_secs

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield new events until the time is up, or the process is gone and said its last."""
        while True:
            alive, late = self.is_alive(), self.is_late()
            yield from self._journal.read()
            if late or not alive:
                return
            time.sleep(_POLL_SECS)

    def answer(self, step: int, event: str) -> Answered:
        return Answered(step, event, self.pid, time.monotonic() - self._began)

    def ended(self, event: dict[str, Any]) -> Answered:
        if event["event"] == "attempt_failed":
            raise JobError(
                f"The run ended by an error: {event.get('error')}.",
                next_step="`dist-ckpt status` says what is saved.",
                step=event.get("step"),
            )
        latest = self._run.latest()
        if latest is None or latest.step != event.get("step"):
            raise NotRunningError(
                f"The run ended at step {event.get('step')} without a checkpoint of it.",
                next_step="`dist-ckpt status` says what is saved.",
                path=str(self._run.path),
            )
        return self.answer(latest.step, str(event["event"]))

    def silent(self) -> DistCkptError:
        if not self.is_alive():
            return NotRunningError(
                f"Process {self.pid} ended without a word in the journal: killed, or crashed.",
                next_step="`dist-ckpt status` says what is saved.",
                path=str(self._run.path),
                pid=self.pid,
            )
        return RankTimeoutError(
            f"The run has not answered within {self._timeout_secs:g} s; it may still do so.",
            next_step="`dist-ckpt status` tells how long a step takes; allow it more time.",
            phase="answer",
            missing=[0],
            timeout_secs=self._timeout_secs,
        )


class _Tail:
    """The lines that a journal gets from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._offset = storage.file_size(path) if storage.exists(path) else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines since the last call."""
        if not storage.exists(self._path):
            return []
        length = storage.file_size(self._path) - self._offset
        if length <= 0:
            return []
        buffer = bytearray(length)
        segment = storage.Segment(self._offset, memoryview(buffer), length)
        storage.read_segments(self._path, [segment], None, threads=1)
        whole = bytes(buffer[: buffer.rfind(b"\n") + 1])
        self._offset += len(whole)
        return parse_journal(whole)


def _ask(run: Run, signum: signal.Signals, timeout_secs: float) -> _Asked:
    pid, start_time = _find_process(run)
    with sender_to(pid, start_time, run) as send:
        if not handles(pid, signum):
            raise NotRunningError(
                f"Process {pid} doesn't handle {signum.name} (now): it would die of it.",
                next_step="It is about to end, or its Checkpointer was told other `signals`.",
                path=str(run.path),
                pid=pid,
            )
        journal = _Tail(journal_path(run.store.run_dir))
        asked = _Asked(run, pid, start_time, journal, timeout_secs)
        send(signum)
    return asked


def _find_process(run: Run) -> tuple[int, int]:
    """Return pid and start time of the live rank 0 on this host."""
    liveness = look_alive(run.store.run_dir, run.journal())
    if liveness.state is State.SUSPENDED:
        pid = liveness.facts.get("pid")
        raise NotRunningError(
            f"Process {pid} of {run.path} is suspended (SIGSTOP): it can't answer.",
            next_step=f"Let it go on, then ask again: kill -CONT {pid}",
            path=str(run.path),
            pid=pid,
        )
    process = next((found for found in liveness.evidence if found.what == "process"), None)
    facts = liveness.facts
    if liveness.state is not State.RUNNING or process is None or not liveness.is_locked:
        reasons = "; ".join(found.text for found in liveness.evidence)
        word = liveness.state.value if liveness.state is not State.RUNNING else "not locked"
        raise _not_running(run, f"{run.path} is {word}: {reasons}.")
    if not process.alive:
        raise _not_running(run, f"{run.path} runs elsewhere: {process.text}.", facts.get("host"))
    pid = int(facts["pid"])
    start_time = announce.process_start_time(pid)
    if start_time is None:
        raise _not_running(run, f"Process {pid} has just ended.")
    return pid, start_time


def _not_running(run: Run, message: str, host: object = None) -> NotRunningError:
    return NotRunningError(
        message,
        next_step=f"Ask on {host}."
        if host
        else "Only a run that trains on this host can be asked.",
        path=str(run.path),
    )


class sender_to:  # noqa: N801 - reads as a verb in its one `with`
    """Sends signals to that very process by a handle of the kernel, and to no later one."""

    def __init__(self, pid: int, start_time: int, run: Run) -> None:
        self._pid = pid
        self._start_time = start_time
        self._run = run
        self._handle: int | None = None

    def __enter__(self) -> Callable[[signal.Signals], None]:
        try:
            self._handle = os.pidfd_open(self._pid)
        except (AttributeError, OSError):
            self._handle = None  # an old kernel: the window between look and signal is microseconds
        if not announce.process_alive(self._pid, self._start_time):
            self.__exit__()
            raise _not_running(self._run, f"Process {self._pid} has just ended.")
        return self._send

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _send(self, signum: signal.Signals) -> None:
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signum)
            else:
                os.kill(self._pid, signum)
        except ProcessLookupError:
            raise _not_running(self._run, f"Process {self._pid} has just ended.") from None
        except PermissionError:
            raise _not_running(
                self._run, f"Process {self._pid} belongs to another user, who alone may signal it."
            ) from None


def handles(pid: int, signum: signal.Signals) -> bool:
    """Return whether the process catches the signal; True where that can't be told."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        mask = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (signum - 1) & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return True
