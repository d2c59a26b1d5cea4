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
