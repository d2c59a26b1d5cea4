"""The last save fails at first: it is tried again while there is time."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import dist_ckpt
from dist_ckpt.errors import SaveFailedError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.service import _last_save
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.tiny import train_tiny


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_last_save, "_FIRST_PAUSE_SECS", 0.01)


def _words(run: Path, step: int) -> list[str]:
    return [event["event"] for event in read_journal(run) if event["step"] == step]


def _term_at_3(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
    if step == 3:
        while GenerationStore(ckpt.run_dir).steps() != [2]:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("path", ["*.shard", "resume_point.json", "*.loss.json"])
def test_a_disk_that_is_full_for_a_moment_costs_a_stop_nothing(path: str, tmp_path: Path) -> None:
    """Cases 4 and 44: SIGTERM on a full disk, and there is room again before the deadline."""
    run = tmp_path / "run"
    nth = {"*.shard": 2, "resume_point.json": 2, "*.loss.json": 4}[path]
    ops = FaultyOps(Fault("pwrite", path, nth=nth, times=3, error="ENOSPC"))
    with use_ops(ops):
        ckpt = train_tiny(run, 9, body=_term_at_3)
    assert ops.struck == 3
    assert ckpt.stopped == "SIGTERM"
    assert GenerationStore(run).steps() == [2, 3]
    words = _words(run, 3)
    assert words.count("save_failed") >= 1
    assert words.index("save_failed") < words.index("saved")
    assert words[-1] == "attempt_stopped"
    assert [step for step, _ in read_loss(run)] == [1, 2, 3]


def test_the_end_of_a_run_is_tried_again_too(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fsync", "*.shard", nth=2, error="EIO"))
    with use_ops(ops):
        train_tiny(tmp_path / "run", 3)
    assert ops.struck == 1
    assert GenerationStore(tmp_path / "run").steps() == [2, 3]


def test_a_disk_that_stays_full_ends_with_an_error_at_the_deadline(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(Fault("pwrite", "*.shard", nth=2, times=None, error="ENOSPC"))
    with use_ops(ops), pytest.raises(SaveFailedError, match="Free some space"):
        train_tiny(run, 9, body=_term_at_3, deadline_secs=0.3)
    assert ops.struck >= 2
    assert GenerationStore(run).steps() == [2]
    assert _words(run, 3)[-1] == "attempt_failed"


def test_what_retention_lets_go_makes_room_for_the_last_save(tmp_path: Path) -> None:
    """Generations that a full disk kept from being retired go before the next try."""
    run = tmp_path / "run"
    train_tiny(run, 6, keep_last=None)
    before = GenerationStore(run).steps()
    assert before == [2, 4, 6]
    watching = FaultyOps(Fault("fallocate", "*.shard", error="ENOSPC"))
    with use_ops(watching):
        train_tiny(run, 7, keep_last=1)
    assert GenerationStore(run).steps() == [7]
    assert watching.struck == 1


def test_a_directory_that_was_removed_just_before_the_end_is_made_again_for_the_last_save(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            while not (ckpt.run_dir / "step_000002.bin.sha256").exists():
                time.sleep(0.002)
            shutil.rmtree(run)

    train_tiny(run, 3, body=body)
    assert GenerationStore(run).steps() == [3]
    assert [step for step, _ in read_loss(run)] == [1, 2, 3]
