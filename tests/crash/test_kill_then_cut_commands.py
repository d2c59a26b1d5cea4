"""A lifecycle command that is killed, and given again until it is done; then the power goes.

A kill loses nothing that the kernel has, so that the second call finds what the first has done; a
power cut loses all of it that nobody synced. What the second call says or builds on must be synced
by it, though it has not done it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.cut_commands import Command, Killing, try_command
from helpers.life_commands import COMMANDS, PIVOT, REWIND, start
from helpers.power_cuts import Search
from helpers.reliability import record_fault

Record = Callable[[str, object], None]

SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
NUM_STATES = 3  # of each kill before the end, and at it
THEN: dict[str, tuple[Command, Callable[[Path], object] | None]] = {
    **{name: (COMMANDS[name], None) for name in COMMANDS if name != "fork, and training in it"},
    "pivot": (PIVOT, None),
    "rewind, then a start": (REWIND, start),
    "pivot, then a start": (PIVOT, start),
}


def _last_chances(killing: Killing) -> list[int]:
    """Return for each directory after how many operations a change in it was unsynced at the last.

    Whoever is killed there leaves it so, and whoever comes after has nothing more to do in it.
    """
    disk, last = killing.before.copy(), dict[int, int]()
    for number, event in enumerate(killing.events[:-1], start=1):
        disk.do(event)
        for one in disk.pending:
            if one.event.places:
                last |= dict.fromkeys(one.unsynced, number)
    return sorted({*last.values()})


def _try(name: str, memory: Path, note: Record, *, each: bool, num_states: int) -> None:
    root = memory / "work"
    root.mkdir()
    command, then = THEN[name]
    killing = Killing(command, root)
    kills = range(1, len(killing.events)) if each else _last_chances(killing)
    assert len(kills) > 1
    states = 0
    faults = []
    for after in kills:
        recorded = killing.record(after, then)
        assert recorded is not None, f"it ended before its operation {after}"
        end = len(recorded.events) - 1
        between = Search(SEED + after, 20, num_states, range(after, end))
        # The last instant in any case, all lost that is pending: what is said then stays true.
        for search in (between, Search(SEED + after, num_states // 3, None, (end,))):
            tally = try_command(recorded, root, search)
            states += tally.states
            last = recorded.events[after - 1]
            where = f"killed after operation {after}, {last.op} {last.text}; gone on with; "
            faults += [where + fault for fault in tally.faults[:2]]
    print(f"{len(kills)} kills of {len(killing.events)} operations, {states} states, seed {SEED}")
    what = f"{name}: killed, given again, then a power cut"
    note("power_cuts", [states, len(faults), SEED, what])
    assert not faults, f"{len(faults)} faults\n\n" + "\n\n".join(faults[:5])
    assert states > len(kills)
    record_fault("Power cut", what, states, "done by the same command again; trained on")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", THEN)
def test_what_a_killed_command_left_pending_is_durable_once_it_was_given_again(
    name: str, memory: Path, record_property: Record
) -> None:
    _try(name, memory, record_property, each=False, num_states=NUM_STATES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", THEN)
def test_what_a_killed_command_left_pending_is_durable_once_it_was_given_again_at_each_change(
    name: str, memory: Path, record_property: Record
) -> None:
    _try(name, memory, record_property, each=True, num_states=2 * NUM_STATES)
