"""Two DDP ranks in one run: whatever happens to one of them, both know and both end in time."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.faulty_ops import Fault
from helpers.launching import Launched
from helpers.trainers import (
    HELPERS,
    Job,
    check_epochs,
    consumed,
    final,
    generations,
    temporary,
    train,
)
from helpers.training import Options

KILLED = -signal.SIGKILL
LIMIT_SECS = 3.0


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


def _wait_in_time(job: Job) -> list[int]:
    """Return how all ended, within their time limit and what a start takes."""
    return job.wait(4 * LIMIT_SECS)


# Failures of one rank --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("op", "path", "nth"),
    [("pwrite", "*.shard", 2), ("fsync", "*.state", 2), ("open", "*/.tmp-*/*.shard", 2)],
)
def test_a_write_that_fails_on_one_rank_is_aborted_on_both_and_names_it(
    op: str, path: str, nth: int, rank: int, tmp_path: Path
) -> None:
    """Case 29: in each phase of a save; training goes on."""
    options = _options(tmp_path)
    fault = Fault(op, path, nth=nth, error="ENOSPC")
    job = train(options, ranks=2, faults={rank: [fault]})
    assert len(job.strikes(rank)) == 1
    (failed,) = _events(options, "save_failed")
    assert failed["step"] == 8
    assert f"rank {rank}: " in failed["error"]
    assert f"Step 8 was not saved. rank {rank}: " in job.stderr(0)
    assert generations(options) == [4, 12]
    assert temporary(options) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_last_save_that_fails_on_one_rank_gives_both_a_status_of_1(
    rank: int, tmp_path: Path
) -> None:
    """Cases 29 and 44."""
    options = _options(tmp_path, settings={"deadline_secs": 0.1})
    fault = Fault("pwrite", "*.shard", nth=3, times=None, error="EIO")
    with Job(options, ranks=2, faults={rank: [fault]}) as job:
        assert _wait_in_time(job) == [1, 1]
        assert f"rank {rank}: " in job.stderr(0)
        assert f"rank {rank}: " in job.stderr(1)
    assert generations(options) == [4, 8]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["raise_at", "kill_at"])
def test_a_rank_lost_after_its_update_is_named_by_the_other(
    how: str, rank: int, tmp_path: Path
) -> None:
    """Case 29: the other is at the boundary, and ends within the time limit."""
    changes: dict[str, Any] = {how: 6, "raise_rank": rank, "raise_after": True}
    options = _options(tmp_path, step_secs=0.04, **changes)
    with Job(options, ranks=2) as job:
        statuses = _wait_in_time(job)
        assert statuses[rank] == (KILLED if how == "kill_at" else 1)
        assert statuses[1 - rank] == 1
        told = job.stderr(1 - rank)
        assert "dist_ckpt.errors." in told
        assert f"rank {rank}" in told.lower()
    assert generations(options) == [4]
    train(_options(tmp_path), ranks=2)
    check_epochs(options, 2)


@pytest.mark.parametrize("how", ["raise_at", "kill_at"])
def test_a_rank_lost_before_its_update_ends_the_other_in_time(how: str, tmp_path: Path) -> None:
    """Case 29: the other waits in a collective of the training itself."""
    changes: dict[str, Any] = {how: 6, "raise_rank": 1}
    options = _options(tmp_path, step_secs=0.04, **changes)
    with Job(options, ranks=2) as job:
        assert _wait_in_time(job) == [1, KILLED if how == "kill_at" else 1]
    assert generations(options) == [4]


@pytest.mark.parametrize(
    ("op", "path"),
    [("open", "rank_00001.shard"), ("pwrite", "rank_00001.state"), ("fsync", "rank_00001.shard")],
)
def test_a_rank_killed_in_a_phase_of_the_last_save_is_named_by_the_other(
    op: str, path: str, tmp_path: Path
) -> None:
    """Case 29."""
    options = _options(tmp_path, until=4)
    with Job(options, ranks=2, faults={1: [Fault(op, path, kill=True)]}) as job:
        assert _wait_in_time(job) == [1, KILLED]
        assert "rank 1" in job.stderr(0).lower()
    assert generations(options) == []
    train(options, ranks=2)
    assert generations(options) == [4]
    assert temporary(options) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["raises", "killed"])
@pytest.mark.parametrize(
    ("op", "path"),
    [("open", "resume_point.json"), ("open", ".snapshot_metadata"), ("preadv", "*.shard")],
)
def test_a_rank_lost_in_a_phase_of_the_load_is_named_by_the_other(
    op: str, path: str, what: str, rank: int, tmp_path: Path
) -> None:
    """Cases 29 and 39: all exit in time, and nothing is set aside for a rank's own trouble."""
    options = _options(tmp_path, until=4)
    train(options, ranks=2)
    fault = Fault(op, path, times=None, kill=what == "killed", error="EIO")
    with Job(replace(options, until=8), ranks=2, faults={rank: [fault]}) as job:
        statuses = _wait_in_time(job)
        assert statuses[rank] == (KILLED if what == "killed" else 1)
        assert statuses[1 - rank] == 1
        assert job.strikes(rank)
        assert f"rank {rank}" in job.stderr(1 - rank).lower()
    assert generations(options) == [4]
    train(replace(options, until=8), ranks=2)
    assert generations(options) == [4, 8]


