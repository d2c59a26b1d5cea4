"""SIGUSR1 to real processes: a point is written, and training goes on as if nothing was."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.history import read_journal
from helpers.trainers import Job, consumed, final, generations, train
from helpers.training import Options


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=40,
        every=1000,
        step_secs=0.005,
        settings={"keep_last": None},
    )
    return replace(options, **changes)


def _answers(options: Options) -> list[int]:
    """Return the steps of the points that answered a SIGUSR1, each of them there."""
    steps = [
        item["step"]
        for item in read_journal(options.run_dir)
        if item["event"] == "signal" and "SIGUSR1" in item["signals"]
    ]
    assert set(steps) <= set(generations(options))
    return steps


def _bombard(options: Options, ranks: int, num_signals: int, pause_secs: float) -> None:
    """Each arrival is followed by a point of the step in flight, or at most of the one after."""
    seed = time.time_ns() % 10**9
    print(f"seed {seed}")
    dice = random.Random(seed)
    arrivals = []
    with Job(options, ranks=ranks) as job:
        job.wait_for_step(1)
        for _ in range(num_signals):
            time.sleep(dice.uniform(0.0, pause_secs))
            rank = dice.randrange(ranks)
            before = job.step(rank)
            job.send(signal.SIGUSR1, rank)
            arrivals.append((before, job.step(rank)))
        last = job.step()
        job.wait_for_step(last + 2)
        job.send(signal.SIGTERM)
        assert job.wait() == [0] * ranks, job.stderr()
    answers = sorted(set(_answers(options)))
    for before, after in arrivals:
        assert any(before <= step <= after + 1 for step in answers), (before, after, answers)
    # Nobody is answered twice: no more points than signals.
    assert len(answers) <= num_signals


def test_sigusr1_writes_a_point_and_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    """Requirement A7."""
    quiet = _options(tmp_path / "quiet", step_secs=0.0)
    train(quiet)
    options = _options(tmp_path / "asked")
    with Job(options) as job:
        job.wait_for_step(5)
        job.send(signal.SIGUSR1)
        assert job.wait() == [0]
    (answer,) = _answers(options)
    assert 5 <= answer < 40
    assert generations(options) == [answer, 40]
    assert (Path(options.run_dir) / f"step_{answer:06d}.bin").exists()
    assert final(options) == final(quiet)
    assert consumed(options) == consumed(quiet)


def test_200_sigusr1_at_random_instants_neither_hang_nor_lose_one(tmp_path: Path) -> None:
    """Case 28: all answered, none twice."""
    options = _options(tmp_path, until=10**6, step_secs=0.003)
    _bombard(options, 1, 200, 0.02)


def test_sigusr1_to_either_of_two_ranks_is_answered_by_both(tmp_path: Path) -> None:
    """Case 28, with agreement."""
    options = _options(tmp_path, until=10**6, step_secs=0.003)
    _bombard(options, 2, 40, 0.03)


def test_an_aligned_sigusr1_is_answered_at_the_next_multiple_of_every(tmp_path: Path) -> None:
    """Requirement A8."""
    settings = {"keep_last": None, "sigusr1": "boundary"}
    options = _options(tmp_path, every=10, settings=settings)
    with Job(options) as job:
        job.wait_for_step(12)
        job.send(signal.SIGUSR1)
        assert job.step() < 20
        assert job.wait() == [0]
    assert _answers(options) == [20]
    assert generations(options) == [10, 20, 30, 40]


def test_an_aligned_sigusr1_and_a_stop_before_the_multiple_are_one_point(tmp_path: Path) -> None:
    settings = {"keep_last": None, "sigusr1": "boundary"}
    options = _options(tmp_path, every=1000, settings=settings, until=10_000)
    with Job(options) as job:
        job.wait_for_step(3)
        job.send(signal.SIGUSR1)
        job.wait_for_step(6)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
    assert generations(options) == [final(options)["step"]]


@pytest.mark.parametrize("export", ["signal", "never"])
def test_a_bin_is_made_for_signals_only_or_never(export: str, tmp_path: Path) -> None:
    settings = {"keep_last": None, "export": export}
    options = _options(tmp_path, every=10, until=30, settings=settings)
    with Job(options) as job:
        job.wait_for_step(12)
        job.send(signal.SIGUSR1)
        assert job.wait() == [0]
    names = sorted(path.name for path in Path(options.run_dir).glob("step_*.bin"))
    (answer,) = _answers(options)
    assert names == ([f"step_{answer:06d}.bin"] if export == "signal" else [])
