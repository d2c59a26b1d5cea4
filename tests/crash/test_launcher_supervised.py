"""The launcher under a supervisor: what it passes on in its own name, and its patience."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from dist_ckpt.notify import parse_message
from helpers.faulty_ops import Fault, faults_environment, read_strikes
from helpers.launching import HELPERS, ROOT, Launched
from helpers.trainers import final, generations
from helpers.training import Options

pytestmark = pytest.mark.timeout(400)


class Supervisor:
    """A notify socket as systemd's: it sees the sender's pid, and hears one process only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[tuple[int, dict[str, str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                data, extra, _, _ = self._socket.recvmsg(8192, socket.CMSG_SPACE(12))
            except TimeoutError:
                continue
            pid = struct.unpack("3i", extra[0][2])[0]
            self.heard.append((pid, parse_message(data)))

    def says(self, name: str, value: str | None = None) -> bool:
        """Whether a field was told, with this value."""
        return any(
            name in message and value in {None, message[name]} for _, message in list(self.heard)
        )

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="sv-") as name:  # short: the kernel takes 107 bytes
        supervisor = Supervisor(Path(name) / "notify")
        monkeypatch.setenv("NOTIFY_SOCKET", str(supervisor.path))
        yield supervisor
        supervisor.close()


def test_a_supervisor_hears_the_launcher_alone_and_a_stop_that_moves_bytes_outlasts_the_grace(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 30: a slow writer; the launcher's grace fits the save.

    The life of a unit: READY, `systemctl reload`, `systemctl stop`, as systemd sees it.
    """
    options = Options(
        run_dir=str(tmp_path / "run"),
        out=str(tmp_path / "training"),
        until=100_000,
        every=100_000,
        step_secs=0.01,
        settings={"deadline_secs": 60.0},
    )
    Path(options.out).mkdir()
    # Only the second save is slow: twice the grace, in pieces.
    faults = [
        Fault(op, path, nth=2, delay_secs=1.6)
        for op, path in (("pwrite", "*.shard"), ("pwrite", "*.state"), ("fsync", "*.state"))
    ]
    log = tmp_path / "strikes"
    for name, value in faults_environment(faults, log=log).items():
        monkeypatch.setenv(name, value)
    script = HELPERS / "training.py"
    launched = Launched(tmp_path, "--grace", "2.4", script, json.dumps(asdict(options)))
    try:
        launched.wait_until(lambda: supervisor.says("READY", "1"), "READY")
        assert supervisor.says("STATUS", "training from step 0")
        launched.wait_until(
            lambda: sum("WATCHDOG" in message for _, message in supervisor.heard) > 2, "WATCHDOG"
        )
        subprocess.run(  # ExecReload
            [sys.executable, "-m", "dist_ckpt", "save", options.run_dir],
            cwd=ROOT,
            check=True,
            timeout=60,
            capture_output=True,
        )
        (saved,) = generations(options)
        launched.wait_until(
            lambda: supervisor.says("STATUS", f"last committed: step {saved}"), "STATUS"
        )
        assert not supervisor.says("STOPPING")
        assert not supervisor.says("EXTEND_TIMEOUT_USEC")

        launched.send(signal.SIGTERM)

        assert launched.status() == 0, launched.stderr
    finally:
        launched.close()
    assert len(read_strikes(log)) == 3
    step = final(options)["step"]
    assert generations(options)[-1] == step > saved
    assert "the grace of" not in launched.stderr
    assert supervisor.says("STOPPING", "1")
    assert supervisor.says("EXTEND_TIMEOUT_USEC", "30000000")
    assert supervisor.says("STATUS", f"last committed: step {step}")
    # NotifyAccess=main: whatever another process says isn't heard.
    assert {pid for pid, _ in supervisor.heard} == {launched.process.pid}


def test_a_worker_can_not_speak_of_other_processes_nor_end_the_unit(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from dist_ckpt.notify import send\n"
        "send({'MAINPID': os.getpid(), 'FDSTORE': 1, 'STATUS': 'here'}, wait_secs=5)\n"
        "send({'MAINPID': os.getpid()}, wait_secs=5)\n"
        "send({'STOPPING': 1}, wait_secs=5)\n"  # to be started again, say, by torchrun
        "print(os.environ['NOTIFY_SOCKET'])\n"
    )
    launched = Launched(tmp_path, script)
    try:
        assert launched.status() == 0, launched.stderr
        assert launched.process.stdout is not None
        theirs = launched.process.stdout.read().decode().strip()
    finally:
        launched.close()
    assert theirs != str(supervisor.path)
    assert not os.path.exists(theirs)
    assert [message for _, message in supervisor.heard] == [{"STATUS": "here"}]
