"""The table of faults: a rank raises, hangs or dies in each phase of a save and of a load.

Two DDP ranks. Whatever the phase, and on whichever rank: everybody's wait ends, the error names
rank and phase, and training goes on where it can.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.phase_faults import PhaseFault
from helpers.reliability import record_fault
from helpers.trainers import Job, check_epochs, final, generations, temporary, train
from helpers.training import Options

KILLED = -signal.SIGKILL
LIMIT_SECS = 3.0
#: What a rank's own wait, the roll call after it and a start on busy cores take together.
IN_TIME_SECS = 5 * LIMIT_SECS + 15

#: phase → what the other rank calls it.
SAVE = {
    "capture": "capture of step",
    "staging": "staging step",
    "write": "writing and committing step",
    "gather": "writing and committing step",
    "commit": "writing and committing step",
    "verify": "verifying step",
}
LOAD = {"plan": "resume, index", "read": "resume, read"}
#: Only rank 0 commits.
SAVE_TABLE = [(phase, rank) for phase in SAVE for rank in (0, 1) if (phase, rank) != ("commit", 1)]
LOAD_TABLE = [(phase, rank) for phase in LOAD for rank in (0, 1)]


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=12,
        every=4,
        limit_secs=LIMIT_SECS,
    )
    return replace(options, **changes)


def _events(options: Options, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(options.run_dir) if item["event"] == event]


def _record(how: str, kind: str, phase: str, rank: int, what: str) -> None:
    record_fault("Ranks", f"rank {rank} {how} in {phase} of a {kind}", 1, what)


def _told(job: Job, rank: int) -> str:
    return job.stderr(rank).lower()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_in_a_phase_of_a_save_fails_that_save_alone(
    rank: int, tmp_path: Path
) -> None:
    """Case 29: every phase, one save after the other; training goes on through all of them."""
    phases = [phase for phase, one in SAVE_TABLE if one == rank]
    # Each at its first time, one a save: what fails in its capture isn't staged, and so on. The
    # reports of a failed write are gathered, too.
    faults = [PhaseFault(phase, "raise", 1 + (phase == "gather")) for phase in phases]
    # Rank 0 waits for a report that is lost as long as the other then waits for it, at its next
    # boundary: steps take a while, so that rank 0 has written, and begun to wait, before that.
    options = _options(
        tmp_path, until=4 * len(phases) + 4, step_secs=0.1, settings={"keep_last": None}
    )
    job = train(options, ranks=2, phase_faults={rank: faults})
    assert job.struck_phases(rank) == phases
    errors = [event["error"].lower() for event in _events(options, "save_failed")]
    (left,) = _events(options, "verify_left")
    assert left["reasons"] == {str(rank): "struck in verify"}
    assert len(errors) == len(phases) - 1
    words = {"capture": "capture:", "staging": "staging:", "write": "writing:"}
    for phase, error in zip(phases, errors, strict=False):
        assert f"rank {rank}" in error
        assert words.get(phase, "committing") in error
    store = GenerationStore(Path(options.run_dir))
    step = 4 * len(phases)
    assert store.steps() == [step, step + 4]
    assert [s for s in store.steps() if store.verified_at(s) is None] == [step]
    # Where rank 0 gives up while another rank still writes, the next start clears up.
    train(replace(options, until=options.until + 4), ranks=2)
    assert temporary(options) == []
    check_epochs(options, 2)
    for phase in phases:
        what = "left unverified" if phase == "verify" else "that save alone fails and says it"
        _record("raises", "save", phase, rank, f"{what}, training goes on")


@pytest.mark.parametrize(("phase", "rank"), SAVE_TABLE)
def test_a_rank_that_dies_in_a_phase_of_a_save_is_named_by_the_other(
    phase: str, rank: int, tmp_path: Path
) -> None:
    """Case 29."""
    options = _options(tmp_path, until=4)
    fault = PhaseFault(phase, "die")
    with Job(options, ranks=2, phase_faults={rank: [fault]}) as job:
        statuses = job.wait(IN_TIME_SECS)
        assert job.struck_phases(rank) == [phase]
        assert statuses[rank] == KILLED
        assert statuses[1 - rank] == 1
        assert f"rank {rank}" in _told(job, 1 - rank)
        assert SAVE[phase] in _told(job, 1 - rank), job.stderr(1 - rank)
    assert generations(options) == ([4] if phase == "verify" else [])
    train(options, ranks=2)
    assert generations(options) == [4]
    assert temporary(options) == []
    _record("dies", "save", phase, rank, "the other ends and names rank and phase")


def _hangs(table: list[tuple[str, int]], *quick: tuple[str, int]) -> list[Any]:
    """Return the table, but for a few slow: each hang takes its time limit."""
    marks = {one: () if one in quick else (pytest.mark.slow,) for one in table}
    return [pytest.param(*one, marks=marks[one]) for one in table]


@pytest.mark.parametrize(
    ("phase", "rank"), _hangs(SAVE_TABLE, ("capture", 0), ("write", 1), ("commit", 0))
)
def test_a_rank_that_hangs_in_a_phase_of_a_save_is_named_within_the_time_limit(
    phase: str, rank: int, tmp_path: Path
) -> None:
    """Case 29: the other ends by itself; the one that hangs is for torchrun to end."""
    options = _options(tmp_path, until=4)
    with Job(options, ranks=2, phase_faults={rank: [PhaseFault(phase, "hang")]}) as job:
        other = 1 - rank
        job.wait_until(lambda: job.struck_phases(rank) or job.poll(rank) is not None)
        began = time.monotonic()
        job.wait_until(lambda: job.poll(other) is not None, IN_TIME_SECS)
        assert time.monotonic() - began < IN_TIME_SECS
        assert job.struck_phases(rank) == [phase]
        assert job.poll(other) == 1
        assert f"rank {rank}" in _told(job, other)
        assert SAVE[phase] in _told(job, other), job.stderr(other)
    assert generations(options) == ([4] if phase == "verify" else [])
    train(options, ranks=2)
    assert generations(options) == [4]
    assert temporary(options) == []
    _record("hangs", "save", phase, rank, "the other ends in time and names rank and phase")


@pytest.mark.parametrize(("phase", "rank"), LOAD_TABLE)
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_rank_that_raises_or_dies_in_a_phase_of_a_load_ends_it_on_all(
    how: str, phase: str, rank: int, tmp_path: Path
) -> None:
    """Case 39: nothing is set aside for a rank's own trouble."""
    options = _options(tmp_path, until=4)
    train(options, ranks=2)
    longer = replace(options, until=8)
    with Job(longer, ranks=2, phase_faults={rank: [PhaseFault(phase, how)]}) as job:
        statuses = job.wait(IN_TIME_SECS)
        assert job.struck_phases(rank) == [phase]
        assert statuses[rank] == (KILLED if how == "die" else 1)
        assert statuses[1 - rank] == 1
        told = _told(job, 1 - rank)
        assert f"rank {rank}" in told
        assert LOAD[phase].removeprefix("resume, ") in told
    assert generations(options) == [4]
    train(longer, ranks=2)
    assert final(longer)["step"] == 8
    _record(f"{how}s", "load", phase, rank, "the other ends and names rank and phase")


