"""The launcher's signals: who gets which, and when. Real torchrun, real processes."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from helpers.launching import PLAIN_SCRIPT, WORKER, Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start launchers whose remains are gone after the test."""
    started: list[Launched] = []

    def make(*args: str | Path) -> Launched:
        started.append(Launched(tmp_path, *args))
        return started[-1]

    yield make
    for one in started:
        one.close()


def test_sigusr1_reaches_rank_0_alone_also_before_it_has_handlers_and_sigterm_ends_all_with_0(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start("--nproc-per-node=2", WORKER, "--out", tmp_path / "out", "--gloo")
    job.wait_for_handlers()
    assert job.events(0) == []
    job.send(signal.SIGUSR1)  # no worker yet: torchrun would die of it
    job.wait_for("saved")
    job.send(signal.SIGUSR1)
    job.wait_for("saved", times=2)
    assert job.count(0, "got SIGUSR1") == 2
    assert job.count(1, "got") == 0
    launch_id = job.value(0, "launch")

    job.send(signal.SIGTERM)

    assert job.status() == 0, job.stderr
    assert job.count(0, "got SIGTERM") == 1
    assert job.count(1, "got SIGTERM") == 1
    stops = [[line for line in job.events(rank) if "stopping" in line] for rank in (0, 1)]
    assert stops[0] == stops[1]
    assert len(stops[0]) == 1
    assert [job.count(rank, "end") for rank in (0, 1)] == [1, 1]
    job.wait_until_gone(launch_id, 1.0)
    assert list(job.tmp.glob("dist-ckpt-launch-*")) == []


def test_sigterm_before_any_handlers_is_held_back_and_options_behind_a_module_are_its_own(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(
        *("--nproc_per_node", "2", "--grace=60", "-m", "tests.helpers.launched_worker"),
        *("--out", tmp_path / "out", "--announce-delay", "0.5", "--grace", "script's"),
    )
    job.wait_for_handlers()
    job.send(signal.SIGTERM)

    assert job.status() == 0, job.stderr
    assert "held back" in job.stderr
    for rank in (0, 1):
        events = job.events(rank)
        assert events.index("0 ready") < events.index("0 got SIGTERM") < events.index("0 end")
        assert "0 world 2 grace script's" in events


def test_ctrl_c_in_a_terminal_reaches_each_worker_once_and_a_second_one_ends_everything_at_once(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(
        *("--nproc-per-node=2", WORKER, "--out", tmp_path / "out"),
        *("--save-secs", "60", "--child"),
    )
    job.wait_for("ready")
    os.killpg(job.process.pid, signal.SIGINT)  # a terminal signals the whole foreground group
    job.wait_for("stopping")
    assert [job.count(rank, "got SIGINT") for rank in (0, 1)] == [1, 1]
    assert job.process.poll() is None
    launch_id = job.value(0, "launch")

    os.killpg(job.process.pid, signal.SIGINT)
    asked = time.monotonic()

    assert job.status() == 130, job.stderr
    assert time.monotonic() - asked < 10
    assert [job.count(rank, "got SIGINT") for rank in (0, 1)] == [2, 2]
    job.wait_until_gone(launch_id, 1.0)


def test_after_a_restart_signals_reach_the_new_attempt(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(
        *("--nproc-per-node=2", "--max-restarts=1", WORKER, "--out", tmp_path / "out"),
        *("--fail-at", "5", "--fail-rank", "0"),
    )
    job.wait_for("1 ready")
    assert job.count(0, "0 fails") == 1
    job.send(signal.SIGUSR1)
    job.wait_for("1 saved", ranks=(0,))
    job.send(signal.SIGTERM)

    assert job.status() == 0, job.stderr
    assert job.count(0, "1 got SIGUSR1") == 1
    assert job.count(1, "got SIGUSR1") == 0
    assert [job.count(rank, "1 end") for rank in (0, 1)] == [1, 1]


def test_a_script_without_dist_ckpt_is_ended_through_torchrun(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start("--announce-wait=0.5", PLAIN_SCRIPT, tmp_path / "out")
    job.wait_for("launch", ranks=(0,))
    job.send(signal.SIGUSR1)
    job.send(signal.SIGTERM)

    assert job.status() == 128 + signal.SIGTERM, job.stderr
    assert "no worker handled signals within 0.5 s" in job.stderr
    assert "SIGUSR1 reached nobody" in job.stderr
    job.wait_until_gone(job.value(0, "launch"), 1.0)


def test_a_job_that_ignores_the_stop_is_killed_after_the_grace(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(
        *("--nproc-per-node=2", "--grace", "1", WORKER, "--out", tmp_path / "out", "--deaf"),
    )
    job.wait_for("ready")
    job.send(signal.SIGTERM)
    job.send(signal.SIGTERM)  # a repeated one changes nothing

    assert job.status() != 0
    assert "the grace of 1 s is over" in job.stderr
    assert job.count(0, "got SIGTERM") >= 1
    assert job.count(0, "end") == 0
    job.wait_until_gone(job.value(0, "launch"), 1.0)
