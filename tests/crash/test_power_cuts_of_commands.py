"""Each state that a power cut may leave of a lifecycle command: done, or to be done again.

What a user does next works: the same command again, or training on. Nothing of the run is lost,
and what a command makes elsewhere (a fork, a copy, a resharded run) is there whole or refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.cut_commands import Recorded, record_command, try_command
from helpers.life_commands import COMMANDS
from helpers.power_cuts import Search
from helpers.reliability import record_fault

SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
#: A state of a command costs half of one of a whole life; with those 10,000.
NUM_STATES = {
    "fork": 600,
    "fork, and training in it": 700,
    "rewind": 300,
    "undelete": 600,
    "pin and prune": 300,
    "ship": 200,
    "reshard": 200,
}
AT_MOST = 1_000  # an instant

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


def _record(memory: Path, name: str) -> tuple[Recorded, Path]:
    root = memory / "work"
    root.mkdir()
    return record_command(COMMANDS[name], root), root


def _try(name: str, memory: Path, sample: int, note: Callable[[str, object], None]) -> int:
    recorded, root = _record(memory, name)
    tally = try_command(recorded, root, Search(SEED, AT_MOST, sample))
    what = f"{name}: {len(recorded.events)} instants"
    note("power_cuts", [tally.states, len(tally.faults), SEED, what])
    print(f"{tally.states} states of {len(recorded.events)} operations tried, seed {SEED}")
    assert not tally.faults, "\n\n".join(tally.faults[:5])
    what = f"{name}: any state that one may leave, by the rule"
    record_fault("Power cut", what, tally.states, "done by the same command again; trained on")
    return tally.states


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_power_cut_during_a_command_loses_nothing_and_it_can_be_run_again(
    name: str, memory: Path, record_property: Callable[[str, object], None]
) -> None:
    assert _try(name, memory, NUM_STATES[name], record_property) == NUM_STATES[name]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_power_cut_during_a_command_loses_nothing_and_it_can_be_run_again_many_more_states(
    name: str, memory: Path, record_property: Callable[[str, object], None]
) -> None:
    num_states = NUM_STATES_SOAK[name]
    assert _try(name, memory, num_states, record_property) == num_states


# The enumeration itself is tested: it must notice what it is there for --------------------------

SYNCS = {
    "fork": [
        r"/work/branches$",
        r"/\.tmp-fork-branch$",
        r"/\.tmp-fork-branch/checkpoints/step_000004$",
    ],
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
