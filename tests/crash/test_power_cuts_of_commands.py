"""Each state that a power cut may leave of a lifecycle command: done, or to be done again.

What a user does next works: the same command again, or training on. Nothing of the run is lost,
and what a command makes elsewhere (a fork, a copy, a resharded run) is there whole or refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dist_ckpt.cli._keep import pin, prune
from dist_ckpt.cli._life import fork, rewind, undelete
from dist_ckpt.cli._reshard import reshard
from dist_ckpt.cli._ship import ship
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.cut_commands import (
    LAST,
    STEPS,
    Command,
    Recorded,
    check_run,
    confirmation,
    is_refused,
    record_command,
    resume,
    try_command,
)
from helpers.lives import NAME, Branch, train
from helpers.memory import in_memory
from helpers.power_cuts import Search
from helpers.reliability import record_fault

SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
NUM_STATES = 200  # of each command
ALL = frozenset(STEPS)
BACK = 2
MIDDLE = 4


def _run(root: Path) -> str:
    return str(root / NAME)


# fork: there whole or not at all; then trained in -----------------------------------------------


def _fork(root: Path) -> None:
    fork(f"{_run(root)}@{MIDDLE}", str(root / "branch"), as_json=True)


def _is_forked(root: Path) -> None:
    check_run(root / "branch", {MIDDLE}, MIDDLE)
    check_run(root / NAME, ALL, LAST)
    first = read_journal(root / "branch")[0]
    assert (first["event"], first["step"]) == ("forked", MIDDLE)


def _train_both(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    if (root / "branch").exists():
        resume(root, branch, {MIDDLE}, "branch")


def _fork_and_train(root: Path) -> None:
    if not (root / "branch").exists():
        _fork(root)
    train(root, LAST, name="branch")


def _is_trained(root: Path) -> None:
    check_run(root / "branch", {LAST}, LAST)


def _train_branch(root: Path, branch: Branch) -> None:
    if (root / "branch").exists():
        resume(root, branch, {MIDDLE, LAST}, "branch", keep_last=1)


# rewind, undelete, pin and prune ------------------------------------------------------------------


def _rewind(root: Path) -> None:
    rewind(f"{_run(root)}@{BACK}", as_json=True)


def _is_rewound(root: Path) -> None:
    check_run(root / NAME, {BACK}, BACK)


def _train_back(root: Path, branch: Branch) -> None:
    step = resume(root, branch, {BACK, LAST})
    assert GenerationStore(root / NAME).steps() == ([BACK] if step == BACK else list(STEPS))


def _undelete(root: Path) -> None:
    if GenerationStore(root / NAME).archived():  # what is back already needs no second call
        undelete(_run(root), f"rewind_to_{BACK:06d}", as_json=True)


def _is_whole(root: Path) -> None:
    check_run(root / NAME, ALL, LAST)


def _train_anywhere(root: Path, branch: Branch) -> None:
    resume(root, branch, ALL)


def _pin_and_prune(root: Path) -> None:
    pin(f"{_run(root)}@{BACK}", reason="the start")
    prune(_run(root), keep_last="1", keep_bins="1")


def _is_pruned(root: Path) -> None:
    check_run(root / NAME, {BACK, LAST}, LAST)
    assert dict(GenerationStore(root / NAME).pins()) == {BACK: "the start"}


def _train_newest(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})


# ship, reshard: another place ---------------------------------------------------------------------

AWAY = "backup/of/runs"
SHIPPED = f"{AWAY}/{NAME}-step_{LAST:06d}"


def _ship(root: Path) -> None:
    ship(_run(root), str(root / AWAY), as_json=True)


def _is_shipped(root: Path) -> None:
    confirmed = confirmation(root / SHIPPED)
    assert confirmed is not None, "it isn't confirmed"
    for name, facts in confirmed["files"].items():
        assert (root / SHIPPED / name).stat().st_size == facts["size_bytes"], name
    check_run(root / SHIPPED, {LAST}, LAST)
    check_run(root / NAME, ALL, LAST)


def _train_shipped(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    copy = root / SHIPPED
    if not copy.exists():
        return
    if (copy / f"checkpoints/step_{LAST:06d}/resume_point.json").exists():  # the last that is sent
        resume(root, branch, {LAST}, SHIPPED)
        return
    assert confirmation(copy) is None
    if (copy / "unfinished.json").exists():
        assert is_refused(root, SHIPPED)
    _ship(root)
    _is_shipped(root)


def _reshard(root: Path) -> None:
    if not (root / "two").exists():
        reshard(_run(root), world_size=2, output=str(root / "two"), as_json=True)


def _is_resharded(root: Path) -> None:
    check_run(root / "two", {LAST}, LAST)
    check_run(root / NAME, ALL, LAST)


def _train_resharded(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    if (root / "two").exists():
        resume(root, branch, {LAST}, "two")


COMMANDS = {
    "fork": Command(_fork, ALL, _is_forked, _train_both),
    "fork, and training in it": Command(_fork_and_train, ALL, _is_trained, _train_branch),
    "rewind": Command(_rewind, ALL, _is_rewound, _train_back),
    "undelete": Command(_undelete, ALL, _is_whole, _train_anywhere, prepare=_rewind),
    "pin and prune": Command(_pin_and_prune, frozenset({BACK, LAST}), _is_pruned, _train_newest),
    "ship": Command(_ship, ALL, _is_shipped, _train_shipped),
    "reshard": Command(_reshard, ALL, _is_resharded, _train_resharded),
}


#: Nearly all that differ: a command that syncs after each step leaves few.
NUM_STATES_SOAK = {
    "fork": 1_800,
    "fork, and training in it": 4_000,
    "rewind": 500,
    "undelete": 2_000,
    "pin and prune": 700,
    "ship": 200,
    "reshard": 300,  # by two threads: 409 to 6,810, as they take turns
}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: thousands of small trees are made there, and inodes aren't reused."""
    with in_memory(tmp_path) as folder:
        yield folder