@pytest.mark.parametrize(("phase", "rank"), _hangs(LOAD_TABLE, ("read", 1)))
def test_a_rank_that_hangs_in_a_phase_of_a_load_is_named_within_the_time_limit(
    phase: str, rank: int, tmp_path: Path
) -> None:
    """Case 39."""
    options = _options(tmp_path, until=4)
    train(options, ranks=2)
    longer = replace(options, until=8)
    with Job(longer, ranks=2, phase_faults={rank: [PhaseFault(phase, "hang")]}) as job:
        other = 1 - rank
        job.wait_until(lambda: job.poll(other) is not None, IN_TIME_SECS)
        assert job.poll(other) == 1
        assert f"rank {rank}" in _told(job, other)
        assert job.struck_phases(rank) == [phase]
        assert LOAD[phase] in _told(job, other), job.stderr(other)
    assert generations(options) == [4]
    _record("hangs", "load", phase, rank, "the other ends in time and names rank and phase")


def test_a_hang_that_ends_costs_one_save_and_training_goes_on(tmp_path: Path) -> None:
    """A disk that comes back: the save is lost, the next one is made, nobody has ended."""
    from helpers.faulty_ops import Fault

    options = _options(tmp_path, until=16, step_secs=0.5, limit_secs=1.5)
    slow = Fault("pwrite", "*.shard", delay_secs=2.4)
    job = train(options, ranks=2, faults={1: [slow]})
    assert len(job.strikes(1)) == 1
    (failed,) = _events(options, "save_failed")
    assert failed["step"] == 4
    assert "Rank 1 didn't answer in writing and committing step 4" in failed["error"]
    assert generations(options) == [8, 12, 16]
    assert temporary(options) == []
