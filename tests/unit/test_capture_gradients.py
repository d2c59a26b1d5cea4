"""That a parameter has a gradient is kept, of zeros: an optimizer updates it then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.capture import Captured, check_rank
from dist_ckpt.errors import CorruptFileError
from helpers.capturing import everything, restore, save


def build() -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return net, torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1)


def train(run: Path, until: int, *, to_none: bool) -> Any:
    """Train both layers for three steps, then the first alone; with Adam, whose moments decay."""
    net, optimizer = build()
    with dist_ckpt.Checkpointer(run, model=net, optimizer=optimizer, signals=()) as ckpt:
        # A rehearsal, which belongs here, wants none.
        assert all(parameter.grad is None for parameter in net.parameters())
        for step in ckpt.steps(until):
            optimizer.zero_grad(set_to_none=to_none)
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            (net(inputs) if step <= 3 else net[0](inputs)).square().mean().backward()
            optimizer.step()
    return net


@pytest.mark.parametrize("to_none", [False, True])
def test_a_layer_that_is_not_used_after_a_resume_goes_on_as_it_would_have(
    tmp_path: Path, to_none: bool
) -> None:
    unbroken = train(tmp_path / "a", 6, to_none=to_none)
    at_three = train(tmp_path / "b", 3, to_none=to_none)
    resumed = train(tmp_path / "b", 6, to_none=to_none)
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, unbroken.get_parameter(name)), name
    # What the test is about did happen: without gradients to zero the second layer stands still.
    assert torch.equal(resumed[1].weight, at_three[1].weight) == to_none


def test_names_of_the_fewer_are_kept_and_only_those_get_zeros() -> None:
    for used, kept in (
        ((), None),
        (("0.weight",), {"of": ["0.weight"]}),
        (("0.weight", "0.bias", "1.weight"), {"all_but": ["1.bias"]}),
    ):
        net, optimizer = build()
        for name in used:
            net.get_parameter(name).grad = torch.ones(net.get_parameter(name).shape)
        saved = save(Captured(net, optimizer))
        assert json.loads(saved.rank).get("gradients") == kept
        other, other_optimizer = build()
        other[0].bias.grad = mine = torch.full((4,), 7.0)
        live = Captured(other, other_optimizer)
        restore(live, saved)
        having = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
        assert set(having) == {*used, "0.bias"}
        assert having.pop("0.bias") is mine  # there already
        assert not any(gradient.any() for gradient in having.values())


def test_sparse_gradients_are_left_out_and_points_without_names_restore_none() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    optimizer: Any = torch.optim.SparseAdam(net.parameters())
    net(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert net.weight.grad is not None
    assert net.weight.grad.is_sparse
    saved = save(Captured(net, optimizer))
    assert "gradients" not in json.loads(saved.rank)
    net.weight.grad = None
    live = Captured(net, optimizer)
    restore(live, saved)
    assert net.weight.grad is None
    assert everything(live)[4] == saved.rank


@pytest.mark.parametrize("forged", [[], {"of": "name"}, {"all_but": [1]}])
def test_names_of_another_form_are_refused(forged: Any) -> None:
    net, optimizer = build()
    values = json.loads(save(Captured(net, optimizer)).rank)
    check_rank(values)
    with pytest.raises(CorruptFileError, match=r"values\.gradients"):
        check_rank({**values, "gradients": forged})
