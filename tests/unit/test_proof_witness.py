"""What the library tells a proof from inside a training, and where it ends for one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.errors import SettingError, StorageError
from dist_ckpt.history import read_journal
from dist_ckpt.service import STOP_AT_VARIABLE, WITNESS_VARIABLE
from dist_ckpt.service._strays import find_strays
from helpers import sweeping
from helpers.faulty_ops import Fault, FaultyOps
from helpers.proving import SCRIPTS


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Sixteen numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def train(run_dir: Path, until: int = 6) -> tuple[list[torch.Tensor], str | None]:
    """Train for some steps; return the weights and what ended it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = dist_ckpt.ResumableLoader(Rows(), 4, seed=0)
    with dist_ckpt.Checkpointer(
        run_dir, model=model, optimizer=optimizer, scheduler=scheduler, data=batches, every=100
    ) as ckpt:
        for _ in ckpt.steps(until=until):
            loss = model(next(batches)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.record(loss=loss)
    return [tensor.clone() for tensor in model.state_dict().values()], ckpt.stopped


def told(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what the witness wrote, by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for text in (directory / "rank_00000.jsonl").read_text().splitlines():
        entry = json.loads(text)
        found.setdefault(entry["kind"], []).append(entry)
    return found


def test_a_witness_tells_each_step_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = train(tmp_path / "plain")
    after = torch.rand(3)
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv(WITNESS_VARIABLE, str(tmp_path / "seen"))
    watched, _ = train(tmp_path / "watched")
    assert all(map(torch.equal, plain, watched))
    assert torch.equal(after, torch.rand(3))
    seen = told(tmp_path / "seen")
    assert [entry["step"] for entry in seen["step"]] == [1, 2, 3, 4, 5, 6]
    losses = [float.fromhex(entry["loss"]) for entry in seen["step"]]
    assert losses == [loss for _, loss in dist_ckpt.open_run(tmp_path / "plain").loss()]
    assert [entry["data"]["cursor"] for entry in seen["step"]] == [4, 8, 12, 0, 4, 8]
    assert len(seen["step"][0]["indices"]) == 4
    assert float.fromhex(seen["step"][1]["lr"][0][0]) == pytest.approx(0.01)
    assert set(seen["step"][0]["state"]) == {"model", "buffers", "optimizer", "scheduler"}
    assert seen["open"][0]["parts"].keys() == {"optimizer", "scheduler", "data"}
    assert (seen["end"][0]["step"], seen["end"][0]["stopped"]) == (6, None)
    assert "model/0.weight" in seen["end"][0]["tensors"]
    assert "optimizer/0.weight/exp_avg" in seen["end"][0]["tensors"]


@pytest.mark.parametrize("op", ["open", "pwrite"])
def test_a_start_that_fails_once_all_is_restored_leaves_no_thread_no_file_and_no_lock(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sweeping.make_base(tmp_path)
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv(WITNESS_VARIABLE, str(tmp_path / "seen"))
    ops = FaultyOps(Fault(op, "rank_00000.jsonl", error="ENOSPC"))
    failed = sweeping.attempt(run, ops)
    assert ops.struck == 1
    assert isinstance(failed.error, StorageError)
    assert failed.leaks == []
    words = [event["event"] for event in read_journal(run) if event["attempt"] == 2]
    assert "resumed" in words
    assert "attempt_failed" in words
    assert sweeping.attempt(run).error is None  # nobody holds the lock


def test_a_run_ends_at_the_step_of_the_environment_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(tmp_path / "whole")
    monkeypatch.setenv(STOP_AT_VARIABLE, "4")
    _, stopped = train(tmp_path / "cut")
    assert stopped == "stop"
    latest = dist_ckpt.open_run(tmp_path / "cut").latest()
    assert latest is not None
    assert (latest.step, latest.manifest.reasons) == (4, ("stop",))
    _, stopped = train(tmp_path / "cut")  # it is there already: no step is made
    assert (stopped, dist_ckpt.open_run(tmp_path / "cut").loss()[-1][0]) == ("stop", 4)
    monkeypatch.delenv(STOP_AT_VARIABLE)
    resumed, stopped = train(tmp_path / "cut")
    assert stopped is None
    assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("text", ["soon", "-1", "1.5", "٤"])
def test_a_stop_that_is_no_step_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_AT_VARIABLE, text)
    with pytest.raises(SettingError, match=STOP_AT_VARIABLE):
        train(tmp_path / "run")


# ------------------------------------------------------------------------------------------ strays


class Holder:
    """Somebody's trainer."""

    def __init__(self) -> None:
        self.dice = random.Random(0)
        self.system = random.SystemRandom()
        self.dataset = self


def test_strays_are_found_where_a_program_holds_them_and_only_what_wasnt_given() -> None:
    import sys

    class Noisy(nn.Linear):
        source = None

    model = Noisy(1, 1)
    model.source = torch.Generator()  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [inner], [])
    stray_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    kept = torch.Generator()
    trainer = Holder()  # noqa: F841 - found by its name
    given = (model, optimizer, given_scheduler, None, Holder(), None, None, {"kept": kept})
    found = find_strays(given, sys._getframe())
    named = {(one["kind"], one["where"]) for one in found}
    assert ("generator", "model.source") in named
    assert ("generator", "data.dataset.dice") in named
    assert ("generator", "trainer.dice") in named
    assert ("scheduler", "stray_scheduler") in named
    names = {where for _, where in named}
    assert not names & {"kept", "inner", "given_scheduler", "trainer.system"}
    assert stray_scheduler.optimizer is optimizer


def test_the_wrong_scripts_are_all_proven_wrong_somewhere() -> None:
    tests = (Path(__file__).resolve().parents[1] / "crash" / "test_prove.py").read_text()
    for script in SCRIPTS.glob("*.py"):
        assert script.stem == "pieces" or f'"{script.stem}"' in tests, script
