"""SIGKILL of launcher and agent: the workers get SIGTERM, write, and no process is left over."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from helpers.launching import WORKER, Launched, processes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)

GONE_SECS = 20.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launched]:
    """Two ranks with a child each, all with handlers, whose last save takes half a second."""
    job = Launched(
        tmp_path,
        *("--nproc-per-node=2", WORKER, "--out", tmp_path / "out"),
        *("--save-secs", "0.5", "--child"),
    )
    try:
        job.wait_for("ready")
        yield job
    finally:
        job.close()


def _assert_all_wrote(job: Launched) -> None:
    for rank in (0, 1):
        assert job.count(rank, "got SIGTERM") >= 1
        assert job.count(rank, "saved") == 1
        assert job.count(rank, "end") == 1


def test_a_killed_launcher_leaves_no_process_and_the_workers_write_first(job: Launched) -> None:
    launch_id = job.value(0, "launch")
    assert len(processes_of(launch_id)) == 5  # agent, two workers, a child each
    job.send(signal.SIGKILL)
    assert job.status() == -signal.SIGKILL

    job.wait_until_gone(launch_id, GONE_SECS)

    _assert_all_wrote(job)
    assert list(job.tmp.glob("dist-ckpt-launch-*")) == []


def test_a_killed_agent_leaves_no_process_and_the_launcher_says_so(job: Launched) -> None:
    launch_id = job.value(0, "launch")
    os.kill(job.agent_pid(), signal.SIGKILL)

    assert job.status() == 128 + signal.SIGKILL, job.stderr

    assert "agent was killed (SIGKILL)" in job.stderr
    _assert_all_wrote(job)
    assert processes_of(launch_id) == {}
    assert list(job.tmp.glob("dist-ckpt-launch-*")) == []


def test_workers_write_and_end_when_launcher_and_agent_are_killed_together(job: Launched) -> None:
    launch_id, agent_pid = job.value(0, "launch"), job.agent_pid()
    job.send(signal.SIGSTOP)  # so that neither of the two can do anything for the other
    os.kill(agent_pid, signal.SIGKILL)
    job.send(signal.SIGKILL)
    assert job.status() == -signal.SIGKILL
    workers = {int(job.value(rank, "pid")) for rank in (0, 1)}

    job.wait_until(
        lambda: not workers & processes_of(launch_id).keys(), "workers end", after_launcher=True
    )

    _assert_all_wrote(job)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_job_with_a_message_and_no_process(
    rank: int, job: Launched
) -> None:
    launch_id = job.value(0, "launch")
    os.kill(int(job.value(rank, "pid")), signal.SIGKILL)

    assert job.status() == 1, job.stderr

    assert f"rank {rank}: killed by SIGKILL" in job.stderr
    assert processes_of(launch_id) == {}
    assert list(job.tmp.glob("dist-ckpt-launch-*")) == []


def test_sigterm_to_every_process_at_once_still_ends_with_0(job: Launched) -> None:
    # A supervisor may signal a whole control group: the agent, which then ends with an error, too.
    launch_id = job.value(0, "launch")
    for pid in (job.process.pid, *processes_of(launch_id)):
        os.kill(pid, signal.SIGTERM)

    assert job.status() == 0, job.stderr

    _assert_all_wrote(job)
    assert processes_of(launch_id) == {}
