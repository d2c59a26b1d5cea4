"""``disk_low``: what a run does after a save found no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import SaveFailedError, SettingError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from dist_ckpt.service import _disk_low
from dist_ckpt.storage import Ops, use_ops
from helpers.faulty_ops import Fault
from helpers.trainers import train
from helpers.training import Options


class SmallDisk(Ops):
    """A disk that is full as long as ``is_full`` says so; ``looks`` counts who found it full."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.is_full = is_full
        self.looks = 0

    def statvfs(self, path: Any) -> os.statvfs_result:
        found = list(super().statvfs(path))
        if self.is_full():
            self.looks += 1
            found[4] = 1  # f_bavail
        return os.statvfs_result(found)


def _until_said(run: Path) -> Callable[[], bool]:
    """Return whether the run hasn't journalled yet that it is low."""
    return lambda: "disk_low" not in _journal(run)


def _journal(run: Path) -> str:
    path = run / f"{run.name}.journal.jsonl"
    return path.read_text() if path.exists() else ""


def _train(run: Path, until: int, **settings: Any) -> dist_ckpt.Checkpointer:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, every=2, **settings) as ckpt:
        for _ in ckpt.steps(until):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt._opened("test")._saver.wait_done()  # the outcome is known at the next boundary
    return ckpt


def _events(run: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run) if item["event"] == event]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_disk_low, "_POLL_SECS", 0.01)


def test_a_run_that_waits_saves_as_soon_as_there_is_room(tmp_path: Path) -> None:
    """Case 4: and nothing is lost but time."""
    run = tmp_path / "run"
    with use_ops(disk := SmallDisk(_until_said(run))):
        ckpt = _train(run, 5, disk_low="wait")
    assert disk.looks >= 2
    assert ckpt.stopped is None
    (low,) = _events(run, "disk_low")
    assert (low["step"], low["action"]) == (3, "wait")
    assert low["need_bytes"] > low["free_bytes"]
    assert [event["step"] for event in _events(run, "disk_low_over")] == [3]
    assert [event["step"] for event in _events(run, "saved")] == [3, 4, 5]


def test_a_disk_that_is_lost_while_a_run_waits_for_room_is_waited_for(tmp_path: Path) -> None:
    """Its state is nowhere else."""
    run = tmp_path / "run"

    class LostDisk(SmallDisk):
        strikes = 0

        def statvfs(self, path: Any) -> os.statvfs_result:
            if self.strikes < 3 and "save_failed" in _journal(run):
                self.strikes += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().statvfs(path)

    with use_ops(disk := LostDisk(_until_said(run))):
        _train(run, 5, disk_low="wait")
    assert disk.strikes == 3
    (low,) = _events(run, "disk_low")
    assert low["free_bytes"] is None
    assert [event["step"] for event in _events(run, "saved")] == [3, 4, 5]


def test_a_run_that_waits_makes_up_for_its_last_save_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with use_ops(SmallDisk(_until_said(run))):
        _train(run, 1, disk_low="wait")
    assert GenerationStore(run).steps() == [1]


def test_a_run_that_stops_tries_once_more_and_its_failure_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with use_ops(SmallDisk(lambda: True)), pytest.raises(SaveFailedError, match="bytes left"):
        _train(run, 50, disk_low="stop", deadline_secs=0.1)
    (low,) = _events(run, "disk_low")
    assert (low["step"], low["action"]) == (3, "stop")
    assert GenerationStore(run).steps() == []
    other = tmp_path / "other"
    with use_ops(SmallDisk(_until_said(other))):
        ckpt = _train(other, 50, disk_low="stop")
    assert ckpt.stopped == "disk_low"
    assert GenerationStore(other).steps() == [3]


def test_without_the_setting_training_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with use_ops(disk := SmallDisk(lambda: "save_failed" not in _journal(run))):
        _train(run, 4)
    assert disk.looks >= 1
    assert GenerationStore(run).steps() == [4]
    assert _events(run, "disk_low") == []
    with pytest.raises(SettingError, match="disk_low"):
        _train(run, 4, disk_low="halt")


def test_a_full_disk_under_one_rank_stops_all_of_them_at_one_step(tmp_path: Path) -> None:
    options = Options(
        str(tmp_path / "run"), str(tmp_path / "out"), until=400, every=4, step_secs=0.01,
        settings={"disk_low": "stop"},
    )  # fmt: skip
    fault = Fault("fallocate", "*.shard", error="ENOSPC")
    job = train(options, ranks=2, faults={1: [fault]})
    assert len(job.strikes(1)) == 1
    (low,) = _events(Path(options.run_dir), "disk_low")
    assert low["action"] == "stop"
    assert GenerationStore(Path(options.run_dir)).steps() == [low["step"]]
    (end,) = _events(Path(options.run_dir), "attempt_stopped")
    assert (end["step"], end["reason"]) == (low["step"], "disk_low")
