"""SIGTERM and SIGINT, to real processes at any instant: a committed point, and the right status."""

from __future__ import annotations

import random
import signal
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.faulty_ops import Fault
from helpers.trainers import Job, check_epochs, final, generations, temporary, train
from helpers.training import Options


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=10_000,
        every=7,
        step_secs=0.01,
        settings={"deadline_secs": 60.0},
    )
    return replace(options, **changes)


def _steps_of(options: Options, event: str) -> list[int]:
    return [item["step"] for item in read_journal(options.run_dir) if item["event"] == event]


def _check_point(options: Options, step: int) -> None:
    """There is a verified generation of the step, and its .bin is what the program held."""
    store = GenerationStore(Path(options.run_dir))
    assert store.steps()[-1] == step
    store.verify(store.manifest(step))
    assert store.verified_at(step) is not None
    data = store.bin_path(step).read_bytes()
    live = (Path(options.out) / "live.0.bin").read_bytes()
    assert data == struct.pack("<ii", step, len(live) // 12) + live
    assert temporary(options) == []


def test_sigterm_at_random_instants_leaves_a_verified_point_of_the_step_in_flight(
    tmp_path: Path,
) -> None:
    """Requirement A6: status 0, nothing lost beyond the step in flight."""
    seed = time.time_ns() % 10**9
    print(f"seed {seed}")
    dice = random.Random(seed)
    options = _options(tmp_path)
    for _ in range(8):
        with Job(options) as job:
            job.wait_for_step(0)
            job.wait_for_step(job.step() + dice.randint(0, 12))
            time.sleep(dice.uniform(0.0, 0.02))
            before = job.step()
            job.send(signal.SIGTERM)
            after = job.step()
            assert job.wait() == [0], job.stderr()
            assert job.lines()[-1] == "left"
            assert f"stopped at step {final(options)['step']} by SIGTERM" in job.stderr()
        assert final(options)["stopped"] == "SIGTERM"
        assert before <= final(options)["step"] <= after + 1
        _check_point(options, final(options)["step"])
    check_epochs(options)


@pytest.mark.parametrize("signalled", [0, 1])
def test_ranks_of_which_one_has_sigterm_stop_at_the_same_step(
    signalled: int, tmp_path: Path
) -> None:
    """Case 27: skewed ranks, one signalled; the agreed boundary, and a bounded finish."""
    options = _options(tmp_path)
    for number in (3, 10):
        with Job(options, ranks=2) as job:
            job.wait_for_step(number, rank=signalled)
            job.send(signal.SIGTERM, signalled)
            assert job.wait(20.0) == [0, 0], job.stderr()
        ends = [final(options, rank) for rank in range(2)]
        assert ends[0]["step"] == ends[1]["step"] >= number
        assert [end["stopped"] for end in ends] == ["SIGTERM", "SIGTERM"]
        assert ends[0]["draws"] != ends[1]["draws"]
        _check_point(options, ends[0]["step"])
    check_epochs(options, 2)


def test_sigterm_during_a_save_waits_for_it_and_saves_the_step_in_flight(tmp_path: Path) -> None:
    options = _options(tmp_path)
    slow = Fault("pwrite", "*.shard", delay_secs=0.3)
    with Job(options, faults={0: [slow]}) as job:
        job.wait_until(job.strikes)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
    assert _steps_of(options, "saved")[0] == 7
    _check_point(options, final(options)["step"])


def test_sigterm_before_the_first_step_leaves_a_point_of_step_0(tmp_path: Path) -> None:
    options = _options(tmp_path)
    slow_start = Fault("open", "*.loss.json", delay_secs=0.3)
    with Job(options, faults={0: [slow_start]}) as job:
        job.wait_until(job.strikes)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
    assert final(options)["stopped"] == "SIGTERM"
    assert final(options)["step"] == 0
    _check_point(options, 0)
    train(replace(options, until=5, step_secs=0.0))
    assert _steps_of(options, "resumed") == [0]
    check_epochs(options)


def test_sigterm_during_resume_ends_at_the_step_that_was_resumed(tmp_path: Path) -> None:
    options = _options(tmp_path, until=5, step_secs=0.0)
    train(options)
    slow_read = Fault("preadv", "*.shard", delay_secs=0.3)
    with Job(replace(options, until=50), faults={0: [slow_read]}) as job:
        job.wait_until(job.strikes)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
    assert final(options)["stopped"] == "SIGTERM"
    assert final(options)["step"] == 5
    assert _steps_of(options, "saved") == [5]
    assert _steps_of(options, "already_saved") == [5]
    _check_point(options, 5)


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    options = _options(tmp_path)
    slow = Fault("pwrite", "*.shard", times=None, delay_secs=0.2)
    with Job(options, faults={0: [slow]}) as job:
        job.wait_for_step(3)
        job.send(signal.SIGTERM)
        job.wait_until(lambda: job.strikes() or job.poll() is not None)
        for _ in range(2):  # while the save that answers the first is being written
            assert job.poll() is None
            job.send(signal.SIGTERM)
            time.sleep(0.05)
        assert job.wait() == [0]
        assert job.strikes()
    (answer,) = [item for item in read_journal(options.run_dir) if item["event"] == "signal"]
    assert answer["signals"] == ["SIGTERM"]
    assert _steps_of(options, "saved") == [final(options)["step"]]
    _check_point(options, final(options)["step"])


def test_sigint_stops_as_sigterm_does(tmp_path: Path) -> None:
    options = _options(tmp_path)
    with Job(options) as job:
        job.wait_for_step(3)
        job.send(signal.SIGINT)
        assert job.wait() == [0]
    assert final(options)["stopped"] == "SIGINT"
    _check_point(options, final(options)["step"])


def test_a_second_sigint_leaves_at_once(tmp_path: Path) -> None:
    options = _options(tmp_path)
    stuck = Fault("pwrite", "*.shard", nth=2, delay_secs=60.0)
    with Job(options, faults={0: [stuck]}, fresh=True) as job:
        job.wait_until(job.strikes)
        job.send(signal.SIGINT)
        time.sleep(0.1)
        assert job.poll() is None
        began = time.monotonic()
        job.send(signal.SIGINT)
        assert job.wait() == [-signal.SIGINT]
        assert time.monotonic() - began < 5
        assert "KeyboardInterrupt" in job.stderr()
    assert generations(options) == [7]
    assert len(temporary(options)) == 1
    train(replace(options, until=20, step_secs=0.0))
    assert temporary(options) == []


def test_a_stop_ends_with_the_status_that_a_scheduler_requeues_on(tmp_path: Path) -> None:
    """Case 56: 75 after a stop, 0 at the end of the training."""
    settings = {"deadline_secs": 60.0, "stop_exit_code": 75}
    options = _options(tmp_path, settings=settings)
    with Job(options) as job:
        job.wait_for_step(3)
        job.send(signal.SIGTERM)
        assert job.wait() == [75], job.stderr()
    _check_point(options, final(options)["step"])
    train(replace(options, until=final(options)["step"] + 3))
    assert final(options)["stopped"] is None


@pytest.mark.parametrize("settings", [{}, {"stop_exit_code": 75}])
def test_a_stop_whose_save_failed_ends_with_status_1_whatever_the_stop_code(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Case 44: the exit status tells."""
    options = _options(tmp_path, settings=settings)
    full = Fault("pwrite", "*.shard", nth=2, times=None, error="ENOSPC")
    with Job(options, faults={0: [full]}) as job:
        job.wait_for_step(9)
        job.send(signal.SIGTERM)
        assert job.wait() == [1]
        assert job.strikes()
        assert "was not saved" in job.stderr()
    assert generations(options) == [7]
    assert _steps_of(options, "attempt_failed") == [_steps_of(options, "signal")[0]]


def test_a_deadline_too_short_for_reading_back_leaves_that_to_the_next_start(
    tmp_path: Path,
) -> None:
    options = _options(tmp_path, settings={"deadline_secs": 0.15})
    slow = Fault("pwrite", "*.shard", delay_secs=0.3)
    with Job(options, faults={0: [slow]}) as job:
        job.wait_for_step(3)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
        assert len(job.strikes()) == 1, "the save wasn't slower than the deadline"
    step = final(options)["step"]
    store = GenerationStore(Path(options.run_dir))
    assert store.steps() == [step]
    store.verify(store.manifest(step))
    assert store.verified_at(step) is None
    assert not store.bin_path(step).exists()
    train(replace(options, until=step, settings={}))
    assert final(options)["step"] == step
    _check_point(options, step)
