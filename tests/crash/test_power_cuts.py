"""Each state that a power cut may leave of a run's life: the old point or the new, nothing lost.

The lives are recorded through the seam of storage; helpers.power_cuts says which states there are.
In each of them a run is resumed as a user would, and judged by helpers.judging.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dist_ckpt import storage
from dist_ckpt.export import write_sum
from helpers.cut_plans import Coverage
from helpers.judging import Tally, life_cuts, try_cuts
from helpers.lives import (
    NAME,
    Life,
    attempt,
    ranks,
    record,
    record_recovery,
    record_recovery_by_ranks,
    rewind,
)
from helpers.memory import MEMORY
from helpers.power_cuts import Search
from helpers.ranks import RankContext, run_ranks
from helpers.recording import Event
from helpers.reliability import record_fault

Chapter = Callable[[Life, Path], None]
Record = Callable[[str, object], None]

LIVES: dict[str, Sequence[Chapter]] = {
    "one rank, only the newest kept": [attempt(4), attempt(7)],
    "one rank, all kept, a copy for the .bin": [attempt(5, keep_last=None, export_copy=True)],
    "gone back, another course": [attempt(6, keep_last=3), rewind(4, 7, keep_last=3)],
    "two ranks": [ranks(4, 2), ranks(6, 2)],
    "two ranks, then one": [ranks(4, 2), attempt(6)],
}
ONE, COPY, BACK, TWO, _ = LIVES
#: With those of the commands (test_power_cuts_of_commands.py) 10,000, and 100,000 in the soak.
NUM_STATES, NUM_STATES_OF_A_RECOVERY = 1_300, 200
NUM_STATES_SOAK, NUM_STATES_OF_A_RECOVERY_SOAK = 17_000, 600
#: States an instant: every combination where there are no more.
AT_MOST, AT_MOST_SOAK = 400, 5_000
SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))


@functools.cache
def _live(name: str) -> Life:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return record(Path(folder), *LIVES[name])


def body_try(ctx: RankContext, folder: str, sample: int) -> dict[str, object]:
    """Try a share of a life's states; each is a job of one process."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    life = pickle.loads(Path(folder, "life").read_bytes())  # noqa: S301 - our own
    scratch = Path(folder, f"scratch{ctx.rank}")
    scratch.mkdir()
    share = (ctx.rank, ctx.world_size)
    return asdict(try_cuts(life, scratch, Search(SEED, AT_MOST_SOAK, sample), share=share))


def _try_all(life: Life, memory: Path, sample: int) -> Tally:
    """Try so many states, if there are."""
    scratch = memory / "scratch"
    scratch.mkdir()
    return try_cuts(life, scratch, Search(SEED, AT_MOST, sample))


def _try_all_on_all_cores(life: Life, memory: Path, sample: int) -> Tally:
    """The same for very many states."""
    (memory / "life").write_bytes(pickle.dumps(life))
    results = run_ranks(2, body_try, str(memory), sample, init=False, timeout=3000.0)
    assert [result.returncode for result in results] == [0, 0], results
    told = [result.value for result in results]
    faults = [fault for tally in told for fault in tally["faults"]]
    return Tally(sum(tally["states"] for tally in told), faults, Coverage(**told[0]["coverage"]))


def _conclude(tally: Tally, note: Record, what: str, within: str = "") -> int:
    """Tell of what was tried; return how many states were recovered from: all of them."""
    note("power_cuts", [tally.states, len(tally.faults), SEED, f"{what}: {tally.coverage}"])
    print(f"{tally.states} states tried, seed {SEED}; {tally.coverage}")
    assert not tally.faults, "\n\n".join(tally.faults[:5])
    where = f"any state that one may leave, by the rule{within}"
    record_fault("Power cut", where, tally.states, "recovered")
    return tally.states


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIVES)
def test_a_power_cut_at_any_instant_leaves_the_old_point_or_the_new(
    name: str, memory: Path, record_property: Record
) -> None:
    """Cases 1 to 3: names and bytes that weren't synced lost, kept, half or zeros."""
    life = _live(name)
    tally = _try_all(life, memory, NUM_STATES)
    assert _conclude(tally, record_property, name) == NUM_STATES
    found = tally.coverage
    assert found.instants == len(life.events)
    assert found.small > 100
    assert found.small_whole > 0.4 * found.small  # how two ranks take turns differs
    assert found.whole + found.telling > 0.5 * found.instants


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LIVES)
def test_a_power_cut_at_any_instant_leaves_the_old_point_or_the_new_many_more_states(
    name: str, memory: Path, record_property: Record
) -> None:
    life = _live(name)
    tally = _try_all_on_all_cores(life, memory, NUM_STATES_SOAK)
    assert _conclude(tally, record_property, name) == NUM_STATES_SOAK
    found = tally.coverage
    assert found.instants == len(life.events)
    assert found.small_whole > 0.6 * found.small
    assert found.whole + found.telling > 0.9 * found.instants


