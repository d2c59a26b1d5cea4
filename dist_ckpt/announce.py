"""How a trainer tells its launcher that signals are welcome. Layer 2, I/O; imports no torch.

The launcher makes a private directory and names it in the environment (`LAUNCH_DIR_ENV`). A rank
whose signal handlers are installed writes ``rank_<r>.json`` there, and marks it withdrawn before
the handlers go. The launcher signals a process only while its record says ready, its pid is alive
and its start time is the recorded one.

Sending and withdrawing exclude each other by a lock, so a signal never meets a process whose
handlers have just gone. Without a launcher everything here does nothing. Nothing here raises for a
launcher that is gone or a directory that was removed: training must not end because of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = [
    "AGENT_PID_ENV",
    "LAUNCH_COMMAND_ENV",
    "LAUNCH_DIR_ENV",
    "LAUNCH_ID_ENV",
    "Announcement",
    "agent_pid",
    "announce",
    "announcement_lock",
    "any_lost_a_peer",
    "any_stopped",
    "die_with_parent",
    "is_orphaned",
    "launch_command",
    "launch_id",
    "name_launcher",
    "process_alive",
    "process_start_time",
    "process_suspended",
    "read_all_announcements",
    "read_announcements",
    "request_stop",
    "stop_requested",
    "take_again",
    "withdraw",
    "write_json",
]

LAUNCH_DIR_ENV = "DIST_CKPT_LAUNCH_DIR"
LAUNCH_ID_ENV = "DIST_CKPT_LAUNCH_ID"
AGENT_PID_ENV = "DIST_CKPT_AGENT_PID"
LAUNCH_COMMAND_ENV = "DIST_CKPT_LAUNCH_COMMAND"

_LAUNCHER_NAME = "launcher.json"
_LOCK_NAME = "lock"
_STOP_NAME = "stop"
_STOPPED_NAME = "stopped"
_AGAIN_NAME = "again"
_LOCK_WAIT_SECS = 1.0
_PR_SET_PDEATHSIG = 1
_STATE_FIELD, _START_TIME_FIELD = 0, 19  # counted behind the command's closing parenthesis


@dataclass(frozen=True)
class Announcement:
    """One rank's record: who it is, and whether its handlers are installed (``ready``) or gone.

    ``start_time`` is in clock ticks since boot and makes a pid unique; ``attempt`` is torchrun's
    restart count; ``stopped`` says, once withdrawn, that the rank ended its training because it was
    asked to; ``lost_a_peer`` that it ended because another rank's launcher had died.
    """

    rank: int
    pid: int
    start_time: int
    attempt: int
    local_world_size: int
    ready: bool
    stopped: bool = False
    lost_a_peer: bool = False


def launch_id() -> str | None:
    """Return the random name of the launch that this process belongs to; None without one."""
    return os.environ.get(LAUNCH_ID_ENV) or None


def launch_command() -> list[str]:
    """Return the command line by which this process, or the launcher above it, was started."""
    with contextlib.suppress(ValueError):
        words = json.loads(os.environ.get(LAUNCH_COMMAND_ENV, ""))
        if isinstance(words, list) and words:
            return [str(word) for word in words]
    return list(sys.orig_argv)


def agent_pid() -> int | None:
    """Return the pid of the agent that started this process; None without our launcher."""
    return _int_env(AGENT_PID_ENV, 0) or None


def announce(rank: int) -> bool:
    """The launcher may signal this process from now on; call it once the handlers are installed.

    Returns False, and changes nothing, without our launcher or where another live process already
    announced this rank (a child of the trainer that inherited its environment). Under our launcher
    the process also gets SIGTERM when torchrun's agent dies, so that it writes and ends even if
    nobody is left to ask it to. Not collective; any thread.
    """
    directory = _launch_dir()
    start_time = process_start_time(os.getpid())
    if directory is None or start_time is None:
        return False
    mine = Announcement(
        rank=rank,
        pid=os.getpid(),
        start_time=start_time,
        attempt=_int_env("TORCHELASTIC_RESTART_COUNT", 0),
        local_world_size=_int_env("LOCAL_WORLD_SIZE", 1),
        ready=True,
    )
    try:
        with announcement_lock(directory):
            before = _read_one(_record_path(directory, rank))
            if (
                before is not None
                and before.ready
                and before.pid != mine.pid
                and process_alive(before.pid, before.start_time)
            ):
                return False
            write_json(_record_path(directory, rank), asdict(mine))
    except OSError:
        return False
    _end_with_agent()
    return True


def withdraw(
    rank: int, *, stopped: bool = False, again: bool = False, lost_a_peer: bool = False
) -> None:
    """The launcher signals this process no more; call it before the handlers are taken away.

    Args:
        rank: The rank that was announced.
        stopped: True when training ended because it was asked to: torchrun then doesn't start the
            workers again, whatever they exit with.
        again: True when training ended to be started again: the agent does so once its workers
            have ended with 0.
        lost_a_peer: True when it ended because another rank's launcher had died: torchrun then
            starts the workers again though they exit with 0, where restarts are left.
    """
    directory = _launch_dir()
    if directory is None:
        return
    with contextlib.suppress(OSError), announcement_lock(directory):
        before = _read_one(_record_path(directory, rank))
        if before is None or before.pid != os.getpid():
            return
        after = {
            **asdict(before),
            "ready": False,
            "stopped": stopped,
            "lost_a_peer": lost_a_peer,
        }
        write_json(_record_path(directory, rank), after)
        if stopped:
            (directory / _STOPPED_NAME).touch(mode=0o600)
        if again:
            (directory / _AGAIN_NAME).touch(mode=0o600)


def read_announcements(directory: Path) -> list[Announcement]:
    """Return the records of processes that are alive, by rank; what can't be read is left out."""
    try:
        paths = list(directory.glob("rank_*.json"))
    except OSError:
        return []
    found = [record for path in paths if (record := _read_one(path)) is not None]
    alive = [record for record in found if process_alive(record.pid, record.start_time)]
    return sorted(alive, key=lambda record: record.rank)


