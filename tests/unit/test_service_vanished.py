"""The run directory is taken away while a job trains in it: it is made again, or left to others."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt
from dist_ckpt import storage
from dist_ckpt.errors import LockedError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.service import _last_save, _worker
from dist_ckpt.storage import RunLock, lock_holder, use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.ranks import RankContext, run_ranks
from helpers.tiny import train_tiny

WAIT_SECS = 30.0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "IDLE_SECS", 0.02)


def _wait(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def _events(run: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run) if item["event"] == event]


class _Until:
    """A body that does something after step 7, and trains on until a condition holds."""

    def __init__(self, do: Callable[[], Any], holds: Callable[[], Any]) -> None:
        self._do = do
        self._holds = holds
        self.step = 0

    def __call__(self, ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 5:
            ckpt.save()
        if step == 7:
            _wait(lambda: _events(ckpt.run_dir, "exported"))
            self._do()
        if step > 7:
            time.sleep(0.01)
            assert step < 7 + WAIT_SECS * 100
            if self._holds():
                self.step = step
                ckpt.stop()


def test_a_removed_run_directory_is_made_again_and_saved_into_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "runs" / "run"
    body = _Until(lambda: shutil.rmtree(run.parent), lambda: GenerationStore(run).steps())
    train_tiny(run, 10**6, every=10**6, body=body)
    first = GenerationStore(run).steps()[0]
    assert 7 <= first < body.step  # a slow body may be noticed within itself
    assert GenerationStore(run).manifest(first).reasons == ("rescue",)
    # Losses from the first on: the open files were the only copy.
    assert [step for step, _ in read_loss(run)] == list(range(1, body.step + 1))
    assert len(dist_ckpt.open_run(run).loss()) == body.step
    (again,) = _events(run, "made_again")
    assert {"run.lock", "run.loss.json", "run.journal.jsonl", "step_000005"} <= set(again["names"])
    assert _events(run, "attempt_started") != []
    assert "it has been made again" in caplog.text
    for step in GenerationStore(run).steps():
        store = GenerationStore(run)
        store.verify(store.manifest(step))
    assert train_tiny(run, body.step + 1, every=5).resumed is not None


def test_a_removed_lock_is_taken_again_and_no_save_fails(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held: list[bool] = []

    def is_held() -> bool:
        # As whoever starts meanwhile sees it.
        held.append(bool(lock_holder(run / "run.lock")))
        return held[-1]

    train_tiny(run, 10**6, body=_Until((run / "run.lock").unlink, is_held), every=5)
    assert held[-1]
    assert [event["names"] for event in _events(run, "made_again")] == [["run.lock"]]
    assert _events(run, "save_failed") == []
    assert "rescue" not in str(_events(run, "saved"))


def test_a_removed_file_of_the_history_is_there_again_with_all_its_entries(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loss = run / "run.loss.json"
    body = _Until(loss.unlink, loss.exists)
    train_tiny(run, 10**6, body=body, every=5)
    assert [step for step, _ in read_loss(run)] == list(range(1, body.step + 1))


def test_a_run_directory_that_another_job_has_taken_is_left_to_it_untouched(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    others = RunLock(run / "run.lock")
    before: dict[str, bytes] = {}

    def taken() -> None:
        (run / "run.lock").unlink()
        others.acquire({"pid": 1, "host": "elsewhere", "started": 1000.0})
        for name in ("run.journal.jsonl", "run.loss.json"):
            before[name] = (run / name).read_bytes()

    body = _Until(taken, lambda: False)
    try:
        with pytest.raises(LockedError, match="host elsewhere, started 1970-01-01"):
            train_tiny(run, 10**6, body=body, every=5)
    finally:
        others.release()
    # Until it is noticed a step or two may be logged; nothing after that, no end in the journal.
    assert (run / "run.journal.jsonl").read_bytes() == before["run.journal.jsonl"]
    assert _events(run, "attempt_failed") == []
    assert GenerationStore(run).steps() == [5]


def test_an_attempt_that_came_and_went_meanwhile_has_the_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def other_attempt() -> None:
        (run / "run.lock").unlink()
        train_tiny(run, 9, every=5)

    with pytest.raises(LockedError, match="taken over by attempt 2"):
        train_tiny(run, 10**6, body=_Until(other_attempt, lambda: False), every=5)
    assert dist_ckpt.open_run(run).loss()[-1][0] == 9


def test_an_unmounted_disk_is_waited_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As seen from here: the directory is gone, and what is above it is another file system."""
    run, away = tmp_path / "run", tmp_path / "away"
    real = storage.device_of

    def unmounted() -> None:
        monkeypatch.setattr(storage, "device_of", lambda path: real(path) + 1)
        run.rename(away)

    def is_told() -> bool:
        if "is on another file system" not in caplog.text:
            return False
        assert not run.exists()
        away.rename(run)  # mounted again
        return True

    body = _Until(unmounted, is_told)
    train_tiny(run, 10**6, every=10**6, body=body)
    assert not away.exists()
    assert GenerationStore(run).steps() == [5, body.step]
    assert _events(run, "made_again") == []
    assert [step for step, _ in read_loss(run)] == list(range(1, body.step + 1))


def body_of_two(ctx: RankContext, run: str) -> str:
    _worker.IDLE_SECS = 0.02
    _last_save._FIRST_PAUSE_SECS = 0.01
    where = Path(run)

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 5:
            ckpt.save()
        if step == 7 and ctx.rank == 0:
            _wait(lambda: _events(where, "exported"))
            shutil.rmtree(where)
        if step > 7:
            time.sleep(0.01)
            if ctx.rank == 0 and GenerationStore(where).steps():
                os.kill(os.getpid(), signal.SIGTERM)

    full = Fault("pwrite", "*.shard", nth=3, times=2, error="ENOSPC")
    ops = FaultyOps(full) if ctx.rank == 1 else FaultyOps()
    with use_ops(ops):
        ckpt = train_tiny(where, 10**4, every=10**6, timeout_secs=20, body=body)
    return f"{ckpt.stopped} {ops.struck}"


def test_two_ranks_save_into_the_directory_made_again_and_try_the_last_save_again(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    results = run_ranks(2, body_of_two, str(run), timeout=110.0)
    assert [result.value for result in results] == ["SIGTERM 0", "SIGTERM 2"]
    store = GenerationStore(run)
    assert [store.manifest(step).reasons for step in store.steps()] == [("rescue",), ("SIGTERM",)]
    for step in store.steps():
        assert store.manifest(step).world_size == 2
        store.verify(store.manifest(step))
    assert len(_events(run, "save_failed")) == 2