@pytest.mark.timeout(600)
def test_a_power_cut_during_the_recovery_from_a_power_cut_loses_nothing(
    memory: Path, record_property: Record
) -> None:
    total = _try_recoveries(ONE, NUM_STATES_OF_A_RECOVERY, memory, record_property)
    assert total == 3 * NUM_STATES_OF_A_RECOVERY


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "world_size"), [(ONE, 1), (COPY, 1), (BACK, 1), (TWO, 1), (TWO, 2)]
)
def test_a_power_cut_at_any_operation_of_a_recovery_loses_nothing(
    name: str, world_size: int, memory: Path, record_property: Record
) -> None:
    num_states = NUM_STATES_OF_A_RECOVERY_SOAK
    total = _try_recoveries(name, num_states, memory, record_property, world_size=world_size)
    assert num_states < total <= 3 * num_states  # a short recovery has fewer that differ


def _try_recoveries(
    name: str, num_states: int, memory: Path, note: Record, *, world_size: int = 1
) -> int:
    """Try states of three recoveries, each from another cut; return how many."""
    life, total = _live(name), 0
    for cut in life_cuts(life, Search(SEED, 2, sample=3)):
        folder = memory / f"again{cut.number}"
        (folder / "root").mkdir(parents=True)
        if world_size == 1:
            again = record_recovery(folder / "root", cut.state, life, cut.told)
        else:
            again = record_recovery_by_ranks(folder / "root", cut.state, life, cut.told, world_size)
        tally = _try_all(again, folder, num_states)
        assert not tally.faults, tally.faults[0]
        assert tally.coverage.instants == len(again.events)
        within = f", of the recovery from a cut at operation {cut.number}"
        _conclude(tally, note, f"{name}{within}, by {world_size}", within)
        total += tally.states
    return total


def _put_another_bin(_life: Life, root: Path) -> None:
    """Be somebody who has put another file, with its sum, in the place of a generation's .bin."""
    path = root / NAME / "step_000004.bin"
    storage.unlink(path.with_name(f"{path.name}.sha256"))
    storage.sync_dir(path.parent)
    storage.unlink(path)
    storage.write_durable(path, b"another")
    write_sum(path)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_bin_that_replaces_another_never_lies_beside_its_sum(
    memory: Path, *, is_copy: bool
) -> None:
    once = attempt(4, export_copy=is_copy)
    (memory / "life_root").mkdir()
    life = record(memory / "life_root", once, _put_another_bin, once)
    named = [e.op == "rename" and e.text.endswith("/step_000004.bin") for e in life.events]
    at = len(named) - 1 - named[::-1].index(True)
    tally = _try_mutant(life, memory, range(at - 2, at + 3), None)
    assert not tally.faults, tally.faults[0]


# The enumeration itself is tested: it must notice what it is there for --------------------------

