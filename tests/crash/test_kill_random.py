"""A training that is killed again and again ends bit-equal to one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dist_ckpt.history import read_journal, read_loss
from helpers.faulty_ops import Fault
from helpers.reliability import record_fault
from helpers.trainers import (
    Job,
    check_epochs,
    consumed,
    final,
    loss_prefix,
    temporary,
)
from helpers.training import Options

KILLED = -signal.SIGKILL
#: An attempt is killed at one of so many first steps.
REACH = 15
#: Operations that saves are made of, on files that they concern.
AIMS = (
    ("mkdir", "*/.tmp-*"),
    ("open", "*/.tmp-*"),
    ("pwrite", "*.shard"),
    ("pwrite", "*/.tmp-*"),
    ("fsync", "*/.tmp-*"),
    ("fdatasync", "*.loss.json"),
    ("rename", "*/.tmp-*"),
    ("link", "*.shard"),
    ("rename", "*/step_*"),
    ("unlink", "*"),
)
AIMS_OF_OTHERS = (("open", "*.shard"), ("pwrite", "*.shard"), ("fsync", "*/.tmp-*"))


def _options(folder: Path, until: int, *, sharded: bool = False) -> Options:
    return Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=until,
        every=3,
        step_secs=0.006,
        sharded=sharded,
    )


def _dice() -> random.Random:
    """Another seed each time; set the variable to meet a failure again."""
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", time.time_ns() % 10**9))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    return random.Random(seed)


def _kill_once(options: Options, ranks: int, dice: random.Random, *, aimed: bool) -> bool:
    """An attempt has ended by SIGKILL, on a rank at least; return whether that fell into a save."""
    victim = dice.randrange(ranks)
    faults = {}
    if aimed:
        op, path = dice.choice(AIMS if victim == 0 else AIMS_OF_OTHERS)
        faults[victim] = [Fault(op, path, nth=dice.randint(1, 5), kill=True)]
    with Job(replace(options, limit_secs=5.0), ranks=ranks, faults=faults) as job:
        if not aimed and dice.random() < 0.2:
            time.sleep(dice.uniform(0.0, 0.15))  # while it starts and resumes
        else:
            job.wait_until(lambda: job.step(victim) >= 0 or job.poll(victim) is not None)
            goal = max(job.step(victim), 0) + (3 * REACH if aimed else dice.randint(0, REACH))
            job.wait_until(lambda: job.step(victim) >= goal or job.poll(victim) is not None)
            time.sleep(dice.uniform(0.0, 0.012))
        job.send(signal.SIGKILL, victim)
        job.wait_until(lambda: job.poll(victim) is not None)
        assert job.poll(victim) == KILLED, job.stderr(victim)
        if dice.random() < 0.5:
            job.wait(80.0)  # the others find out by themselves …
        # … or are killed as well, as torchrun would.
        return bool(temporary(options)) or bool(job.strikes(victim))


def _train_long(options: Options, ranks: int) -> None:
    """The training has come to its end, however many steps that are."""
    with Job(options, ranks=ranks) as job:
        statuses = job.wait(60.0 + options.until)
        assert statuses == [0] * ranks, [job.stderr(rank) for rank in range(ranks)]


def _kill_many(folder: Path, *, ranks: int, num_kills: int, sharded: bool = False) -> None:
    """A run killed so many times has ended, and so has one that wasn't; they are the same."""
    dice = _dice()
    until = num_kills * 25
    unbroken, options = (
        _options(folder / name, until, sharded=sharded) for name in ("unbroken", "killed")
    )
    _train_long(replace(unbroken, step_secs=0.0), ranks)
    num_in_saves, before = 0, b""
    number = 0
    while number < num_kills or num_in_saves < num_kills // 3:
        assert number < 2 * num_kills, f"{num_in_saves} of {number} kills fell into saves"
        is_aimed = number % 3 == 2 or number >= num_kills  # an aim may miss on busy cores
        num_in_saves += _kill_once(options, ranks, dice, aimed=is_aimed)
        number += 1
        now = loss_prefix(options)
        assert now.startswith(before), "old bytes of the loss file have changed"
        before = now
    _train_long(replace(options, step_secs=0.0), ranks)
    assert loss_prefix(options).startswith(before)
    events = read_journal(options.run_dir)
    print(f"{num_in_saves} of {number} kills fell into saves")
    assert [event for event in events if event["event"] == "replay_differs"] == []
    assert sum(event.get("agreed", 0) for event in events if event["event"] == "replayed") > 0
    _check_equal(options, unbroken, ranks)
    what = f"SIGKILL at random instants, and aimed at saves, {ranks} rank(s)"
    record_fault("Kill", what, num_kills, "ends bit-equal")


def _check_equal(options: Options, unbroken: Options, ranks: int) -> None:
    for rank in range(ranks):
        assert final(options, rank) == final(unbroken, rank)
        assert consumed(options, rank) == consumed(unbroken, rank)
    check_epochs(options, ranks)
    losses = read_loss(options.run_dir)
    assert losses == read_loss(unbroken.run_dir)
    assert [step for step, _ in losses] == list(range(1, options.until + 1))
    json.loads((Path(options.run_dir) / "run.loss.json").read_bytes())
    bin_, other = (Path(o.run_dir) / f"step_{o.until:06d}.bin" for o in (options, unbroken))
    assert bin_.read_bytes() == other.read_bytes()
    if not options.sharded:  # what a rank holds is all of it
        assert bin_.read_bytes()[8:] == (Path(options.out) / "live.0.bin").read_bytes()
    assert temporary(options) == []


def test_a_run_killed_at_12_random_instants_ends_bit_equal_to_one_that_never_was(
    tmp_path: Path,
) -> None:
    """Cases 2, 11, 12, 13: weights, moments, buffers, RNG, samples and losses."""
    _kill_many(tmp_path, ranks=1, num_kills=12)


def test_a_run_of_two_ranks_killed_at_random_instants_ends_bit_equal(tmp_path: Path) -> None:
    """Cases 2 and 29: one rank is killed; the other ends, or is killed too."""
    _kill_many(tmp_path, ranks=2, num_kills=6)


#: 500 kills in all, by `make soak`.
SOAK = {"one rank": (1, 200, False), "two ranks, DDP": (2, 150, False), "FSDP2": (2, 150, True)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SOAK)
def test_a_run_killed_at_hundreds_of_random_instants_ends_bit_equal(
    kind: str, tmp_path: Path
) -> None:
    """Cases 2, 11, 12, 13, 29, 33: a third of the kills at least falls into saves."""
    ranks, num_kills, sharded = SOAK[kind]
    # Fewer of them, to try the soak itself.
    num_kills = int(os.environ.get("DIST_CKPT_TEST_KILLS", num_kills))
    _kill_many(tmp_path, ranks=ranks, num_kills=num_kills, sharded=sharded)