def test_a_rank_that_was_stopped_is_named_when_the_time_limit_is_over(tmp_path: Path) -> None:
    """Case 29: it is silent rather than dead."""
    options = _options(tmp_path, until=10_000, step_secs=0.005)
    with Job(options, ranks=2) as job:
        job.wait_for_step(5, rank=1)
        began = time.monotonic()
        job.send(signal.SIGSTOP, 1)
        job.wait_until(lambda: job.poll(0) is not None, 5 * LIMIT_SECS)
        assert time.monotonic() - began < 4 * LIMIT_SECS
        assert job.poll(0) == 1


# Values of each rank ---------------------------------------------------------------------------


def test_each_rank_goes_on_with_its_own_random_state(tmp_path: Path) -> None:
    """Case 33: distinct on each rank before and after; buffers too."""
    unbroken = _options(tmp_path / "unbroken")
    train(unbroken, ranks=2)
    options = _options(tmp_path / "cut")
    for until in (3, 7, 12):
        train(replace(options, until=until), ranks=2)
    for rank in range(2):
        assert final(options, rank) == final(unbroken, rank)
        assert consumed(options, rank) == consumed(unbroken, rank)
    for name in ("torch", "python", "numpy", "generator"):
        assert final(options, 0)["draws"][name] != final(options, 1)["draws"][name]


def test_other_numbers_of_ranks_in_one_run_never_mix_their_files(tmp_path: Path) -> None:
    """Case 38: 2 → 1 → 2; each generation holds its own ranks' files and no other."""
    options = _options(tmp_path, settings={"keep_last": None})
    store = GenerationStore(Path(options.run_dir))
    for ranks, until in ((2, 4), (1, 8), (2, 12)):
        before = final(options) if store.steps() else None
        if before is not None:
            # Loaded, not yet trained: what rank 0 had, but for what is bound to the world size.
            train(replace(options, until=before["step"]), ranks=ranks)
            for part in ("model", "optimizer", "lr", "scheduler", "data"):
                assert final(options)[part] == before[part]
        train(replace(options, until=until), ranks=ranks)
        point = store.manifest(until)
        assert point.world_size == ranks
        named = {f"rank_{rank:05d}.{kind}" for rank in range(ranks) for kind in ("shard", "state")}
        assert set(point.files) == named
        found = {path.name for path in store.path(until).iterdir()}
        assert found == {*named, ".snapshot_metadata", "resume_point.json", "verified.json"}
    for step in store.steps():
        store.verify(store.manifest(step))
    check_epochs(options, 2)
    live = (Path(options.out) / "live.0.bin").read_bytes()
    assert store.bin_path(12).read_bytes()[8:] == live


def test_a_generation_of_two_ranks_left_unverified_is_read_back_whole_by_one(
    tmp_path: Path,
) -> None:
    """Case 38: nobody else is there to read the other ranks' files."""
    options = _options(tmp_path, until=4)
    train(options, ranks=2)
    store = GenerationStore(Path(options.run_dir))
    (store.path(4) / "verified.json").unlink()
    watch = Fault("open", "*.shard", times=None)
    job = train(options, faults={0: [watch]})
    opened = [Path(strike["call"]["path"]).name for strike in job.strikes()]
    # Once to restore, and once more to read back.
    assert opened.count("rank_00000.shard") >= 2
    assert opened.count("rank_00001.shard") >= 2
    assert store.verified_at(4) is not None


# Under the launcher ----------------------------------------------------------------------------


def test_sigterm_to_the_launcher_commits_a_generation_though_loader_workers_get_it_too(
    tmp_path: Path,
) -> None:
    """Case 26: torchrun signals whole process groups."""
    import json
    from dataclasses import asdict

    options = _options(
        tmp_path, until=10_000, every=1000, num_workers=2, step_secs=0.01, limit_secs=20.0
    )
    Path(options.out).mkdir()
    script = HELPERS / "training.py"
    launched = Launched(tmp_path, "--nproc-per-node=2", script, json.dumps(asdict(options)))
    try:

        def trains() -> bool:
            files = list(Path(options.out).glob("consumed.*"))
            return len(files) == 2 and all(len(f.read_text().splitlines()) > 5 for f in files)

        launched.wait_until(trains, "both ranks train")
        launched.send(signal.SIGTERM)
        assert launched.status() == 0, launched.stderr
    finally:
        launched.close()
    step = final(options)["step"]
    assert [final(options, rank)["step"] for rank in range(2)] == [step, step]
    store = GenerationStore(Path(options.run_dir))
    assert store.steps() == [step]
    assert store.verified_at(step) is not None
    live = (Path(options.out) / "live.0.bin").read_bytes()
    assert store.bin_path(step).read_bytes()[8:] == live
