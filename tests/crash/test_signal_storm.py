"""Signals of all kinds, at any instant, many: all answered, none twice, nothing lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from helpers.faulty_ops import Fault
from helpers.reliability import record_fault
from helpers.trainers import ROOT, Job, check_epochs, final, generations, temporary, train
from helpers.training import Options

#: Of those that don't end a process whether it handles them or not; SIGSTOP is followed by SIGCONT.
HARMLESS = (
    signal.SIGUSR1,
    signal.SIGUSR1,
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGPIPE,  # ignored by Python
    signal.SIGSTOP,
    signal.SIGURG,
    signal.SIGWINCH,
)
STOPS = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=10**6,
        every=7,
        step_secs=0.003,
        settings={"deadline_secs": 60.0, "keep_last": 2},
    )
    return replace(options, **changes)


def _dice() -> random.Random:
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    return random.Random(seed)


def _check_stopped(options: Options, ranks: int) -> None:
    """All ranks ended at one step, and there is a verified point of it."""
    steps = {final(options, rank)["step"] for rank in range(ranks)}
    assert len(steps) == 1
    (step,) = steps
    store = GenerationStore(Path(options.run_dir))
    assert store.steps()[-1] == step
    store.verify(store.manifest(step))
    assert store.verified_at(step) is not None
    assert temporary(options) == []


def _check_answers(options: Options, asked: list[tuple[int, int]], ends: list[int]) -> int:
    """Each SIGUSR1 was answered by a point of its step, none twice; return how many points.

    An attempt that is asked before its first step answers by the point that it resumed: that step
    was answered by the attempt before already, where SIGUSR1 met what stopped it.

    Args:
        options: Of the run.
        asked: The steps that the signalled rank was in right before and right after each.
        ends: The step at which each attempt was stopped.
    """
    points: dict[int, set[str]] = {}
    for event in (events := read_journal(options.run_dir)):
        if event["event"] in {"saved", "already_saved"}:
            points.setdefault(event["step"], set()).update(event["reasons"])
    answers = {step for step, reasons in points.items() if "SIGUSR1" in reasons}
    for before, after in asked:
        there = range(before, after + 2)
        # Where another rank was told to stop at that very step, the last point is the answer.
        assert any(step in answers or step in ends for step in there), (before, after, answers)
    told = [e for e in events if e["event"] == "signal" and "SIGUSR1" in e["signals"]]
    steps = Counter((event["attempt"], event["step"]) for event in told)
    assert set(steps.values()) == {1}, "a step was answered twice"
    signalled = {step for _, step in steps}
    assert signalled == answers, "a point says that it answers a signal, and the journal doesn't"
    assert 0 < sum(event["count"] for event in told) <= len(asked), "more answers than signals"
    return len(answers)


def _storm(options: Options, ranks: int, num_signals: int) -> None:
    """So many signals in all, over attempts of which each is ended by one of them."""
    dice = _dice()
    sent = 0
    asked: list[tuple[int, int]] = []
    ends: list[int] = []
    kinds: set[signal.Signals] = set()
    while sent < num_signals:
        with Job(options, ranks=ranks) as job:
            # From the first step on: before the handlers are there, a signal does what it does.
            for rank in range(ranks):
                job.wait_for_step(0, rank)
            for _ in range(min(dice.randint(10, 60), num_signals - sent - 1)):
                time.sleep(dice.choice((0.0, dice.uniform(0.0, 0.02))))
                sig, rank = dice.choice(HARMLESS), dice.randrange(ranks)
                before = job.step(rank)
                job.send(sig, rank)
                if sig == signal.SIGUSR1:
                    asked.append((before, job.step(rank)))
                if sig == signal.SIGSTOP:
                    time.sleep(dice.uniform(0.0, 0.02))
                    job.send(signal.SIGCONT, rank)
                sent += 1
                kinds.add(sig)
            sig, rank = dice.choice(STOPS), dice.randrange(ranks)
            job.send(sig, rank)
            sent += 1
            kinds.add(sig)
            assert job.wait() == [0] * ranks, [job.stderr(rank) for rank in range(ranks)]
        assert final(options)["stopped"] == sig.name
        _check_stopped(options, ranks)
        ends.append(final(options)["step"])
    last = ends[-1]
    assert [step for step, _ in read_loss(options.run_dir)] == list(range(1, last + 1))
    check_epochs(options, ranks)
    num_points = _check_answers(options, asked, ends)
    print(f"{sent} signals of {len(kinds)} kinds over {last} steps, {num_points} points for them")
    record_fault(
        "Signals",
        f"of {len(kinds)} kinds at random instants, {ranks} rank(s)",
        sent,
        "each stop leaves a verified point of the step in flight",
    )


@pytest.mark.parametrize(("ranks", "number"), [(1, 120), (2, 60)])
def test_signals_of_all_kinds_at_random_instants_lose_nothing(
    ranks: int, number: int, tmp_path: Path
) -> None:
    """Cases 27 and 28."""
    _storm(_options(tmp_path), ranks, number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_1000_signals_of_all_kinds_at_random_instants_lose_nothing(
    ranks: int, tmp_path: Path
) -> None:
    _storm(_options(tmp_path), ranks, 1000)


@pytest.mark.parametrize(
    ("sig", "phase", "op", "path"),
    [
        (signal.SIGTERM, "the export", "rename", "*/.tmp-step_000007.bin-*"),
        (signal.SIGUSR1, "the read-back", "preadv", "*/step_000007/*.shard"),
        (signal.SIGTERM, "the retirement", "rename", "*/step_000007"),
        (signal.SIGUSR1, "the commit", "rename", "*/.tmp-step_000007-*"),
    ],
)
def test_a_signal_in_a_phase_of_a_save_is_answered_by_a_point_of_the_step_in_flight(
    sig: signal.Signals, phase: str, op: str, path: str, tmp_path: Path
) -> None:
    """Case 28."""
    options = _options(tmp_path, settings={"deadline_secs": 60.0, "keep_last": 1})
    with Job(options, faults={0: [Fault(op, path, delay_secs=0.15)]}) as job:
        job.wait_until(job.strikes)
        before = job.step()
        job.send(sig)
        after = job.step()
        if sig == signal.SIGUSR1:
            job.wait_for_step(after + 3)
            job.send(signal.SIGTERM)
        assert job.wait() == [0], job.stderr()
        assert len(job.strikes()) == 1
    (first, *_) = [e for e in read_journal(options.run_dir) if e["event"] == "signal"]
    assert first["signals"] == [sig.name]
    assert before <= first["step"] <= after + 1
    _check_stopped(options, 1)
    record_fault("Signals", f"{sig.name} in {phase}", 1, "a point of the step in flight")


def wait_for_text(job: Job, text: str) -> None:
    job.wait_until(lambda: text in job.stderr(0))


def test_a_signal_ends_a_long_evaluation_that_polls_and_is_answered_behind_it(
    tmp_path: Path,
) -> None:
    """`poll` takes nothing away: the boundary answers."""
    options = _options(tmp_path, until=3, evaluate_at=2)
    for sig, stopped in ((signal.SIGUSR1, None), (signal.SIGTERM, "SIGTERM")):
        here = replace(
            options, run_dir=f"{options.run_dir}-{sig.name}", out=f"{options.out}-{sig.name}"
        )
        with Job(here, ranks=2) as job:
            wait_for_text(job, "evaluates")
            job.send(sig, 1)
            assert job.wait() == [0, 0], job.stderr()
        assert final(here)["stopped"] == stopped
        (event,) = [e for e in read_journal(here.run_dir) if e["event"] == "signal"]
        assert (event["step"], event["signals"]) == (2, [sig.name])
        assert 2 in generations(here)
        record_fault("Signals", f"{sig.name} in an evaluation that polls", 1, "answered behind it")


EXITING = """
import atexit, os, signal, sys, time
import torch, dist_ckpt
run, sig = sys.argv[1], int(sys.argv[2])

