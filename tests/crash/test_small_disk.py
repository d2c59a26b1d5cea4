"""Real file systems that are full, out of inodes, or read-only; not made-up errors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from helpers.mounts import remount, tmpfs
from helpers.reliability import record_fault
from helpers.run_dirs import call, snapshot_of
from helpers.tiny import train_tiny
from helpers.trainers import Job, final, generations, temporary, train
from helpers.training import Options


def _options(disk: Path, out: Path, **changes: Any) -> Options:
    options = Options(run_dir=str(disk / "run"), out=str(out), until=30, every=1, width=256)
    return replace(options, **changes)


def _check_whole(options: Options) -> list[int]:
    store = GenerationStore(Path(options.run_dir))
    for step in store.steps():
        store.verify(store.manifest(step))
    return store.steps()


def _fill(disk: Path, filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    assert os.statvfs(disk).f_bavail == 0


def _failed(options: Options) -> list[dict[str, Any]]:
    return [event for event in read_journal(options.run_dir) if event["event"] == "save_failed"]


@pytest.mark.parametrize("limit", ["size=2m", "size=64m,nr_inodes=60"])
def test_a_disk_that_fills_up_costs_saves_and_nothing_else(limit: str, tmp_path: Path) -> None:
    """Case 4: all kept until there is no room, or no inode; then fewer kept."""
    quiet = _options(tmp_path / "quiet", tmp_path / "quiet-out", settings={"keep_last": 1})
    train(quiet)
    with tmpfs(tmp_path / "disk", limit) as disk:
        settings = {"keep_last": None, "deadline_secs": 0.1}
        options = _options(disk, tmp_path / "out", settings=settings)
        with Job(options) as job:
            assert job.wait() == [1], job.stderr()
            assert "was not saved" in job.stderr()
            assert "Free some space" in job.stderr()
        failed = _failed(options)
        assert failed
        kept = _check_whole(options)
        assert 1 < len(kept) < 30
        assert kept == list(range(1, len(kept) + 1))
        assert temporary(options) == []
        assert [step for step, _ in read_loss(options.run_dir)] == list(range(1, 31))
        train(replace(options, settings={"keep_last": 2}))
        assert _check_whole(options) == [29, 30]
        assert final(options) == final(quiet)
        record_fault("Storage", f"a real tmpfs, {limit}, fills up", len(failed), "only saves fail")


def test_a_disk_without_one_free_byte_keeps_the_losses_in_memory_until_there_is_room(
    tmp_path: Path,
) -> None:
    """Case 4: somebody else fills the disk in mid-training, and makes room again."""
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        options = _options(disk, tmp_path / "out", until=400, every=5, step_secs=0.005)
        filler = disk / "filler"
        with Job(options) as job:
            job.wait_for_step(12)
            _fill(disk, filler)
            before = job.step()
            job.wait_until(lambda: "was not saved" in job.stderr())
            job.wait_for_step(before + 250)  # the journal's and the losses' last blocks are full
            assert "kept in memory" in job.stderr()
            filler.unlink()
            assert job.wait() == [0], job.stderr()
        assert [step for step, _ in read_loss(options.run_dir)] == list(range(1, 401))
        assert _check_whole(options)[-1] == 400
        assert temporary(options) == []
        record_fault("Storage", "a real tmpfs without a free byte", 1, "losses wait in memory")


def test_a_full_disk_is_freed_by_prune_though_there_is_no_room_for_the_locks_text(
    tmp_path: Path,
) -> None:
    with tmpfs(tmp_path / "disk", "size=2m") as disk:
        run = disk / "run"
        train_tiny(run, 6, keep_last=None, export="never")
        assert not (run / "pins.lock").exists()  # nothing was pinned or retired yet
        _fill(disk, disk / "filler")
        answer = call("prune", run, "--keep-last", "1")
        assert answer.status == 0, answer.err
        assert GenerationStore(run).steps() == [6]
        assert os.statvfs(disk).f_bavail > 0
        retired = [e["step"] for e in read_journal(run) if e["event"] == "retired"]
        assert retired == [2, 4]


def test_a_read_only_file_system_can_be_looked_at_and_not_trained_on(tmp_path: Path) -> None:
    """Nothing is changed, nothing needs to be; the error says what is wrong."""
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        options = _options(disk, tmp_path / "out", until=4)
        train(options)
        run = Path(options.run_dir)
        remount(disk, "ro")
        before = snapshot_of(run)
        for command in ("ls", "status", "show", "verify", "loss"):
            called = call(command, run)
            assert called.status == 0, (command, called.err)
        bin_ = tmp_path / "elsewhere.bin"
        assert call("export", run, "-o", bin_).status == 0
        assert bin_.exists()
        branch = tmp_path / "branch"
        forked = call("fork", f"{run}@2", branch, "--json")
        assert forked.status == 0, forked.err
        assert set(forked.json["files"]) == {"copy"}
        assert call("verify", branch).status == 0
        for refused in (("rewind", f"{run}@2"), ("pin", str(run)), ("prune", str(run))):
            called = call(*refused)
            assert called.status == 2, (refused, called.out, called.err)
            assert "EROFS" in called.err
        assert snapshot_of(run) == before
        with Job(replace(options, until=8)) as job:
            assert job.wait() == [1]
            assert "EROFS" in job.stderr()
            assert "read-only" in job.stderr()
        assert snapshot_of(run) == before
        remount(disk, "rw")
        train(replace(options, until=8))
        assert generations(options)[-1] == 8
        record_fault("Storage", "a real read-only file system", 1, "can be read, says why not more")
