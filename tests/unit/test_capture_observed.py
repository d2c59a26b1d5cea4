"""A list of tensors is used again only where nothing of it has moved (case 42)."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured, LiveTensor
from dist_ckpt.capture._observed import Observed

Strike = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    update(model, optimizer)
    return model, optimizer


def update(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(tensors: list[LiveTensor]) -> dict[str, list[object]]:
    return {
        item.spec.key: [item.spec.dtype, item.spec.shape, item.tensor.flatten().tolist()]
        for item in tensors
    }


def test_the_same_list_comes_back_after_an_update_and_shows_the_new_values() -> None:
    model, optimizer = make()
    captured = Captured(model, optimizer)
    first = captured.tensors()
    before = values(first)
    update(model, optimizer)
    assert captured.tensors() is first
    assert values(first) != before
    assert values(first) == values(Captured(model, optimizer).tensors())


def weight_of(model: nn.Sequential) -> nn.Parameter:
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def move_data(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    weight_of(model).data = torch.full((4, 4), 7.0)


def transpose_in_place(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    weight_of(model).data = weight_of(model).data.t()


def reshape_in_place(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    weight = weight_of(model)
    weight.data = weight.data.view(2, 8)
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][key] = optimizer.state[weight][key].view(2, 8)


def reinterpret_in_place(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    buffer = model[1].running_mean
    assert isinstance(buffer, torch.Tensor)
    buffer.data = buffer.data.view(torch.int32)


def replace_parameter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    old = weight_of(model)
    new = nn.Parameter(old.detach() + 1)
    model[0].weight = new
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(old)


def replace_moment(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[weight_of(model)]["exp_avg"] = torch.full((4, 4), 3.0)


def load_optimizer(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] += 1
    optimizer.load_state_dict(state)


def forget_state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[weight_of(model)]


def more_state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[weight_of(model)]["shadow"] = torch.ones(4, 4)


def replace_buffer(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1].running_var = torch.full((4,), 5.0)


def hide_buffer(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1]._non_persistent_buffers_set.add("running_var")


def add_module(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(4, 2))


def swap_modules(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0], model[2] = model[2], model[0]


def rename_module(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model._modules["last"] = model._modules.pop("2")


def tie_weights(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight = weight_of(model)
    del optimizer.param_groups[0]["params"][4]
    optimizer.state = {  # type: ignore[assignment]
        key: state
        for key, state in optimizer.state.items()
        if any(key is p for p in model.parameters())
    }


STRIKES = (
    move_data,
    transpose_in_place,
    reshape_in_place,
    reinterpret_in_place,
    replace_parameter,
    replace_moment,
    load_optimizer,
    forget_state,
    more_state,
    replace_buffer,
    hide_buffer,
    add_module,
    swap_modules,
    rename_module,
    tie_weights,
)


@pytest.mark.parametrize("strike", STRIKES, ids=lambda strike: strike.__name__)
def test_whatever_moves_is_listed_anew(strike: Strike) -> None:
    """Case 42: a plan that is kept never shows what was there before."""
    model, optimizer = make()
    captured = Captured(model, optimizer)
    first = captured.tensors()
    assert captured.tensors() is first
    strike(model, optimizer)
    found = captured.tensors()
    assert found is not first
    fresh = Captured(model, optimizer)
    assert values(found) == values(fresh.tensors())
    assert captured.shared_values() == fresh.shared_values()


def test_state_with_anything_inside_it_is_listed_each_time() -> None:
    model, optimizer = make()
    optimizer.state[weight_of(model)]["history"] = [torch.zeros(2)]
    captured = Captured(model, optimizer)
    first = captured.tensors()
    optimizer.state[weight_of(model)]["history"][0] = torch.ones(2)
    found = captured.tensors()
    assert found is not first
    assert values(found) == values(Captured(model, optimizer).tensors())


def test_learning_rates_are_read_each_time() -> None:
    model, optimizer = make()
    captured = Captured(model, optimizer)
    captured.tensors()
    optimizer.param_groups[0]["lr"] = 0.125
    assert "0.125" in str(captured.shared_values()["optimizers"])


def test_a_type_that_changes_is_looked_at_again() -> None:
    class Other(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            del state

    model, optimizer = make()
    captured = Captured(model, optimizer)
    captured.tensors()
    model[0].__class__ = Other
    assert "extra_state.0._extra_state" in captured.rank_values(lambda _path, _t: 0)["values"]


def test_memory_of_an_optimizer_that_makes_new_moments_is_not_held() -> None:
    model, optimizer = make()
    captured = Captured(model, optimizer)
    for _ in range(6):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        captured.tensors()
    gone = weakref.ref(optimizer.state[weight_of(model)]["exp_avg"])
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] + 1
    assert gone() is None


def test_another_shape_of_the_same_memory_and_strides_is_seen() -> None:
    memory = torch.zeros(8)
    parameter = nn.Parameter(memory.as_strided((1, 4), (2, 1)))
    scalar = nn.Parameter(torch.tensor(1.0))
    seen = Observed([parameter, scalar], [parameter, scalar])
    assert seen.is_whole
    assert seen.lies_as_before()
    parameter.data = memory.as_strided((2, 2), (2, 1))
    assert not seen.lies_as_before()
    parameter.data = memory.as_strided((1, 4), (2, 1))
    assert seen.lies_as_before()
    scalar.data = scalar.data.view(1)
    assert not seen.lies_as_before()
