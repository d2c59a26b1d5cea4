"""Starts the launcher as a person does and looks at what its processes do, from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).resolve().parent
WORKER = HELPERS / "launched_worker.py"
PLAIN_SCRIPT = HELPERS / "plain_script.py"
START_SECS = 150.0  # torch is imported by agent and workers, on cores that a soak keeps busy


class Launched:
    """``launch/torchrun.py`` with these arguments, as a process in a session of its own.

    Args:
        tmp_path: An empty directory; event logs go to ``out``. Temporary files (the launch's
            directory) go to ``tmp``, elsewhere: the name of a socket may be 107 bytes long.
        args: The launcher's command line.
    """

    def __init__(self, tmp_path: Path, *args: str | Path) -> None:
        self.out = tmp_path / "out"
        self.out.mkdir(exist_ok=True)
        self.tmp = Path(tempfile.mkdtemp(prefix="launched-"))
        self.stderr_path = tmp_path / "stderr"
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.tmp),
        }
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch" / "torchrun.py"), *map(str, args)],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        """Everything that launcher, agent and workers wrote to stderr so far."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def events(self, rank: int) -> list[str]:
        """Return the events of a rank, oldest first: ``attempt event``."""
        path = self.out / f"rank_{rank}.log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def count(self, rank: int, event: str) -> int:
        """Return how often a rank noted an event, in any attempt."""
        return sum(event in line for line in self.events(rank))

    def value(self, rank: int, name: str) -> str:
        """Return the newest value that a rank noted under a name (``pid``, ``launch``)."""
        found = [line.split()[2] for line in self.events(rank) if line.split()[1] == name]
        return found[-1]

    def wait_for_handlers(self) -> None:
        """The launcher itself handles signals: its directory is there."""
        self.wait_until(lambda: any(self.tmp.glob("dist-ckpt-launch-*")), "launcher is up")

    def wait_for(self, event: str, ranks: tuple[int, ...] = (0, 1), times: int = 1) -> None:
        """Each of the ranks has noted an event."""
        self.wait_until(lambda: all(self.count(rank, event) >= times for rank in ranks), event)

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, after_launcher: bool = False
    ) -> None:
        """The condition holds; fails with the launcher's stderr when it doesn't in time."""
        end = time.monotonic() + START_SECS
        while not condition():
            status = self.process.poll()
            dead = status is not None and not after_launcher and not condition()
            if time.monotonic() > end or dead:
                logs = [self.events(rank) for rank in (0, 1)]
                message = f"{what}: not seen (launcher {status}); {logs}\n{self.stderr}"
                raise AssertionError(f"{message}\n{self._tree()}")
            time.sleep(0.02)

    def _tree(self) -> str:
        """What the launch's processes are at, to tell a hang from a slow machine."""
        lines = []
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = process.cpu_times()
                    age = time.time() - process.create_time()
                    command = " ".join(process.cmdline()[:6])
                    state = f"{process.status()}, {used.user + used.system:.1f} of {age:.0f} s"
                    lines.append(f"{process.pid} ({state}) {command}")
        return "\n".join(lines)

    def send(self, signum: signal.Signals) -> None:
        """The launcher, and nobody else, has the signal."""
        self.process.send_signal(signum)

    def status(self, timeout_secs: float = START_SECS) -> int:
        """Return the launcher's exit status, waiting for its end."""
        return self.process.wait(timeout_secs)

    def agent_pid(self) -> int:
        """Return the pid of torchrun's agent, the parent of the workers."""
        stat = Path(f"/proc/{self.value(0, 'pid')}/stat").read_text(encoding="utf-8")
        return int(stat.rpartition(")")[2].split()[1])

    def wait_until_gone(self, launch_id: str, timeout_secs: float) -> None:
        """No process carries the launch's id in its environment any more."""
        end = time.monotonic() + timeout_secs
        while carriers := processes_of(launch_id):
            if time.monotonic() > end:
                message = f"left over after {timeout_secs} s: {carriers}\n{self.stderr}"
                raise AssertionError(message)
            time.sleep(0.05)

    def close(self) -> None:
        """Whatever a failed test left is killed, by pid."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for rank in range(8):
            for line in self.events(rank):
                if " launch " in line:
                    for pid in processes_of(line.split()[2]):
                        os.kill(pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.tmp, ignore_errors=True)


def processes_of(launch_id: str) -> dict[int, str]:
    """Return pid and command line of each living process that carries a launch's id."""
    wanted = f"DIST_CKPT_LAUNCH_ID={launch_id}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found
