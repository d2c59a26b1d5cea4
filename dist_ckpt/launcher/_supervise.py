"""One launch, from torchrun's start to the end of its last process. Layer 7; main thread.

The agent runs in a session of its own, and torchrun gives each worker one too: Ctrl-C in a terminal
reaches the launcher alone, which passes it on once. This process adopts orphans, so every process
of the job stays below it, whatever dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt.announce import (
    LAUNCH_COMMAND_ENV,
    LAUNCH_DIR_ENV,
    LAUNCH_ID_ENV,
    Announcement,
    announcement_lock,
    name_launcher,
    process_start_time,
    read_announcements,
    request_stop,
)
from dist_ckpt.launcher._ending import end_leftovers, exit_status
from dist_ckpt.launcher._names import LAUNCHER_PID_ENV, SHUTDOWN_ENV, say, signal_name
from dist_ckpt.launcher._notices import Notices
from dist_ckpt.launcher._processes import adopt_orphans, children_below, send_signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dist_ckpt.launcher._inbox import Inbox

__all__ = ["Launch"]

_POLL_SECS = 0.05  # while a signal waits for somebody to take it
_SLOW_POLL_SECS = 1.0
_IDLE_SECS = 3600.0
_SETTLE_SECS = 2.0  # for a job that has finished by itself to be gone
_KILL_SECS = 5.0  # from the agent's SIGTERM, or a second SIGINT's, to SIGKILL of all
_SECOND_SIGINT_STATUS = 128 + signal.SIGINT


class Launch:
    """A running job; ``run`` starts it and comes back with its exit status.

    Args:
        command: torchrun's options, the script and its arguments.
        inbox: Where the launcher's signals arrive; entered already, so that none is lost.
        grace_secs: What a stop may take from its delivery on; longer while its bytes move.
        announce_wait_secs: How long a stop is held back while no worker has handlers.
    """

    def __init__(
        self, command: Sequence[str], inbox: Inbox, *, grace_secs: float, announce_wait_secs: float
    ) -> None:
        self._command = list(command)
        self._inbox = inbox
        self._grace_secs = grace_secs
        self._announce_wait_secs = announce_wait_secs
        self._id = secrets.token_hex(16)
        self._directory = Path(tempfile.mkdtemp(prefix="dist-ckpt-launch-"))
        self._notices = Notices(self._directory)
        self._agent_pid = 0
        self._agent_start_time = 0
        self._agent_status: int | None = None
        self._save_held = False
        self._save_time = 0.0
        self._stop: int | None = None
        self._stop_time = 0.0
        self._told: set[tuple[int, int]] = set()  # (pid, start time) of who has the stop
        self._told_time = 0.0
        self._kill_time: float | None = None  # set once the agent was asked to end
        self._num_sigints = 0

    def run(self) -> int:
        """Every process of the job has ended; returns the exit status to end with."""
        # Cleaners of temporary directories leave alone what is locked; a run takes weeks.
        held = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)
        adopt_orphans(adopt=True)
        self._inbox.also = self._notices.fileno()
        try:
            name_launcher(self._directory)
            self._start_agent()
            while self._agent_status is None:
                self._inbox.wait(self._wait_secs())
                self._reap()
                self._notices.pass_on()
                for signum in self._inbox.take():
                    self._receive(signum)
                self._advance()
            self._end_leftovers(self._agent_status)
            return self._exit_status(self._agent_status)
        finally:
            adopt_orphans(adopt=False)
            self._notices.pass_on()
            self._inbox.also = None
            self._notices.close()
            os.close(held)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start_agent(self) -> None:
        environ = {
            **os.environ,
            **self._notices.environ,
            LAUNCH_DIR_ENV: str(self._directory),
            LAUNCH_ID_ENV: self._id,
            LAUNCH_COMMAND_ENV: json.dumps(sys.orig_argv),
            LAUNCHER_PID_ENV: str(os.getpid()),
        }
        # A restarted attempt must not meet the addresses of dead ranks in torchrun's own store:
        # torch 2.13 refuses to initialise gloo then, or hangs.
        environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        environ.setdefault(SHUTDOWN_ENV, str(max(1, round(self._grace_secs))))
        agent = subprocess.Popen(
            [sys.executable, "-m", "dist_ckpt.launcher._agent", *self._command],
            env=environ,
            start_new_session=True,
        )
        agent.returncode = 0  # reaped below, with the orphans, not by subprocess
        self._agent_pid = agent.pid
        self._agent_start_time = process_start_time(agent.pid) or 0

    def _wait_secs(self) -> float:
        if self._stop is not None:
            return _POLL_SECS
        if self._save_held:  # maybe for the whole run, where a script never announces itself
            return _POLL_SECS if time.monotonic() < self._save_time + 60 else _SLOW_POLL_SECS
        with contextlib.suppress(OSError):  # once an hour: keeps the files young
            for path in (self._directory, *self._directory.iterdir()):
                os.utime(path)
        return _IDLE_SECS

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._agent_pid:
                    self._agent_status = os.waitstatus_to_exitcode(status)

    # What to do with a signal.

    def _receive(self, signum: int) -> None:
        if signum == signal.SIGUSR1:
            self._save_held = True
            self._save_time = time.monotonic()
            return
        if signum == signal.SIGINT:
            self._num_sigints += 1
            if self._num_sigints > 1:
                self._end_at_once()
                return
        if self._stop is not None:
            say(
                f"{signal_name(signum)}: the job is stopping already; Ctrl-C twice ends it at once."
            )
            return
        # Workers handle no SIGHUP: a closed terminal is a stop like another.
        self._stop = signal.SIGTERM if signum == signal.SIGHUP else signum
        self._stop_time = time.monotonic()
        self._notices.stopping = True
        request_stop(self._directory)
        if not any(record.ready for record in read_announcements(self._directory)):
            say(
                f"{signal_name(signum)} is held back up to {self._announce_wait_secs:g} s: "
                "no worker handles signals at the moment."
            )

    def _advance(self) -> None:
        if self._save_held:
            self._pass_on_save()
        if self._stop is not None:
            self._pass_on_stop(self._stop)

    def _pass_on_save(self) -> None:
        with self._announced() as records:
            target = _who_saves(records)
            if target is not None and send_signal(target.pid, target.start_time, signal.SIGUSR1):
                self._save_held = False

    def _pass_on_stop(self, signum: int) -> None:
        now = time.monotonic()
        if self._kill_time is not None:
            if now >= self._kill_time:
                self._signal_all(signal.SIGKILL)
            return
        with self._announced() as records:
            for record in records:
                key = (record.pid, record.start_time)
                if record.ready and key not in self._told and send_signal(*key, signum):
                    if not self._told:
                        self._told_time = now
                        say(
                            f"{signal_name(signum)}: the job finishes its step, writes and ends "
                            f"(at most {self._grace_secs:g} s; Ctrl-C twice ends it at once)."
                        )
                    self._told.add(key)
        if self._told:
            if now >= max(self._told_time + self._grace_secs, self._notices.extended_until):
                self._end_by_agent(f"the grace of {self._grace_secs:g} s is over", _KILL_SECS)
        elif records and now >= self._stop_time + _SETTLE_SECS:
            self._end_by_agent("the workers handle signals no more", self._grace_secs)
        elif now >= self._stop_time + self._announce_wait_secs:
            waited = f"no worker handled signals within {self._announce_wait_secs:g} s"
            self._end_by_agent(waited, self._grace_secs)

    @contextlib.contextmanager
    def _announced(self) -> Iterator[list[Announcement]]:
        # Under the lock no worker takes its handlers away between the look and the signal.
        try:
            with announcement_lock(self._directory):
                yield read_announcements(self._directory)
        except OSError:
            yield []

    def _end_by_agent(self, reason: str, kill_secs: float) -> None:
        say(f"{reason}: torchrun is to end its workers, and all are killed in {kill_secs:g} s.")
        send_signal(self._agent_pid, self._agent_start_time, signal.SIGTERM)
        self._kill_time = time.monotonic() + kill_secs

    def _end_at_once(self) -> None:
        if self._num_sigints == 2:
            say("SIGINT again: ending everything at once. The last committed checkpoint stays.")
        end = time.monotonic() + _SETTLE_SECS
        for record in read_announcements(self._directory):
            send_signal(record.pid, record.start_time, signal.SIGINT)
        # A moment for the workers' KeyboardInterrupt; a third SIGINT cuts it short.
        while time.monotonic() < end and read_announcements(self._directory):
            self._inbox.wait(_POLL_SECS)
            self._reap()
            if signal.SIGINT in self._inbox.take():
                break
        self._signal_all(signal.SIGKILL)
        self._kill_time = time.monotonic()
        self._stop = signal.SIGINT

    def _end_leftovers(self, agent_status: int) -> None:
        killed = agent_status < 0
        if killed and self._kill_time is None:
            say(
                f"torchrun's agent was killed ({signal_name(-agent_status)}): its workers are "
                f"asked to write and end (at most {self._grace_secs:g} s)."
            )
        if self._kill_time is not None:
            grace_secs = 0.0
        else:
            grace_secs = self._grace_secs if killed else _KILL_SECS
        self._num_sigints += end_leftovers(
            self._inbox,
            self._reap,
            grace_secs=grace_secs,
            extended_until=self._extended_until,
            num_sigints=self._num_sigints,
        )

    def _extended_until(self) -> float:
        self._notices.pass_on()
        return self._notices.extended_until if self._kill_time is None else 0.0

    def _exit_status(self, agent_status: int) -> int:
        if self._num_sigints > 1:
            return _SECOND_SIGINT_STATUS
        if self._save_held:
            say("SIGUSR1 reached nobody: rank 0 had no handlers before the job ended.")
        return exit_status(self._directory, agent_status, stopping=self._stop is not None)

    def _signal_all(self, signum: int) -> None:
        for process in children_below(os.getpid()):
            send_signal(process.pid, process.start_time, signum)


def _who_saves(records: Sequence[Announcement]) -> Announcement | None:
    """Return rank 0's process; on a node without it the lowest rank's: any rank's wish counts."""
    if not records or not records[0].ready:
        return None
    all_here = len(records) >= records[0].local_world_size
    return records[0] if records[0].rank == 0 or all_here else None
