"""A training that is killed again and again ends bit-equal to one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

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
#: An operation, the files, and the last of its times that may be struck.
Aim: TypeAlias = tuple[str, str, int]
#: An attempt is killed at one of so many first steps.
REACH = 15
#: What saves, starts and endings are made of: operation, files, the latest time that is aimed at.
AIMS: tuple[Aim, ...] = (
    ("mkdir", "*/.tmp-*", 5),
    ("open", "*/.tmp-*", 5),
    ("pwrite", "*.shard", 5),
    ("pwrite", "*/.tmp-*", 5),
    ("fsync", "*/.tmp-*", 5),
    ("fdatasync", "*.loss.json", 5),
    ("rename", "*/.tmp-*", 5),
    ("link", "*.shard", 5),
    ("rename", "*/step_*", 5),
    ("unlink", "*", 5),
    ("open", "*/.verified.json.tmp", 5),
    ("open", "*/step_*/resume_point.json", 1),  # while a point is chosen
    ("preadv", "*/step_*/*.shard", 1),  # while it is loaded
)
AIMS_OF_OTHERS: tuple[Aim, ...] = (
    ("open", "*/.tmp-*/*.shard", 5),
    ("pwrite", "*.shard", 5),
    ("fsync", "*/.tmp-*", 5),
    ("open", "*/step_*/resume_point.json", 1),
    ("preadv", "*/step_*/*.shard", 1),
)


#: Not those at a start, nor those that may be of anything.
OF_SAVES = {aim for aim in (*AIMS, *AIMS_OF_OTHERS) if aim[2] > 1} - {
    ("unlink", "*", 5),
    ("fdatasync", "*.loss.json", 5),
}


@dataclass
class Kills:
    """What was tried, and what came of it: by rank and aim."""

    tried: Counter[tuple[int, Aim]] = field(default_factory=Counter)
    struck: Counter[tuple[int, Aim]] = field(default_factory=Counter)
    num_in_saves: int = 0

    def aims(self, ranks: int) -> list[tuple[int, Aim]]:
        """Return all that can be aimed at in a job of so many ranks."""
        first = [(0, aim) for aim in AIMS if ranks == 1 or aim[0] != "link"]
        return first + [(rank, aim) for rank in range(1, ranks) for aim in AIMS_OF_OTHERS]

    def missing(self, ranks: int) -> list[tuple[int, Aim]]:
        """Return what hasn't been struck yet."""
        return [aim for aim in self.aims(ranks) if not self.struck[aim]]

    def next(
        self, ranks: int, dice: random.Random, *, is_late: bool, strikes_all: bool
    ) -> tuple[int, Aim]:
        """Return what is to be aimed at now: each in turn; late on, what is still wanted."""
        pool = self.aims(ranks)
        if is_late:
            missing = self.missing(ranks) if strikes_all else []
            pool = missing or [(rank, aim) for rank, aim in pool if aim in OF_SAVES]
        return min(pool, key=lambda aim: (self.tried[aim], dice.random()))


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


def _kill_once(
    options: Options,
    ranks: int,
    dice: random.Random,
    kills: Kills,
    target: tuple[int, Aim] | None,
) -> None:
    """An attempt has ended by SIGKILL, on a rank at least; ``kills`` knows where that fell."""
    victim = dice.randrange(ranks) if target is None else target[0]
    faults = {}
    if target is not None:
        op, path, most = target[1]
        faults[victim] = [Fault(op, path, nth=dice.randint(1, most), kill=True)]
        kills.tried[target] += 1
    before = set(temporary(options))
    with Job(replace(options, limit_secs=5.0), ranks=ranks, faults=faults) as job:
        if target is None and dice.random() < 0.2:
            time.sleep(dice.uniform(0.0, 0.15))  # while it starts and resumes
        else:
            job.wait_until(lambda: job.step(victim) >= 0 or job.poll(victim) is not None)
            reach = 3 * REACH if target is not None else dice.randint(0, REACH)
            goal = max(job.step(victim), 0) + reach
            job.wait_until(lambda: job.step(victim) >= goal or job.poll(victim) is not None)
            time.sleep(dice.uniform(0.0, 0.012))
        job.send(signal.SIGKILL, victim)
        job.wait_until(lambda: job.poll(victim) is not None)
        assert job.poll(victim) == KILLED, job.stderr(victim)
        if dice.random() < 0.5:
            job.wait(80.0)  # the others find out by themselves …
        # … or are killed as well, as torchrun would.
        has_struck = target is not None and bool(job.strikes(victim))
    if target is not None:
        kills.struck[target] += has_struck
    # What this attempt began: remains of an earlier one may be there still.
    fell = bool(set(temporary(options)) - before)
    fell |= target is not None and has_struck and target[1] in OF_SAVES
    kills.num_in_saves += fell