def read_all_announcements(directory: Path) -> dict[int, Announcement]:
    """Return each rank's last record, whether its process lives or not."""
    found = [_read_one(path) for path in directory.glob("rank_*.json")]
    return {record.rank: record for record in found if record is not None}


def request_stop(directory: Path) -> None:
    """From now on the job isn't restarted. Does nothing where the directory is gone."""
    with contextlib.suppress(OSError):
        (directory / _STOP_NAME).touch(mode=0o600)


def stop_requested(directory: Path) -> bool:
    """Return whether the launcher was asked to stop the job."""
    return (directory / _STOP_NAME).exists()


def any_stopped(directory: Path, pids: Collection[int]) -> bool:
    """Return whether one of these processes withdrew because its training had been stopped."""
    if not (directory / _STOPPED_NAME).exists():
        return False  # the usual answer, ten times a second
    records = read_all_announcements(directory).values()
    return any(record.stopped and record.pid in pids for record in records)


def take_again(directory: Path) -> bool:
    """Return whether a rank ended to be started again; says so once."""
    try:
        (directory / _AGAIN_NAME).unlink()
    except OSError:
        return False
    return True


def any_lost_a_peer(directory: Path, pids: Collection[int]) -> bool:
    """Return whether one of these processes ended because another rank's launcher had died."""
    records = read_all_announcements(directory).values()
    return any(record.lost_a_peer and record.pid in pids for record in records)


def name_launcher(directory: Path) -> None:
    """Workers can tell from now on whether this process, their launcher, lives."""
    me = {"pid": os.getpid(), "start_time": process_start_time(os.getpid())}
    write_json(directory / _LAUNCHER_NAME, me)


def is_orphaned() -> bool:
    """Return whether this process's launcher or torchrun's agent has died without being asked to.

    False without our launcher, and where the launcher was asked to stop the job before it died.
    """
    directory = _launch_dir()
    if directory is None or stop_requested(directory):
        return False
    try:
        launcher = json.loads((directory / _LAUNCHER_NAME).read_text(encoding="utf-8"))
        is_alive = process_alive(int(launcher["pid"]), int(launcher["start_time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return True  # nobody else removes the directory
    return not is_alive or process_start_time(_int_env(AGENT_PID_ENV, 0)) is None


@contextlib.contextmanager
def announcement_lock(directory: Path) -> Iterator[None]:
    """Holds the lock between a signal and a withdrawal, or goes on without it after a second.

    It is held for microseconds; a launcher that was stopped while holding it must not keep a rank
    from ending.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(directory / _LOCK_NAME, flags, 0o600)
    try:
        end = time.monotonic() + _LOCK_WAIT_SECS
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
        yield
    finally:
        os.close(descriptor)  # lets go of the lock


def process_start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None where none lives under the pid."""
    fields = _stat_fields(pid)
    if len(fields) <= _START_TIME_FIELD or fields[_STATE_FIELD] in {"Z", "X", "x"}:
        return None
    return int(fields[_START_TIME_FIELD])


def process_suspended(pid: int) -> bool:
    """Return whether the process was stopped, by SIGSTOP say or a debugger, and waits for more."""
    return _stat_fields(pid)[:1] in (["T"], ["t"])


def _stat_fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command may hold blanks and parentheses: the numbers begin behind the last one.
    return text[text.rfind(")") + 1 :].split()


def process_alive(pid: int, start_time: int) -> bool:
    """Return whether that very process runs: alive, no zombie, and started when it says."""
    return pid > 0 and process_start_time(pid) == start_time


def die_with_parent(signum: signal.Signals) -> None:
    """The kernel sends ``signum`` to this process when its parent's thread ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """The file holds ``value``, whole, for every reader at every instant. Not durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def _launch_dir() -> Path | None:
    name = os.environ.get(LAUNCH_DIR_ENV)
    return Path(name) if name else None


def _record_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.json"


def _read_one(path: Path) -> Announcement | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Announcement(
            rank=int(record["rank"]),
            pid=int(record["pid"]),
            start_time=int(record["start_time"]),
            attempt=int(record["attempt"]),
            local_world_size=int(record["local_world_size"]),
            ready=bool(record["ready"]),
            stopped=bool(record["stopped"]),
            lost_a_peer=bool(record["lost_a_peer"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _int_env(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def _end_with_agent() -> None:
    agent = _int_env(AGENT_PID_ENV, 0)
    if os.getppid() != agent:
        return  # a wrapper stands between: its death isn't the agent's
    die_with_parent(signal.SIGTERM)
    if os.getppid() != agent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
