"""Commands of a run's life, crashed before each change that they make to the disk, and run again.

Whatever the instant: no generation is lost, each that has its name is whole, and the same command
run again leaves what one that nothing disturbed leaves.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.cli._keep import pin, prune
from dist_ckpt.cli._life import fork, rewind, undelete
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_history, read_journal
from dist_ckpt.storage import use_ops
from helpers.crashing import UnsyncedOps, crash
from helpers.run_dirs import call, ended_run, killed_run
from helpers.trainers import ROOT

every_instant = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])


def _state(run_dir: Path) -> dict[str, Any]:
    """Return what a run is: generations, archive, .bin files, what its history says."""
    store = GenerationStore(run_dir)
    history = read_history(run_dir)
    return {
        "steps": store.steps(),
        "pins": dict(store.pins()),
        "archived": store.archived(),
        "bins": sorted(path.name for path in run_dir.glob("step_*")),
        "archived_bins": sorted(path.name for path in (run_dir / "archive").rglob("step_*.bin*")),
        "loss": history.loss,
        "metrics": history.metrics,
        "samples": history.samples,
    }


def _check_nothing_is_lost(run_dir: Path, steps: set[int]) -> None:
    store = GenerationStore(run_dir)
    for step in store.steps():
        store.verify(store.manifest(step))
    assert {*store.steps(), *(step for _, step in store.archived())} >= steps


def _crash_everywhere(
    tmp_path: Path,
    make: Callable[[Path], Path],
    command: Callable[[Path], object],
    *,
    keeps: set[int],
    result: Callable[[Path], Any],
    stride: int,
) -> int:
    """Crash a command before every so many-th of its changes, run it again and compare.

    Returns:
        How many changes it makes, rounded up.
    """
    with use_ops(UnsyncedOps()):
        whole = make(tmp_path / "whole")
        command(whole)
        expected = result(whole)
        for nth in itertools.count(step=stride):
            run_dir = make(tmp_path / str(nth))
            struck = crash(nth, functools.partial(command, run_dir))
            _check_nothing_is_lost(run_dir, keeps)
            command(run_dir)
            assert result(run_dir) == expected, f"after {struck}"
            if struck is None:
                return nth
    raise AssertionError("never reached")


def _sampled(folder: Path) -> Path:
    """A run killed after step 14, with samples of steps 4, 8 and 12."""
    run_dir = killed_run(folder)
    samples = [{"step": step, "loss": 1.0, "text": f"of {step}"} for step in (4, 8, 12)]
    (run_dir / f"{run_dir.name}.samples.json").write_text(json.dumps(samples))
    return run_dir


def _rewound(folder: Path) -> Path:
    run_dir = _sampled(folder)
    pin(f"{run_dir}@12")
    rewind(f"{run_dir}@4")
    return run_dir


@every_instant
def test_a_rewind_that_crashes_at_any_instant_is_ended_by_the_next_call(
    tmp_path: Path, stride: int
) -> None:
    def result(run_dir: Path) -> Any:
        # A home that nothing was moved to yet may be left, and a second mark.
        state = _state(run_dir)
        assert state["steps"] == [4]
        assert [step for step, _ in state["loss"]] == [1, 2, 3, 4]
        assert [sample["step"] for sample in state["samples"]] == [4]
        (samples,) = (run_dir / "archive" / "rewind_to_000004").glob("*.samples.json")
        assert [sample["step"] for sample in json.loads(samples.read_text())] == [8, 12]
        return state

    count = _crash_everywhere(
        tmp_path,
        _sampled,
        lambda run_dir: rewind(f"{run_dir}@4"),
        keeps={4, 8, 12},
        result=result,
        stride=stride,
    )
    assert count > 30


@every_instant
def test_an_undelete_that_crashes_at_any_instant_is_ended_by_the_next_call(
    tmp_path: Path, stride: int
) -> None:
    def command(run_dir: Path) -> None:
        if GenerationStore(run_dir).archived():  # what is back already needs no second call
            undelete(str(run_dir), "rewind_to_000004")

    def result(run_dir: Path) -> Any:
        state = _state(run_dir)
        assert state["steps"] == [4, 8, 12]
        assert [step for step, _ in state["loss"]] == list(range(1, 13))
        return state

    count = _crash_everywhere(
        tmp_path, _rewound, command, keeps={4, 8, 12}, result=result, stride=stride
    )
    assert count > 20


@every_instant
def test_a_fork_that_crashes_at_any_instant_is_there_whole_or_not_at_all(
    tmp_path: Path, stride: int
) -> None:
    def target(run_dir: Path) -> Path:
        return run_dir.with_name("branch")

    def result(run_dir: Path) -> Any:
        assert _state(run_dir)["steps"] == [4, 8, 12]
        assert sorted(path.name for path in run_dir.parent.iterdir()) == ["branch", run_dir.name]
        first, *_ = read_journal(target(run_dir))
        assert (first["event"], first["step"]) == ("forked", 8)
        store = GenerationStore(target(run_dir))
        store.verify(store.manifest(8))
        return _state(target(run_dir))

    count = _crash_everywhere(
        tmp_path,
        _sampled,
        lambda run_dir: fork(f"{run_dir}@8", str(target(run_dir))),
        keeps={4, 8, 12},
        result=result,
        stride=stride,
    )
    assert count > 30


@every_instant
def test_a_prune_that_crashes_at_any_instant_removes_nothing_that_it_keeps(
    tmp_path: Path, stride: int
) -> None:
    def make(folder: Path) -> Path:
        run_dir = ended_run(folder)
        pin(f"{run_dir}@4", reason="the start")
        return run_dir

    count = _crash_everywhere(
        tmp_path,
        make,
        lambda run_dir: prune(str(run_dir), keep_last="1", keep_bins="1"),
        keeps={4, 12},
        result=lambda run_dir: {**_state(run_dir), "names": os.listdir(run_dir / "checkpoints")},
        stride=stride,
    )
    assert count > 10


@every_instant
def test_a_pin_that_crashes_at_any_instant_loses_no_other(tmp_path: Path, stride: int) -> None:
    def make(folder: Path) -> Path:
        run_dir = ended_run(folder)
        pin(f"{run_dir}@4", reason="the start")
        return run_dir

    _crash_everywhere(
        tmp_path,
        make,
        lambda run_dir: pin(f"{run_dir}@8", reason="the best"),
        keeps={4, 8, 12},
        result=lambda run_dir: dict(GenerationStore(run_dir).pins()),
        stride=stride,
    )


@pytest.mark.slow
def test_commands_that_are_really_killed_are_ended_by_the_next_call(tmp_path: Path) -> None:
    """SIGKILL after a random time, 20 times; the imitation above isn't believed alone."""
    for number in range(20):
        run_dir = _sampled(tmp_path / str(number))
        for command in (
            ["fork", f"{run_dir}@8", run_dir.with_name("b")],
            ["rewind", f"{run_dir}@4"],
        ):
            child = subprocess.Popen(
                [sys.executable, "-m", "dist_ckpt", *map(str, command)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
            )
            time.sleep(0.3 + number * 0.02)
            child.send_signal(signal.SIGKILL)
            child.wait(20)
            _check_nothing_is_lost(run_dir, {4, 8, 12})
            assert call(*command).status == 0
        assert _state(run_dir)["steps"] == [4]
        assert _state(run_dir.with_name("b"))["steps"] == [8]