def _train_long(options: Options, ranks: int) -> None:
    """The training has come to its end, however many steps that are."""
    with Job(options, ranks=ranks) as job:
        statuses = job.wait(60.0 + options.until)
        assert statuses == [0] * ranks, [job.stderr(rank) for rank in range(ranks)]


def _kill_many(
    folder: Path, *, ranks: int, num_kills: int, sharded: bool = False, strikes_all: bool = False
) -> None:
    """A run killed so many times has ended, and so has one that wasn't; they are the same."""
    dice = _dice()
    until = num_kills * 25
    unbroken, options = (
        _options(folder / name, until, sharded=sharded) for name in ("unbroken", "killed")
    )
    _train_long(replace(unbroken, step_secs=0.0), ranks)
    kills, number, before = Kills(), 0, b""
    least = num_kills // 3
    while (
        number < num_kills or kills.num_in_saves < least or (strikes_all and kills.missing(ranks))
    ):
        told = f"{kills.num_in_saves} of {number} kills fell into saves, {kills.missing(ranks)}"
        assert number < 2 * num_kills, told
        target = None
        if number % 3 == 2 or number >= num_kills:  # an aim may miss on busy cores
            is_late = number >= num_kills
            target = kills.next(ranks, dice, is_late=is_late, strikes_all=strikes_all)
        _kill_once(options, ranks, dice, kills, target)
        number += 1
        now = loss_prefix(options)
        assert now.startswith(before), "old bytes of the loss file have changed"
        before = now
    _train_long(replace(options, step_secs=0.0), ranks)
    assert loss_prefix(options).startswith(before)
    events = read_journal(options.run_dir)
    num_struck = kills.struck.total()
    print(f"{kills.num_in_saves} of {number} kills fell into saves, {num_struck} aims struck:")
    print(kills.struck)
    assert [event for event in events if event["event"] == "replay_differs"] == []
    assert sum(event.get("agreed", 0) for event in events if event["event"] == "replayed") > 0
    _check_equal(options, unbroken, ranks)
    what = "FSDP2" if sharded else "DDP" if ranks > 1 else "1 rank"
    what = f"{ranks} ranks, {what}" if ranks > 1 else what
    rest = number - num_struck
    record_fault("Kill", f"SIGKILL at random instants, {what}", rest, "ends bit-equal")
    for (rank, (op, path, _)), times in kills.struck.items():
        at = path.removeprefix("*").removeprefix("/")
        where = f"SIGKILL of rank {rank} at {op} of {at or 'any file'}, {what}"
        record_fault("Kill", where, times, "ends bit-equal")


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
    """Cases 2, 11, 12, 13, 29, 33: each aim has struck, and a third of all fell into saves."""
    ranks, num_kills, sharded = SOAK[kind]
    # Fewer of them, to try the soak itself.
    num_kills = int(os.environ.get("DIST_CKPT_TEST_KILLS", num_kills))
    _kill_many(
        tmp_path, ranks=ranks, num_kills=num_kills, sharded=sharded, strikes_all=num_kills >= 100
    )
