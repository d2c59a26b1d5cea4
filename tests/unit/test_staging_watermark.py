"""Writing follows the copy: begins before its end, never overtakes it, and ends where it ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.errors import JobError
from dist_ckpt.history import read_journal
from dist_ckpt.layout import plan_layout
from dist_ckpt.staging import CopyFailedError, RankValues, Staged, Staging
from dist_ckpt.staging._watermark import Watermark
from dist_ckpt.storage import PIECE_BYTES, Ops, use_ops
from helpers.generating import SAVE_ID, adam_part

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Bytes

_LIMIT_SECS = 20.0


class Watched(Ops):
    """Tells of each piece written to a file of more than one piece."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.begun = threading.Event()

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        taken = super().pwrite(fd, data, offset)
        if self.fstat(fd).st_size > PIECE_BYTES:
            self.offsets.append(offset)
            self.begun.set()
        return taken


def staged_of(staging: Staging) -> tuple[Staged, bytes]:
    """Return an instant of three pieces that isn't copied yet, and its shard's bytes."""
    part = adam_part({"w": torch.arange(PIECE_BYTES // 4, dtype=torch.float32)})
    values = RankValues(part.encode, part.shared, 0, 100, SAVE_ID)
    layout = plan_layout([[item.spec for item in part.tensors]])
    staged = staging.stage(layout, part.tensors, values)
    assert isinstance(staged, Staged)
    tensors = b"".join(item.tensor.numpy().tobytes() for item in part.tensors[:3])
    return staged, tensors


def write_behind(staged: Staged, home: Path) -> tuple[threading.Thread, list[BaseException]]:
    home.mkdir()
    faults: list[BaseException] = []

    def work() -> None:
        try:
            staged.write(home, 0, timeout_secs=_LIMIT_SECS)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, faults


def test_a_piece_is_on_its_way_before_the_copy_has_ended(tmp_path: Path) -> None:
    staging = Staging()
    staged, tensors = staged_of(staging)
    seen: list[list[int]] = []

    def copy_in_two_parts(mark: Watermark) -> None:
        whole = Watermark()
        staged.copy(whole)
        behind = staged.shard[PIECE_BYTES:].copy()
        staged.shard[PIECE_BYTES:] = 0
        mark.reach(PIECE_BYTES)
        assert watched.begun.wait(_LIMIT_SECS)
        seen.append(list(watched.offsets))
        staged.shard[PIECE_BYTES:] = behind

    watched = Watched()
    slow = replace(staged, copy=copy_in_two_parts)
    with use_ops(watched):
        thread, faults = write_behind(slow, tmp_path / "run")
        slow.fill()
        thread.join(_LIMIT_SECS)
    assert not thread.is_alive()
    assert faults == []
    assert seen == [[0]]  # the first piece, and nothing that wasn't there yet
    assert (tmp_path / "run/rank_00000.shard").read_bytes()[8:] == tensors
    staging.close()


def test_a_copy_that_fails_leaves_no_file_and_says_why(tmp_path: Path) -> None:
    staging = Staging()
    staged, _ = staged_of(staging)
    watched = Watched()

    def copy(mark: Watermark) -> None:
        mark.reach(PIECE_BYTES)
        assert watched.begun.wait(_LIMIT_SECS)
        raise RuntimeError("out of luck")

    broken = replace(staged, copy=copy)
    with use_ops(watched):
        thread, faults = write_behind(broken, tmp_path / "run")
        with pytest.raises(RuntimeError, match="out of luck"):
            broken.fill()
        thread.join(_LIMIT_SECS)
    assert not thread.is_alive()
    (fault,) = faults
    assert isinstance(fault, CopyFailedError)
    assert "out of luck" in str(fault.cause)
    assert watched.offsets == [0]  # it had begun
    assert list((tmp_path / "run").iterdir()) == []
    staging.close()


def test_a_copy_that_never_comes_is_waited_for_within_a_limit() -> None:
    mark = Watermark()
    mark.reach(2 * PIECE_BYTES)
    mark.wait(2 * PIECE_BYTES, 0.0)
    for end in (2 * PIECE_BYTES + 1, None):
        with pytest.raises(JobError, match="took longer"):
            mark.wait(end, 0.01)
    mark.finish()
    mark.wait(None, 0.0)


def test_a_copy_that_fails_costs_that_save_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    copy, calls = Staging._copy, []

    def failing(self: Staging, *args: object, **named: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        copy(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Staging, "_copy", failing)
    with dist_ckpt.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, every=1, signals=()
    ) as ckpt:
        for _ in ckpt.steps(until=3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = list(read_journal(tmp_path / "run"))
    (failed,) = [event for event in events if event["event"] == "save_failed"]
    assert failed["step"] == 2
    assert "staging: RuntimeError: out of luck" in failed["error"]
    assert [event["step"] for event in events if event["event"] == "saved"] == [1, 3]
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["step_000001", "step_000003"]