def _record(memory: Path, name: str) -> tuple[Recorded, Path]:
    root = memory / "work"
    root.mkdir()
    return record_command(COMMANDS[name], root), root


def _try(name: str, memory: Path, sample: int, *, at_most: int) -> int:
    recorded, root = _record(memory, name)
    tally = try_command(recorded, root, Search(SEED, at_most, sample))
    print(f"{tally.states} states of {len(recorded.events)} operations tried, seed {SEED}")
    assert not tally.faults, "\n\n".join(tally.faults[:5])
    what = f"{name}: any state that one may leave, by the rule"
    record_fault("Power cut", what, tally.states, "done by the same command again; trained on")
    return tally.states


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_power_cut_during_a_command_loses_nothing_and_it_can_be_run_again(
    name: str, memory: Path
) -> None:
    assert _try(name, memory, NUM_STATES, at_most=1_000) == NUM_STATES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_power_cut_during_a_command_loses_nothing_and_it_can_be_run_again_many_more_states(
    name: str, memory: Path
) -> None:
    num_states = NUM_STATES_SOAK[name]
    assert _try(name, memory, num_states, at_most=1_000) == num_states


# The enumeration itself is tested: it must notice what it is there for --------------------------

SYNCS = {
    "fork": [r"/work$", r"/\.tmp-fork-branch$", r"/\.tmp-fork-branch/checkpoints/step_000004$"],
    "rewind": [r"/run\.journal\.jsonl$", r"/archive/rewind_to_000002$", r"/archive$"],
    "undelete": [r"/run/checkpoints$", r"/run\.loss\.json$"],
    "pin and prune": [r"/\.pins\.json\.tmp$"],
    "ship": [r"/work$", r"/\.tmp-ship-run\.loss\.json$", r"/run-step_000006$"],
    "reshard": [r"/work$", r"rank_00001\.shard$", r"/\.tmp-two-\w+$"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "pattern"), [(name, pattern) for name in SYNCS for pattern in SYNCS[name]]
)
def test_a_sync_that_a_command_leaves_out_is_noticed(name: str, pattern: str, memory: Path) -> None:
    recorded, root = _record(memory, name)
    kept = [e for e in recorded.events if not (e.op == "sync" and re.search(pattern, e.text))]
    assert len(kept) < len(recorded.events), "there was no such sync"
    mutant = replace(recorded, events=kept)
    # What was missing is seen at the latest when the command has returned.
    ends = range(len(kept) - 3, len(kept))
    assert (
        try_command(mutant, root, Search(SEED, 100, points=ends), stop_at_first=True).faults
        or try_command(mutant, root, Search(SEED, 10), stop_at_first=True).faults
    )
