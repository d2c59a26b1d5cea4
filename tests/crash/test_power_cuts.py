"""Each state that a power cut may leave of a run's life: the old point or the new, nothing lost.

The lives are recorded through the seam of storage; helpers.power_cuts says which states there are.
In each of them a run is resumed as a user would, and judged by helpers.judging.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.judging import life_cuts, try_cuts
from helpers.lives import Life, attempt, ranks, record, record_recovery, rewind
from helpers.memory import in_memory
from helpers.power_cuts import Search
from helpers.ranks import RankContext, run_ranks
from helpers.recording import Event
from helpers.reliability import record_fault

Chapter = Callable[[Life, Path], None]

LIVES: dict[str, Sequence[Chapter]] = {
    "one rank, only the newest kept": [attempt(4), attempt(7)],
    "one rank, all kept, a copy for the .bin": [attempt(5, keep_last=None, export_copy=True)],
    "gone back, another course": [attempt(6, keep_last=3), rewind(4, 7, keep_last=3)],
    "two ranks": [ranks(4, 2), ranks(6, 2)],
    "two ranks, then one": [ranks(4, 2), attempt(6)],
}
#: With those of the commands (test_power_cuts_of_commands.py) 10,000, and 100,000 in the soak.
NUM_STATES, NUM_STATES_OF_A_RECOVERY = 1_600, 200
NUM_STATES_SOAK = 18_200
SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: thousands of small trees are made there, and inodes aren't reused."""
    with in_memory(tmp_path) as folder:
        yield folder


def body_try(ctx: RankContext, folder: str, sample: int) -> dict[str, object]:
    """Try a share of a life's states; each is a job of one process."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    life = pickle.loads(Path(folder, "life").read_bytes())  # noqa: S301 - our own
    scratch = Path(folder, f"scratch{ctx.rank}")
    scratch.mkdir()
    share = (ctx.rank, ctx.world_size)
    tally = try_cuts(life, scratch, Search(SEED, 2_000, sample), share=share)
    return {"states": tally.states, "faults": tally.faults}


def _try_all(life: Life, memory: Path, sample: int, *, at_most: int = 120, within: str = "") -> int:
    """So many states, if there are, were recovered from; return how many."""
    scratch = memory / "scratch"
    scratch.mkdir()
    tally = try_cuts(life, scratch, Search(SEED, at_most, sample))
    return _conclude(life, tally.states, tally.faults, within)


def _try_all_on_all_cores(life: Life, memory: Path, sample: int) -> int:
    """The same for very many states."""
    (memory / "life").write_bytes(pickle.dumps(life))
    results = run_ranks(2, body_try, str(memory), sample, init=False, timeout=3000.0)
    assert [result.returncode for result in results] == [0, 0], results
    faults = [fault for result in results for fault in result.value["faults"]]
    return _conclude(life, sum(result.value["states"] for result in results), faults)


def _conclude(life: Life, num_states: int, faults: Sequence[str], within: str = "") -> int:
    print(f"{num_states} states of {len(life.events)} operations tried, seed {SEED}")
    assert not faults, "\n\n".join(faults[:5])
    where = f"any state that one may leave, by the rule{within}"
    record_fault("Power cut", where, num_states, "recovered")
    return num_states


def _live(memory: Path, name: str) -> Life:
    (memory / "life_root").mkdir()
    return record(memory / "life_root", *LIVES[name])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIVES)
def test_a_power_cut_at_any_instant_leaves_the_old_point_or_the_new(
    name: str, memory: Path
) -> None:
    """Cases 1 to 3: names and bytes that weren't synced lost, kept, half or zeros."""
    assert _try_all(_live(memory, name), memory, NUM_STATES) == NUM_STATES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LIVES)
def test_a_power_cut_at_any_instant_leaves_the_old_point_or_the_new_many_more_states(
    name: str, memory: Path
) -> None:
    life = _live(memory, name)
    assert _try_all_on_all_cores(life, memory, NUM_STATES_SOAK) == NUM_STATES_SOAK


@pytest.mark.timeout(600)
def test_a_power_cut_during_the_recovery_from_a_power_cut_loses_nothing(memory: Path) -> None:
    life = _live(memory, "one rank, only the newest kept")
    total = 0
    for cut in life_cuts(life, Search(SEED, 2, sample=3)):
        folder = memory / f"again{cut.number}"
        (folder / "root").mkdir(parents=True)
        again = record_recovery(folder / "root", cut.state, life, cut.told)
        within = f", of the recovery from a cut at operation {cut.number}"
        total += _try_all(again, folder, NUM_STATES_OF_A_RECOVERY, within=within)
    assert total == 3 * NUM_STATES_OF_A_RECOVERY


# The enumeration itself is tested: it must notice what it is there for --------------------------


def _caught(
    life: Life,
    events: Sequence[Event],
    memory: Path,
    points: Sequence[int],
    *,
    at_most: int = 10,
) -> bool:
    mutant = replace(life, events=list(events))
    scratch = memory / "scratch"
    scratch.mkdir(exist_ok=True)
    search = Search(SEED, at_most, points=points)
    return bool(try_cuts(mutant, scratch, search, stop_at_first=True).faults)


TEMPORARY = r"/checkpoints/\.tmp-step_000004-\w+"
SYNCS = {
    "the shard": TEMPORARY + r"/rank_00000\.shard$",
    "the rank's other values": TEMPORARY + r"/rank_00000\.state$",
    "the index": TEMPORARY + r"/\.snapshot_metadata$",
    "the resume point": TEMPORARY + r"/resume_point\.json$",
    "the generation's directory before it gets its name": TEMPORARY + "$",
    "the directory of generations after one got its name": "/run/checkpoints$",
    "the run directory after something got a name in it": "/run$",
    "the loss file before a generation of its steps is told": r"/run\.loss\.json$",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", SYNCS)
def test_a_sync_that_is_left_out_is_noticed(what: str, memory: Path) -> None:
    life = _live(memory, "one rank, only the newest kept")
    left_out = [e.op == "sync" and bool(re.search(SYNCS[what], e.text)) for e in life.events]
    kept = [event for event, is_out in zip(life.events, left_out, strict=True) if not is_out]
    first = left_out.index(True)
    assert _caught(life, kept, memory, range(first, len(kept)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["rank_00000.shard", "resume_point.json", ""])
def test_a_generation_that_gets_its_name_before_a_sync_is_noticed(what: str, memory: Path) -> None:
    life = _live(memory, "one rank, only the newest kept")
    events = list(life.events)
    named = next(
        number
        for number, event in enumerate(events)
        if event.op == "rename" and event.text.endswith("/step_000004")
    )
    pattern = f"{TEMPORARY}/{re.escape(what)}$" if what else f"{TEMPORARY}$"
    synced = max(
        number
        for number, event in enumerate(events[:named])
        if event.op == "sync" and re.search(pattern, event.text)
    )
    near = range(named - 3, named + 4)
    assert not _caught(life, events, memory, near, at_most=60)
    events.insert(named, events.pop(synced))  # the rename, once at ``named``, is before it now
    assert _caught(life, events, memory, near, at_most=60)