TEMPORARY = r"/checkpoints/\.tmp-step_\d+-\w+"
#: Every sync of these lives, by the first of them that has it: left out, it is noticed.
SYNCS = {
    "the directory of runs after one was made in it": (ONE, ""),
    "the run directory after something got a name in it": (ONE, "/run"),
    "who runs the run": (ONE, r"/run/\.run\.json\.tmp"),
    "the loss file before a generation of its steps is told": (ONE, r"/run/run\.loss\.json"),
    "the metrics": (ONE, r"/run/run\.metrics\.jsonl"),
    "the samples": (ONE, r"/run/run\.samples\.json"),
    "the journal": (ONE, r"/run/run\.journal\.jsonl"),
    "the shard": (ONE, f"/run{TEMPORARY}/rank_00000\\.shard"),
    "the rank's other values": (ONE, f"/run{TEMPORARY}/rank_00000\\.state"),
    "the index": (ONE, f"/run{TEMPORARY}/\\.snapshot_metadata"),
    "the resume point": (ONE, f"/run{TEMPORARY}/resume_point\\.json"),
    "the generation's directory before it gets its name": (ONE, f"/run{TEMPORARY}"),
    "the directory of generations after one got its name": (ONE, "/run/checkpoints"),
    "the mark that it was read back": (
        ONE,
        r"/run/checkpoints/step_\d+/\.verified\.json\.tmp",
    ),
    "the sum of the .bin": (ONE, r"/run/\.tmp-step_\d+\.bin\.sha256-[0-9a-f-]+"),
    "the .bin, a copy": (COPY, r"/run/\.tmp-step_\d+\.bin-[0-9a-f-]+"),
    "the .bin, put together from two ranks": (TWO, r"/run/\.tmp-step_\d+\.bin-[0-9a-f-]+"),
    "the archive's directory": (BACK, "/run/archive"),
    "the directory of what a rewind set aside": (BACK, r"/run/archive/rewind_to_\d+"),
    "the samples that a rewind set aside": (
        BACK,
        r"/run/archive/rewind_to_\d+/\.run\.samples\.json\.tmp",
    ),
    "another rank's shard": (TWO, f"/run{TEMPORARY}/rank_00001\\.shard"),
    "another rank's other values": (TWO, f"/run{TEMPORARY}/rank_00001\\.state"),
}
#: Those that nothing depends on, and why.
HARMLESS = {
    r"/run/checkpoints/step_\d+": "the name of verified.json: without it the generation, itself "
    "durable, is read back once more by the next start",
}


def _mutant(name: str, pattern: str) -> tuple[Life, range]:
    """Return a life without these syncs, and the instants from the first of them on."""
    life = _live(name)
    left_out = [_is_sync(life, event, pattern) for event in life.events]
    kept = [event for event, is_out in zip(life.events, left_out, strict=True) if not is_out]
    return replace(life, events=kept), range(left_out.index(True), len(kept))


def _is_sync(life: Life, event: Event, pattern: str) -> bool:
    root = os.path.commonpath([other.text for other in life.events if other.text])
    path = event.text.removeprefix(root)
    return event.op == "sync" and re.fullmatch(pattern, path) is not None


def _try_mutant(life: Life, memory: Path, points: Sequence[int], sample: int | None) -> Tally:
    scratch = memory / "scratch"
    scratch.mkdir(exist_ok=True)
    search = Search(SEED, AT_MOST, sample, points)
    return try_cuts(life, scratch, search, stop_at_first=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", SYNCS)
def test_a_sync_that_is_left_out_is_noticed(what: str, memory: Path) -> None:
    mutant, points = _mutant(*SYNCS[what])
    assert _try_mutant(mutant, memory, points, NUM_STATES).faults


@pytest.mark.parametrize("name", [ONE, COPY, BACK, TWO])
def test_each_sync_of_a_life_is_left_out_by_one_of_these_tests(name: str) -> None:
    life = _live(name)
    known = [*HARMLESS, *(pattern for _, pattern in SYNCS.values())]
    syncs = [event for event in life.events if event.op == "sync"]
    for event in syncs:
        assert any(_is_sync(life, event, pattern) for pattern in known), event.text
    for pattern in [pattern for its, pattern in SYNCS.values() if its == name]:
        assert any(_is_sync(life, event, pattern) for event in syncs), pattern


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [ONE, BACK, TWO])
@pytest.mark.parametrize("pattern", HARMLESS)
def test_a_sync_that_is_harmless_is_so(name: str, pattern: str, memory: Path) -> None:
    mutant, points = _mutant(name, pattern)
    assert not _try_mutant(mutant, memory, points, NUM_STATES).faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["rank_00000.shard", "resume_point.json", ""])
def test_a_generation_that_gets_its_name_before_a_sync_is_noticed(what: str, memory: Path) -> None:
    life = _live(ONE)
    events = list(life.events)
    named = next(
        number
        for number, event in enumerate(events)
        if event.op == "rename" and event.text.endswith("/step_000004")
    )
    temporary = r"/checkpoints/\.tmp-step_000004-\w+"
    pattern = f"{temporary}/{re.escape(what)}$" if what else f"{temporary}$"
    synced = max(
        number
        for number, event in enumerate(events[:named])
        if event.op == "sync" and re.search(pattern, event.text)
    )
    near = range(named - 3, named + 4)
    assert not _try_mutant(life, memory, near, 400).faults
    events.insert(named, events.pop(synced))  # the rename, once at ``named``, is before it now
    assert _try_mutant(replace(life, events=events), memory, near, 400).faults
