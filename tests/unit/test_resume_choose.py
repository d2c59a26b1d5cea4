"""The newest usable generation is restored; bad bytes are skipped, what doesn't fit is an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.comm import SoloComm
from dist_ckpt.errors import (
    FormatVersionError,
    MismatchError,
    NoUsableGenerationError,
    StorageError,
)
from dist_ckpt.export import write_bin
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume import Resumed, restore_newest
from dist_ckpt.resume_point import RESUME_POINT_NAME, ResumePoint
from dist_ckpt.seeding import kept_generators
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.generating import change_byte, part_of, write_generation
from helpers.hostile import resealed


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


class Cursor:
    """Data that count."""

    def __init__(self) -> None:
        self.at = 0
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.loads += 1
        assert state["seen"].tolist() == [self.at]


class Training:
    """A model that makes a few updates."""

    def __init__(self, width: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.data = Cursor()
        self.captured = Captured(self.model, self.optimizer, data=self.data)

    def step(self) -> None:
        loss = self.model(torch.randn(5, 4)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.data.at += 1

    def state(self) -> list[Any]:
        tensors = {t.spec.key: t.tensor.tolist() for t in self.captured.tensors()}
        return [tensors, self.captured.shared_values(), self.data.at]


def saved_run(run_dir: Path, *steps: int) -> dict[int, list[Any]]:
    """Generations of these steps; what the state was at each."""
    training, states = Training(), {}
    for step in steps:
        training.step()
        write_generation(run_dir, [part_of(training.captured)], step=step)
        states[step] = training.state()
    return states


def restore(run_dir: Path, training: Training, **named: Any) -> Resumed | None:
    admit: Callable[[ResumePoint], None] = named.pop("admit", lambda _point: None)
    store = GenerationStore(run_dir)
    return restore_newest(store, SoloComm(), training.captured, admit=admit, **named)


def test_the_newest_is_restored_bit_by_bit(tmp_path: Path) -> None:
    """Cases 5 and 7: by number, whatever the times say."""
    states = saved_run(tmp_path, 9_900, 10_000)
    os.utime(GenerationStore(tmp_path).path(10_000), (0, 0))
    training = Training()
    resumed = restore(tmp_path, training)
    assert resumed is not None
    assert (resumed.step, resumed.skipped, resumed.notes) == (10_000, (), ())
    assert training.state() == states[10_000]


def test_where_nothing_is_there_is_nothing_to_restore(tmp_path: Path) -> None:
    assert restore(tmp_path / "nowhere", Training()) is None


def test_random_state_comes_back_only_when_asked_for(tmp_path: Path) -> None:
    """Case 11: what draws in between draws from nothing that counts."""
    saved_run(tmp_path, 100)
    wanted = torch.rand(3)
    training = Training()
    torch.manual_seed(99)
    resumed = restore(tmp_path, training)
    assert resumed is not None
    torch.manual_seed(99)
    assert not torch.equal(torch.rand(3), wanted)
    resumed.restore_rng()
    assert torch.equal(torch.rand(3), wanted)


def zero(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "zeroed": zero,
    "short": cut,
    "gone": Path.unlink,
    "changed at the start": lambda path: change_byte(path, 9),
    "changed at the end": lambda path: change_byte(path, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["rank_00000.shard", "rank_00000.state", ".snapshot_metadata", RESUME_POINT_NAME]
)
def test_bad_bytes_are_skipped_and_the_one_before_is_restored_whole(
    tmp_path: Path, name: str, damage: str
) -> None:
    """Cases 1 and 3: every kind of damage to every file of the newest generation."""
    states = saved_run(tmp_path, 100, 200)
    DAMAGE[damage](GenerationStore(tmp_path).path(200) / name)
    training = Training()
    resumed = restore(tmp_path, training)
    assert resumed is not None
    assert resumed.step == 100
    assert training.state() == states[100]
    (skipped,) = resumed.skipped
    assert skipped.step == 200
    assert name in skipped.reason
    assert skipped.id in {"corrupt-file", "digest-mismatch", "not-found"}


def test_the_two_newest_may_both_be_bad(tmp_path: Path) -> None:
    """Case 1."""
    states = saved_run(tmp_path, 100, 200, 300)
    store = GenerationStore(tmp_path)
    zero(store.path(300) / "rank_00000.shard")
    (store.path(200) / RESUME_POINT_NAME).unlink()
    training = Training()
    resumed = restore(tmp_path, training)
    assert resumed is not None
    assert [fault.step for fault in resumed.skipped] == [300, 200]
    assert training.state() == states[100]


def test_where_all_are_bad_the_error_lists_each_and_names_a_bin(tmp_path: Path) -> None:
    saved_run(tmp_path, 100, 200)
    for step in (100, 200):
        zero(GenerationStore(tmp_path).path(step) / "rank_00000.state")
    numbers = np.zeros(3, np.float32)
    write_bin(tmp_path / "step_000100.bin", 100, numbers, numbers, numbers)
    (tmp_path / "step_000200.bin").write_text("x")
    with pytest.raises(NoUsableGenerationError, match="None of the 2") as caught:
        restore(tmp_path, Training())
    assert set(caught.value.skipped) == {100, 200}
    assert f"dist-ckpt import {tmp_path}/step_000100.bin" in caught.value.next_step


def test_a_model_that_does_not_fit_is_an_error_and_no_older_one_is_tried(tmp_path: Path) -> None:
    saved_run(tmp_path, 100, 200)
    training = Training(width=5)
    before = training.state()
    with pytest.raises(MismatchError, match=r"0\.weight"):
        restore(tmp_path, training)
    assert training.state() == before


def test_an_identity_that_is_not_admitted_is_an_error_before_anything_is_read(
    tmp_path: Path,
) -> None:
    saved_run(tmp_path, 100, 200)
    training = Training()
    before = training.state()

    def refuse(point: ResumePoint) -> None:
        raise MismatchError(f"not step {point.step}")

    with pytest.raises(MismatchError, match="not step 200"):
        restore(tmp_path, training, admit=refuse)
    assert training.state() == before
    assert training.data.loads == 0


def test_a_format_of_a_later_version_is_refused_rather_than_skipped(tmp_path: Path) -> None:
    """Going back to an older generation would throw away what the newer program did."""
    saved_run(tmp_path, 100, 200)
    path = GenerationStore(tmp_path).path(200) / RESUME_POINT_NAME
    path.chmod(0o600)
    path.write_bytes(resealed(path.read_bytes().replace(b'"version": 1', b'"version": 2')))
    with pytest.raises(FormatVersionError, match="version 2"):
        restore(tmp_path, Training())


def test_a_disk_that_refuses_to_read_is_an_error_and_blames_no_generation(tmp_path: Path) -> None:
    saved_run(tmp_path, 100, 200)
    ops = FaultyOps(Fault("open", "rank_00000.shard", error="EACCES"))
    with use_ops(ops), pytest.raises(StorageError, match="EACCES"):
        restore(tmp_path, Training())
    assert ops.struck == 1
    assert GenerationStore(tmp_path).steps() == [100, 200]


def test_a_lack_of_memory_is_an_error_and_blames_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, real, refused = saved_run(tmp_path, 100, 200), torch.empty, []

    def empty(shape: Any, **named: Any) -> torch.Tensor:
        if named.get("dtype") is torch.int64 and named.get("device") != "meta":  # of `Cursor`
            refused.append(tuple(shape))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(shape, **named)

    training = Training()
    with monkeypatch.context() as patch:
        patch.setattr("dist_ckpt.resume._read.torch.empty", empty)
        with pytest.raises(StorageError, match=" 8 bytes") as caught:
            restore(tmp_path, training)
    assert (refused, caught.value.errno) == ([(1,)], errno.ENOMEM)
    resumed = restore(tmp_path, training)
    assert resumed is not None
    assert (resumed.step, resumed.skipped) == (200, ())
    assert training.state() == states[200]


def test_only_the_step_asked_for_is_restored(tmp_path: Path) -> None:
    states = saved_run(tmp_path, 100, 200, 300)
    training = Training()
    resumed = restore(tmp_path, training, only=200)
    assert resumed is not None
    assert (resumed.step, resumed.skipped) == (200, ())
    assert training.state() == states[200]
    zero(GenerationStore(tmp_path).path(200) / "rank_00000.shard")
    with pytest.raises(NoUsableGenerationError):
        restore(tmp_path, Training(), only=200)


def test_left_out_parts_stay_as_they_are(tmp_path: Path) -> None:
    """Case 16: a restore that leaves the optimizer out is told from a whole one."""
    states = saved_run(tmp_path, 100)
    training = Training()
    resumed = restore(tmp_path, training, omit=("optimizer", "data", "rng"))
    assert resumed is not None
    tensors = training.state()[0]
    saved = states[100][0]
    assert {k: v for k, v in saved.items() if k.startswith("model/")} == tensors
    assert training.data.at == 0
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    resumed.restore_rng()
    assert torch.equal(torch.rand(2), expected)


def test_from_more_ranks_rank_0s_values_are_used_and_the_notes_say_so(tmp_path: Path) -> None:
    training = Training()
    training.step()
    part = part_of(training.captured)
    write_generation(tmp_path, [part, part])
    state = training.state()
    fresh = Training()
    resumed = restore(tmp_path, fresh)
    assert resumed is not None
    assert fresh.state() == state
    assert "world size 2 → 1" in resumed.notes[0]


def test_nothing_on_disk_is_changed_by_restoring(tmp_path: Path) -> None:
    saved_run(tmp_path, 100, 200)
    zero(GenerationStore(tmp_path).path(200) / "rank_00000.shard")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    restore(tmp_path, Training())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
