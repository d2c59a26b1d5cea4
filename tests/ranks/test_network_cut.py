"""Two ranks on two hosts, made of network namespaces: the network between is cut and healed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.storage import lock_holder
from helpers.reliability import record_fault
from helpers.trainers import Job, check_epochs, final, generations, temporary, train
from helpers.training import Options

LIMIT_SECS = 3.0


@dataclass(frozen=True)
class Hosts:
    """Two hosts on one switch; this machine's own namespace is on it too, and hosts the store."""

    name: str
    subnet: str

    def network(self, rank: int) -> str:
        """Return the path of a rank's host."""
        return f"/run/netns/{self.name}{rank}"

    @property
    def here(self) -> str:
        """The address of this machine's own namespace."""
        return f"{self.subnet}.254"

    def cut(self, rank: int) -> None:
        """Whatever is sent to or from a rank's host vanishes, without a word."""
        _ip("link", "set", f"{self.name}p{rank}", "nomaster")

    def heal(self, rank: int) -> None:
        """It arrives again."""
        _ip("link", "set", f"{self.name}p{rank}", "master", f"{self.name}sw")


def _ip(*arguments: str) -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2")
    command = ["/usr/bin/env", "ip", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs the right to make networks: ip {' '.join(arguments)}: {done.stderr}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    pid = os.getpid()
    hosts = Hosts(f"dc{pid % 100_000}", f"10.{200 + pid % 50}.{pid // 50 % 250}")
    name = hosts.name
    with contextlib.ExitStack() as undo:

        def remove(*arguments: str) -> None:
            command = ["/usr/bin/env", "ip", *arguments]
            undo.callback(subprocess.run, command, check=False, capture_output=True)

        remove("link", "del", f"{name}sw")
        _ip("link", "add", f"{name}sw", "type", "bridge")
        _ip("addr", "add", f"{hosts.here}/24", "dev", f"{name}sw")
        _ip("link", "set", f"{name}sw", "up")
        for rank in range(2):
            remove("netns", "del", f"{name}{rank}")
            _ip("netns", "add", f"{name}{rank}")
            inside = ("-n", f"{name}{rank}")
            peer = ("peer", "name", "eth9", "netns", f"{name}{rank}")
            _ip("link", "add", f"{name}p{rank}", "type", "veth", *peer)
            _ip(*inside, "addr", "add", f"{hosts.subnet}.{rank + 1}/24", "dev", "eth9")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", "eth9", "up")
            _ip("link", "set", f"{name}p{rank}", "master", f"{name}sw")
            _ip("link", "set", f"{name}p{rank}", "up")
        yield hosts


def _job(options: Options, hosts: Hosts) -> Job:
    networks = {rank: hosts.network(rank) for rank in range(2)}
    env = {"GLOO_SOCKET_IFNAME": "eth9"}
    return Job(options, ranks=2, env=env, networks=networks, host=hosts.here)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_network_that_is_cut_for_a_moment_is_sat_out_and_one_that_stays_cut_ends_both_in_time(
    lost: int, hosts: Hosts, tmp_path: Path
) -> None:
    """Case 29: nothing is committed by half, and it goes on when the network is back."""
    options = Options(
        run_dir=str(tmp_path / "run"),
        out=str(tmp_path / "out"),
        until=100_000,
        every=5,
        step_secs=0.01,
        limit_secs=LIMIT_SECS,
    )
    with _job(options, hosts) as job:
        job.wait_until(lambda: min(job.step(0), job.step(1)) >= 7)
        hosts.cut(lost)
        time.sleep(0.5)  # nobody is in a body any more …
        stood = max(job.step(0), job.step(1))
        time.sleep(0.5)
        assert max(job.step(0), job.step(1)) == stood, "the network wasn't cut"
        hosts.heal(lost)
        job.wait_until(lambda: min(job.step(0), job.step(1)) > stood + 20)
        hosts.cut(lost)
        began = time.monotonic()
        assert job.wait(8 * LIMIT_SECS) == [1, 1]
        print(f"cut for {time.monotonic() - began:.1f} s with a limit of {LIMIT_SECS} s")
        for rank in range(2):
            assert "Error" in job.stderr(rank)
    hosts.heal(lost)
    assert lock_holder(Path(options.run_dir) / "run.lock") is None
    store = GenerationStore(Path(options.run_dir))
    steps = store.steps()
    assert steps
    for step in steps:
        store.verify(store.manifest(step))
    again = replace(options, until=steps[-1] + 12)
    with _job(again, hosts) as job:
        assert job.wait() == [0, 0], job.stderr()
    assert generations(again)[-1] == steps[-1] + 12
    assert temporary(again) == []
    check_epochs(again, 2)
    quiet = replace(again, run_dir=str(tmp_path / "quiet"), out=str(tmp_path / "out2"))
    train(replace(quiet, step_secs=0.0), ranks=2)
    assert final(again) == final(quiet)
    record_fault("Network", f"between two hosts, rank {lost}'s cut for 1 s", 1, "sat out")
    record_fault("Network", f"between two hosts, rank {lost}'s cut for good", 1, "both end in time")
