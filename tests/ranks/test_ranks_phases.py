"""Each rank killed, stopped and made slow in each phase: all end in time, nothing is half there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.storage import lock_holder
from helpers.faulty_ops import Fault
from helpers.reliability import record_fault
from helpers.trainers import Job, check_epochs, final, generations, temporary, train
from helpers.training import Options

#: Long enough for two ranks to find each other on a busy machine.
LIMIT_SECS = 5.0
SLOW_SECS = 0.5
#: What a phase of an attempt does first, on the rank that does it: rank, operation, path.
PHASES: dict[str, tuple[int, str, str]] = {
    "opening the run": (0, "open", "*/.run.json.tmp"),
    "looking for the run, rank 1": (1, "open", "*/run.json"),
    "choosing a point": (0, "open", "*/step_000004/resume_point.json"),
    "choosing a point, rank 1": (1, "open", "*/step_000004/resume_point.json"),
    "loading": (0, "preadv", "*/step_000004/*.shard"),
    "loading, rank 1": (1, "preadv", "*/step_000004/*.shard"),
    "preparing a save": (0, "mkdir", "*/.tmp-step_*"),
    "writing a shard": (0, "pwrite", "*.shard"),
    "writing a shard, rank 1": (1, "pwrite", "*.shard"),
    "syncing a file": (0, "fsync", "*.state"),
    "syncing a file, rank 1": (1, "fsync", "*.state"),
    "syncing the losses": (0, "fdatasync", "*.loss.json"),
    "writing the resume point": (0, "pwrite", "*/.tmp-step_*/resume_point.json"),
    "committing": (0, "rename", "*/.tmp-step_*"),
    "making a commit durable": (0, "fsync", "*/checkpoints"),
    "reading back": (0, "open", "*/step_000008/*.shard"),
    "reading back, rank 1": (1, "open", "*/step_000008/*.shard"),
    "marking a generation verified": (0, "open", "*/step_000008/.verified.json.tmp"),
    "exporting": (0, "rename", "*/.tmp-step_000008.bin-*"),
    "retiring": (0, "rename", "*/step_000004"),
}

#: Behind the commit: a rank that has nothing left to do by then may end well without the other.
BEHIND_COMMIT = {
    *("reading back", "reading back, rank 1", "marking a generation verified"),
    *("exporting", "retiring"),
}


def _options(folder: Path, until: int) -> Options:
    return Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=until,
        every=4,
        settings={"keep_last": 1},
        limit_secs=LIMIT_SECS,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A run of two ranks with a generation of step 4."""
    options = _options(tmp_path_factory.mktemp("base"), 4)
    train(options, ranks=2)
    return options


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Options:
    options = _options(tmp_path_factory.mktemp("unbroken"), 8)
    train(options, ranks=2)
    return options


def _copy(base: Options, folder: Path) -> Options:
    shutil.copytree(base.run_dir, folder / "run")
    shutil.copytree(base.out, folder / "out")
    return replace(base, run_dir=str(folder / "run"), out=str(folder / "out"), until=8)


def _check_points(options: Options) -> None:
    store = GenerationStore(Path(options.run_dir))
    assert store.steps()
    for step in store.steps():
        store.verify(store.manifest(step))


def _strike(options: Options, phase: str, how: str, *, heals: bool) -> str:
    """A rank was struck in a phase, and both ranks ended in time; return what the other did."""
    victim, op, path = PHASES[phase]
    effect: dict[str, Any] = {how: True} if how != "slow" else {"delay_secs": SLOW_SECS}
    with Job(options, ranks=2, faults={victim: [Fault(op, path, **effect)]}) as job:
        other = 1 - victim
        job.wait_until(lambda: job.strikes(victim))
        began = time.monotonic()
        job.wait_until(lambda: job.poll(other) is not None)
        assert time.monotonic() - began < 5 * LIMIT_SECS, f"{phase}: {job.stderr(other)}"
        if how == "slow":
            assert job.wait() == [0, 0]
            told = "goes on"
        elif job.poll(other) == 0:
            assert phase in BEHIND_COMMIT, job.stderr(other)
            told = "the other had nothing left to do and ends well"
        else:
            assert f"rank {victim}" in job.stderr(other).lower(), phase
            assert "dist_ckpt.errors." in job.stderr(other)
            told = "the other ends in time and names it"
        if how == "kill":
            job.wait_until(lambda: job.poll(victim) is not None)
            assert job.poll(victim) == -signal.SIGKILL
        if how == "stop":
            assert job.poll(victim) is None
            if heals:  # it goes on, late and alone
                job.send(signal.SIGCONT, victim)
                assert job.wait(10 * LIMIT_SECS)[victim] in {0, 1}, job.stderr(victim)
    assert lock_holder(Path(options.run_dir) / "run.lock") is None
    return told


def _strike_all(
    plans: list[tuple[str, str, bool]], base: Options, unbroken: Options, folder: Path
) -> None:
    for number, (phase, how, heals) in enumerate(plans):
        options = _copy(base, folder / str(number))
        told = _strike(options, phase, how, heals=heals)
        _check_points(options)
        train(options, ranks=2)
        for rank in range(2):
            assert final(options, rank) == final(unbroken, rank), (phase, how)
        assert generations(options) == [8]
        assert temporary(options) == []
        check_epochs(options, 2)
        name = {"kill": "killed", "stop": "stopped (SIGSTOP)", "slow": "made slow"}[how]
        name += ", continued later" if heals else ""
        record_fault("Ranks", f"{name} while {phase}", 1, told)
        shutil.rmtree(folder / str(number))


def _all_plans() -> list[tuple[str, str, bool]]:
    kinds = [("kill", False), ("stop", False), ("stop", True), ("slow", False)]
    return [(phase, how, heals) for phase in PHASES for how, heals in kinds]


@pytest.mark.timeout(300)
def test_a_rank_killed_stopped_or_slow_in_a_phase_ends_the_other_in_time_and_halves_nothing(
    base: Options, unbroken: Options, tmp_path: Path
) -> None:
    """Case 29: a sample of all phases, one of each kind."""
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    dice = random.Random(seed)
    plans = _all_plans()
    chosen = [dice.choice(plans[kind::4]) for kind in (0, 1, 3)]  # one that is healed costs more
    _strike_all(chosen, base, unbroken, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_rank_killed_stopped_or_slow_in_each_phase_ends_the_other_in_time_and_halves_nothing(
    base: Options, unbroken: Options, tmp_path: Path
) -> None:
    _strike_all(_all_plans(), base, unbroken, tmp_path)
