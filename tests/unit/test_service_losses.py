"""What `record` takes: one real number, copied at once, or refused in the body of the step."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import parse_metrics, read_loss
from dist_ckpt.service import _losses
from helpers.tiny import train_tiny


def test_what_the_body_changes_after_it_was_recorded_is_logged_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        scalar, array, tensor = np.array(float(step)), np.array([float(step)]), torch.tensor(step)
        ckpt.record(loss=scalar, array=array, tensor=tensor, half=Fraction(1, 2), count=2**60 + 1)
        for changing in (scalar, array, tensor):
            changing.__iadd__(100)

    train_tiny(run, 2, body=body)
    assert read_loss(run) == [(1, 1.0), (2, 2.0)]
    lines = _metrics(run)
    assert [(line["array"], line["tensor"], line["half"]) for line in lines] == [
        (1.0, 1, 0.5),
        (2.0, 2, 0.5),
    ]
    assert lines[0]["count"] == 2**60 + 1, "whole numbers keep every digit"


_NO_NUMBERS: list[tuple[Any, str]] = [
    ("1.5", "is a str"),
    (np.array("1.5"), "not a number"),
    (b"1.5", "is a bytes"),
    (10**400, "larger than any float"),
    (1 + 2j, "is a complex"),
    (np.complex64(1 + 2j), "not a number"),
    (np.ones(2), "not a number"),
    (torch.tensor(1 + 2j), "not of a real number"),
    (torch.tensor(1.0, device="meta"), "holds no number"),
    (torch.ones(2), "shape"),
]


def test_what_is_no_real_number_is_refused_in_the_body_and_ends_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused: list[int] = []

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        for value, words in _NO_NUMBERS:
            for named in ({"loss": value}, {"other": value}):
                with pytest.raises(UsageError, match=words):
                    ckpt.record(**named)
                refused.append(step)

    train_tiny(run, 2, body=body)
    assert len(refused) == 4 * len(_NO_NUMBERS)
    assert GenerationStore(run).steps() == [2]
    assert [step for step, _ in read_loss(run)] == [1, 2]
    assert all("other" not in line for line in _metrics(run))


def _metrics(run: Path) -> list[dict[str, Any]]:
    return parse_metrics((run / f"{run.name}.metrics.jsonl").read_bytes())


class _LateMark:
    """The end of a copy that is made when it is waited for, on a device that works by itself."""

    def __init__(self, host: torch.Tensor, value: torch.Tensor) -> None:
        self.host, self.value, self.waits = host, value, 0

    def synchronize(self) -> None:
        self.waits += 1
        self.host.copy_(self.value)


class _OnCuda(torch.Tensor):
    """A tensor that says it lies on a CUDA device."""

    device = torch.device("cuda", 0)


def test_a_loss_on_a_device_is_waited_for_at_the_next_boundary_and_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, marks = tmp_path / "run", list[_LateMark]()

    def queue_copy(value: torch.Tensor) -> tuple[torch.Tensor, _LateMark]:
        host = torch.zeros(())
        marks.append(_LateMark(host, value.as_subclass(torch.Tensor)))
        return host, marks[-1]

    monkeypatch.setattr(_losses, "_queue_copy", queue_copy)
    waits: list[list[int]] = []

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        waits.append([mark.waits for mark in marks])
        ckpt.record(loss=torch.tensor(10.0 * step).as_subclass(_OnCuda))

    train_tiny(run, 4, body=body, every=4)
    assert waits == [[], [0], [1, 0], [1, 1, 0]], "each only after the boundary after its own"
    assert [mark.waits for mark in marks] == [1, 1, 1, 1]
    assert read_loss(run) == [(step, 10.0 * step) for step in range(1, 5)]
