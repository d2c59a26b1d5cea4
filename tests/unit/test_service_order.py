"""The declared order of the canonical file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.errors import MismatchError, SaveFailedError, UsageError


def train(run: Path, order: Any) -> nn.ModuleDict:
    torch.manual_seed(1)
    model = nn.ModuleDict({"b": nn.Linear(2, 3), "a": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, order=order) as ckpt:
        for _ in ckpt.steps(until=1):
            pass
    return model


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]


@pytest.mark.parametrize("by_model", [False, True])
def test_the_file_follows_the_declared_order_whatever_the_models_own(
    by_model: bool, tmp_path: Path
) -> None:
    with torch.device("meta"):
        whole = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 3)})
    model = train(tmp_path / "run", whole if by_model else NAMES)
    named = dict(model.named_parameters())
    state = dist_ckpt.read_bin(tmp_path / "run/step_000001.bin")
    flat = torch.cat([named[name].detach().reshape(-1) for name in NAMES])
    assert state.weights.tobytes() == flat.numpy().tobytes()


def test_an_order_that_lacks_a_parameter_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"order= lacks 1 of 4 parameters: b\.bias") as caught:
        train(tmp_path / "run", NAMES[:3])
    assert caught.value.message.startswith("Planning the arena: ")
    assert (caught.value.phase, caught.value.missing) == ("planning the arena", ["b.bias"])


def test_a_save_that_fails_in_planning_names_that_phase(tmp_path: Path) -> None:
    """What moments there will be isn't known beforehand: the plan is made at the save."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Rprop(model.parameters())
    with (
        pytest.raises(SaveFailedError, match=r"rank 0: planning: order= lacks 1 of 2 parameters"),
        dist_ckpt.Checkpointer(
            tmp_path / "run",
            model=model,
            optimizer=optimizer,
            order=["weight"],
            deadline_secs=0.1,
        ) as ckpt,
    ):
        for _ in ckpt.steps(until=1):
            pass


@pytest.mark.parametrize("order", ["a.weight", [1, 2], [*NAMES, "a.bias"]])
def test_an_order_that_is_no_list_of_names_is_refused_by_name(order: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="order="):
        train(tmp_path / "run", order)
