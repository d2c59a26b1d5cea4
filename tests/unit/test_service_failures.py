"""A save that fails: training goes on, it is said, nothing is left, the exit status tells."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from helpers.faulty_ops import Fault
from helpers.trainers import Job, check_epochs, consumed, final, generations, temporary, train
from helpers.training import Options


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(run_dir=str(folder / "run"), out=str(folder / "out"), until=12, every=4)
    return replace(options, **changes)


def _events(options: Options, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(options.run_dir) if item["event"] == event]


def _check_whole(options: Options) -> list[int]:
    store = GenerationStore(Path(options.run_dir))
    for step in store.steps():
        store.verify(store.manifest(step))
    return store.steps()


#: Each kind of write that a save makes, and which of them belongs to the second save.
WRITES = [
    ("fallocate", "*.shard", 2),
    ("pwrite", "*.shard", 2),
    ("pwrite", "*.state", 2),
    ("pwrite", ".snapshot_metadata", 2),
    ("pwrite", "resume_point.json", 2),
    ("mkdir", "*/.tmp-*", 2),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Options:
    options = _options(tmp_path_factory.mktemp("whole"))
    train(options)
    return options


@pytest.mark.parametrize(("op", "path", "nth"), WRITES)
def test_a_full_disk_at_any_write_of_a_save_costs_that_save_and_nothing_else(
    op: str, path: str, nth: int, whole: Options, tmp_path: Path
) -> None:
    """Case 4."""
    options = _options(tmp_path, step_secs=0.01)
    with Job(options, faults={0: [Fault(op, path, nth=nth, error="ENOSPC")]}) as job:
        job.wait_until(lambda: "was not saved" in job.stderr())
        assert temporary(options) == []
        assert generations(options) == [4]
        assert job.wait() == [0], job.stderr()
        assert len(job.strikes()) == 1
        assert "WARNING: Step 8 was not saved" in job.stderr()
    (failed,) = _events(options, "save_failed")
    assert failed["step"] == 8
    assert _check_whole(options) == [4, 12]
    assert final(options) == final(whole)


def test_the_disk_is_looked_at_before_anything_is_written(tmp_path: Path) -> None:
    """Case 4: space is checked beforehand; `reserve_bytes` more than any disk has."""
    options = _options(tmp_path, settings={"reserve_bytes": 2**60, "deadline_secs": 0.1})
    watch = Fault("*", "*/.tmp-*", times=None)
    with Job(options, faults={0: [watch]}) as job:
        assert job.wait() == [1]
        assert job.strikes() == []
        assert job.stderr().count("was not saved") >= 3
    assert generations(options) == []
    assert [step for step, _ in read_loss(options.run_dir)] == list(range(1, 13))


@pytest.mark.parametrize("path", ["*.shard", "*.state", "resume_point.json", ".tmp-step_??????-*"])
def test_a_failing_fsync_drops_the_save_and_is_never_tried_again(path: str, tmp_path: Path) -> None:
    options = _options(tmp_path)
    # All syncs of the second save's files from there on would fail: only one is made.
    nth = {"*.shard": 2, "*.state": 2, "resume_point.json": 2}.get(path, 3)
    job = train(options, faults={0: [Fault("fsync", path, nth=nth, error="EIO")]})
    assert len(job.strikes()) == 1
    assert "Step 8 was not saved" in job.stderr()
    assert _check_whole(options) == [4, 12]
    assert temporary(options) == []


def test_a_failed_last_save_ends_with_a_status_and_an_earlier_one_does_not(
    tmp_path: Path,
) -> None:
    """Case 44: a failed save is journalled and said; the exit status tells if it was the last."""
    options = _options(tmp_path / "last", settings={"deadline_secs": 0.1})
    last = Fault("pwrite", "*.shard", nth=3, times=None, error="EIO")
    with Job(options, faults={0: [last]}) as job:
        assert job.wait() == [1]
        assert "SaveFailedError" in job.stderr()
    assert generations(options) == [4, 8]
    assert [event["step"] for event in _events(options, "save_failed")] == [12]
    early = _options(tmp_path / "early")
    train(early, faults={0: [Fault("pwrite", "*.shard", nth=1, times=2, error="EIO")]})
    assert generations(early)[-1] == 12


def test_saved_is_said_only_after_the_commit(tmp_path: Path) -> None:
    """Case 45: slow storage."""
    options = _options(tmp_path, until=6, step_secs=0.02)
    slow = [
        Fault("fsync", "resume_point.json", delay_secs=0.15),
        Fault("rename", "*/.tmp-*", delay_secs=0.15),
    ]
    with Job(options, faults={0: slow}) as job:
        while job.poll() is None:
            said = "step 4 saved" in job.stderr()
            logged = (
                any(e["step"] == 4 for e in _events(options, "saved")) if job.lines() else False
            )
            if said or logged:
                assert 4 in generations(options)
            time.sleep(0.002)
        assert job.wait() == [0]
        assert len(job.strikes()) == 2


def test_a_generation_that_reads_back_otherwise_is_set_aside_and_the_status_tells(
    tmp_path: Path,
) -> None:
    """Case 44: the disk took the bytes and gave back others."""
    options = _options(tmp_path, step_secs=0.01)
    # Reading back fails as a whole: what counts is that nobody takes it for verified.
    bad = Fault("preadv", "*/step_000012/*.shard", times=None, error="EIO")
    with Job(options, faults={0: [bad]}) as job:
        assert job.wait() == [1], job.stderr()
        assert job.strikes()
        assert "didn't read back whole" in job.stderr()
    assert generations(options) == [4, 8]
    assert (Path(options.run_dir) / "archive/faulty_000012/step_000012").is_dir()
    train(replace(options, step_secs=0.0))
    assert _check_whole(options) == [4, 8, 12]


def test_weights_that_stood_still_are_noticed(tmp_path: Path) -> None:
    """Case 42: a save that silently repeats its parent."""
    options = _options(tmp_path, frozen_at=5)
    job = train(options)
    assert [event["step"] for event in _events(options, "stale")] == [8, 12]
    assert "bit-identical to step 4" in job.stderr()
    moving = _options(tmp_path / "moving")
    train(moving)
    assert _events(moving, "stale") == []


def test_weights_that_stood_still_over_a_resume_are_noticed(tmp_path: Path) -> None:
    """Case 42."""
    options = _options(tmp_path, until=4)
    train(options)
    train(replace(options, until=8, frozen_at=5))
    assert [event["step"] for event in _events(options, "stale")] == [8]


def test_what_is_saved_is_of_one_instant_whatever_happens_after_the_save_returned(
    whole: Options, tmp_path: Path
) -> None:
    """Case 32: all tensors are overwritten while the shard is still being written."""
    options = _options(tmp_path, clobber_secs=0.06, settings={"export_copy": True})
    slow = Fault("pwrite", "*", times=None, delay_secs=0.02)
    train(options, faults={0: [slow]})
    for step in (4, 8, 12):
        name = f"step_{step:06d}.bin"
        assert (Path(options.run_dir) / name).read_bytes() == (
            Path(whole.run_dir) / name
        ).read_bytes()


def test_a_save_asked_for_in_the_middle_of_an_accumulation_waits_for_the_boundary(
    tmp_path: Path,
) -> None:
    """Case 46: asked for at the first of three batches of step 5."""
    asked = _options(tmp_path / "asked", every=100, accumulate=3, ask_save={"5": 1})
    train(replace(asked, until=7))
    assert generations(asked) == [5, 7]
    train(asked)
    unbroken = _options(tmp_path / "unbroken", every=100, accumulate=3)
    train(unbroken)
    assert final(asked) == final(unbroken)
    assert consumed(asked) == consumed(unbroken)
    check_epochs(asked)


def test_a_loss_that_is_not_a_number_blocks_no_checkpoint(tmp_path: Path) -> None:
    """Case 50: saved and flagged; the loss file stays valid JSON."""
    options = _options(tmp_path, nan_at=8)
    train(options)
    assert generations(options) == [4, 8, 12]

    def refuse(name: str) -> float:
        raise AssertionError(name)

    text = (Path(options.run_dir) / "run.loss.json").read_text(encoding="utf-8")
    entries = json.loads(text, parse_constant=refuse)
    assert entries[7] == [8, None]
    (flag,) = _events(options, "loss_not_finite")
    assert (flag["step"], flag["kind"]) == (8, "nan")
    train(replace(options, until=14))
    assert [step for step, _ in read_loss(options.run_dir)] == list(range(1, 15))


def test_a_failed_export_is_journalled_and_made_at_the_next_start(tmp_path: Path) -> None:
    options = _options(tmp_path, until=4)
    faults = [
        Fault("link", "*", times=None, error="EIO"),
        Fault("open", "*.bin*", times=None, error="EIO"),
    ]
    job = train(options, faults={0: faults})
    assert job.strikes()
    bin_ = Path(options.run_dir) / "step_000004.bin"
    assert not bin_.exists()
    assert [event["step"] for event in _events(options, "export_failed")] == [4]
    train(options)
    assert bin_.exists()
    assert bin_.with_suffix(".bin.sha256").exists()


def test_a_full_disk_under_the_history_ends_no_training_and_loses_no_loss(
    whole: Options, tmp_path: Path
) -> None:
    """Case 4: the losses are kept, and written when there is room again."""
    options = _options(tmp_path)
    full = Fault("pwrite", "*.loss.json", nth=3, times=6, error="ENOSPC")
    job = train(options, faults={0: [full]})
    assert len(job.strikes()) == 6
    assert read_loss(options.run_dir) == read_loss(whole.run_dir)
    assert final(options) == final(whole)