def last():  # the interpreter is on its way out
    os.kill(os.getpid(), sig)
    time.sleep(0.2)

atexit.register(last)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, every=2) as ckpt:
    for step in ckpt.steps(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.record(loss=1.0)
"""


@pytest.mark.parametrize(
    "sig",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_interpreter_exits_finds_everything_written(
    sig: signal.Signals, tmp_path: Path
) -> None:
    """Behind the `with` a signal does what it does to any program, and costs nothing."""
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", EXITING, str(run), str(int(sig))],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert done.returncode == -sig, done.stderr
    store = GenerationStore(run)
    assert store.steps() == [2, 4, 5]
    assert all(store.verified_at(step) is not None for step in store.steps())
    assert [step for step, _ in read_loss(run)] == [1, 2, 3, 4, 5]
    assert read_journal(run)[-1]["event"] == "attempt_ended"
    record_fault("Signals", f"{sig.name} while the interpreter exits", 1, "all is written")


def test_a_stop_whose_deadline_is_shorter_than_its_save_still_commits_it(tmp_path: Path) -> None:
    """A commit under way is never left: whoever is in a hurry kills."""
    options = _options(tmp_path, settings={"deadline_secs": 0.05})
    for ranks in (1, 2):
        here = replace(options, run_dir=f"{options.run_dir}-{ranks}", out=f"{options.out}-{ranks}")
        here = replace(here, every=10**6)
        victim = ranks - 1
        shard = f"*/.tmp-step_*/rank_{victim:05d}.shard"
        slow = Fault("fsync", shard, delay_secs=0.4)
        with Job(here, ranks=ranks, faults={victim: [slow]}) as job:
            job.wait_for_step(3)
            job.send(signal.SIGTERM, 0)
            assert job.wait() == [0] * ranks, job.stderr()
            assert len(job.strikes(victim)) == 1, "the save wasn't longer than the deadline"
        step = final(here)["step"]
        assert generations(here) == [step]
        train(replace(here, until=step), ranks=ranks)
        _check_stopped(here, ranks)
        record_fault(
            "Signals", f"a deadline shorter than the save, {ranks} rank(s)", 1, "committed"
        )
