"""Every scheduler of torch, and the gradient scaler, go on where they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from dist_ckpt.capture import Captured
from dist_ckpt.errors import MismatchError, UnsupportedValueError
from helpers.capturing import everything, restore, save

Build = Callable[[torch.optim.Optimizer], Any]


class Warmup:
    """A callable object: torch keeps its attributes, not itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 / (1 + epoch)


SCHEDULERS: dict[str, Build] = {
    "step": lambda o: lrs.StepLR(o, 3, gamma=0.5),
    "multi_step": lambda o: lrs.MultiStepLR(o, [2, 4, 4, 7], gamma=0.5),
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "lambda_object": lambda o: lrs.LambdaLR(o, Warmup()),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda _epoch: 0.9),
    "constant": lambda o: lrs.ConstantLR(o, factor=0.5, total_iters=6),
    "linear": lambda o: lrs.LinearLR(o, total_iters=7),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=9, power=2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 6),
    "cosine_restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "one_cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.5, step_size_up=3, mode="exp_range", gamma=0.9),
    "cyclic_custom": lambda o: lrs.CyclicLR(
        o, 0.01, 0.5, step_size_up=3, scale_fn=lambda x: 0.9**x
    ),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, threshold=0.1),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=3), lrs.MultiStepLR(o, [2, 4])], milestones=[3]
    ),
    "chained": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 4), lrs.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def build(seed: int, make: Build, *, lr: Any = 0.1) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    groups = [{"params": [net.weight], "lr": lr}, {"params": [net.bias], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return net, optimizer, make(optimizer)


def train(net: nn.Module, optimizer: Any, scheduler: Any, num_steps: int) -> list[list[float]]:
    rates = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("cut", [0, 3, 5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_go_on_bit_equal_with(name: str, cut: int) -> None:
    net, optimizer, scheduler = build(1, SCHEDULERS[name])
    first = Captured(net, optimizer, scheduler=scheduler)
    train(net, optimizer, scheduler, cut)
    saved = save(first)
    rates = train(net, optimizer, scheduler, 6)

    other, fresh, again = build(2, SCHEDULERS[name])
    second = Captured(other, fresh, scheduler=again)
    restore(second, saved)
    assert train(other, fresh, again, 6) == rates
    assert everything(second) == everything(first)


def test_tensor_learning_rates_go_on_bit_equal() -> None:
    make = SCHEDULERS["sequential"]
    net, optimizer, scheduler = build(1, make, lr=torch.tensor(0.1))
    first = Captured(net, optimizer, scheduler=scheduler)
    train(net, optimizer, scheduler, 4)
    saved = save(first)
    rates = train(net, optimizer, scheduler, 4)
    other, fresh, again = build(2, make, lr=torch.tensor(0.1))
    second = Captured(other, fresh, scheduler=again)
    restore(second, saved)
    assert train(other, fresh, again, 4) == rates
    assert isinstance(fresh.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_the_next_learning_rate_is_right_in_whatever_order_things_are_built(
    scheduler_first: bool,
) -> None:
    """Case 18: building the scheduler after the optimizer's load resets the learning rate."""
    make = SCHEDULERS["cosine"]
    net, optimizer, scheduler = build(1, make)
    train(net, optimizer, scheduler, 4)
    saved = save(Captured(net, optimizer, scheduler=scheduler))
    before = [group["lr"] for group in optimizer.param_groups]
    assert before[0] != 0.1
    rates = train(net, optimizer, scheduler, 1)

    other = nn.Linear(3, 2)
    groups = [{"params": [other.weight], "lr": 0.1}, {"params": [other.bias], "lr": 0.05}]
    fresh = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    again = make(fresh)
    if not scheduler_first:
        # The user had loaded the optimizer already, and the scheduler's constructor undid it.
        fresh.load_state_dict(optimizer.state_dict())
        again = make(fresh)
    restore(Captured(other, fresh, scheduler=again), saved)
    assert [group["lr"] for group in fresh.param_groups] == before
    assert train(other, fresh, again, 1) == rates


def test_several_named_schedulers_and_optimizers_are_kept_apart() -> None:
    def gan(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        torch.manual_seed(seed)
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        optimizers = {
            "g": torch.optim.Adam(models["g"].parameters(), lr=0.1),
            "d": torch.optim.SGD(models["d"].parameters(), lr=0.2, momentum=0.5),
        }
        schedulers = {
            "g": lrs.StepLR(optimizers["g"], 2),
            "d": lrs.ExponentialLR(optimizers["d"], 0.9),
        }
        return models, optimizers, schedulers

    def steps(models: Any, optimizers: Any, schedulers: Any) -> float:
        loss = models["d"](models["g"](torch.randn(3, 2))).square().sum()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for key in models:
            optimizers[key].step()
            schedulers[key].step()
        return float(loss.detach())

    one, two = gan(1), gan(2)
    first = Captured(one[0], one[1], scheduler=one[2])
    second = Captured(two[0], two[1], scheduler=two[2])
    steps(*one)
    saved = save(first)
    expected = [steps(*one) for _ in range(3)]
    restore(second, saved)
    assert list(first.parameters()) == ["g.weight", "g.bias", "d.weight", "d.bias"]
    assert "optimizer/d.weight/momentum_buffer" in saved.specs
    assert [steps(*two) for _ in range(3)] == expected
    assert everything(first) == everything(second)
    assert set(json.loads(saved.shared)["parts"]) == {
        "optimizer.g", "optimizer.d", "scheduler.g", "scheduler.d",
    }  # fmt: skip


def test_two_optimizers_over_one_model_go_on_bit_equal() -> None:
    def make(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        return net, {
            "body": torch.optim.AdamW(net[0].parameters()),
            "head": torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9),
        }

    def steps(net: nn.Module, optimizers: dict[str, Any]) -> float:
        net.zero_grad()
        loss = net(torch.randn(4, 3)).square().sum()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        return float(loss.detach())

    one, two = make(1), make(2)
    first, second = Captured(*one), Captured(*two)
    steps(*one)
    saved = save(first)
    expected = [steps(*one) for _ in range(3)]
    restore(second, saved)
    assert [steps(*two) for _ in range(3)] == expected
    assert everything(first) == everything(second)


def test_another_scheduler_than_the_saved_one_is_a_mismatch_unless_accepted() -> None:
    net, optimizer, scheduler = build(1, SCHEDULERS["sequential"])
    saved = save(Captured(net, optimizer, scheduler=scheduler))
    other, fresh, again = build(2, SCHEDULERS["step"])
    captured = Captured(other, fresh, scheduler=again)
    with pytest.raises(MismatchError, match=r"saved SequentialLR\[LinearLR, MultiStepLR\]"):
        restore(captured, saved)
    restore(captured, saved, accept=("scheduler",))
    assert again.last_epoch == 0


@pytest.mark.parametrize("side", ["saved", "live"])
def test_a_scheduler_on_one_side_only_is_a_mismatch_unless_accepted(side: str) -> None:
    net, optimizer, scheduler = build(1, SCHEDULERS["step"])
    other, fresh, again = build(2, SCHEDULERS["step"])
    saved = save(Captured(net, optimizer, scheduler=scheduler if side == "saved" else None))
    captured = Captured(other, fresh, scheduler=again if side == "live" else None)
    with pytest.raises(MismatchError) as caught:
        restore(captured, saved)
    assert (caught.value.missing, caught.value.unexpected) == (
        ([], ["scheduler"]) if side == "saved" else (["scheduler"], [])
    )
    assert "accept=('scheduler',)" in caught.value.next_step
    restore(captured, saved, accept=("scheduler",))


def test_the_scaler_goes_on_where_it_was() -> None:
    """Case 17: the scale jumped back to 65,536."""
    net, optimizer, _ = build(1, SCHEDULERS["step"])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    captured = Captured(net, optimizer, scaler=scaler)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(4, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    saved = save(captured)

    other, fresh, _ = build(2, SCHEDULERS["step"])
    again = torch.amp.GradScaler("cpu")
    restore(Captured(other, fresh, scaler=again), saved)
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("saved_with", "live_with"),
    [(True, None), (None, True), (True, False), (False, True), (False, None)],
)
def test_a_scaler_that_is_left_out_is_refused_unless_accepted(
    saved_with: bool | None, live_with: bool | None
) -> None:
    """Case 17: left out, absent or disabled on one side."""

    def captured(seed: int, enabled: bool | None) -> Captured:
        net, optimizer, _ = build(seed, SCHEDULERS["step"])
        scaler = None if enabled is None else torch.amp.GradScaler("cpu", enabled=enabled)
        return Captured(net, optimizer, scaler=scaler)

    saved = save(captured(1, saved_with))
    live = captured(2, live_with)
    before = everything(live)
    with pytest.raises(MismatchError, match="scaler"):
        restore(live, saved)
    assert everything(live) == before
    restore(live, saved, accept=("scaler",))


def test_a_disabled_scaler_is_kept_as_one() -> None:
    net, optimizer, _ = build(1, SCHEDULERS["step"])
    captured = Captured(net, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    shared = captured.shared_values()
    assert shared["scalers"]["scaler"]["state"] == {}
    assert shared["parts"]["scaler"] == "disabled"
    restore(captured, save(captured))


def test_a_scheduler_whose_state_cannot_be_kept_is_refused_with_its_path() -> None:
    net, optimizer, _ = build(1, SCHEDULERS["step"])
    scheduler = lrs.StepLR(optimizer, 3)
    scheduler.callback = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValueError) as caught:
        Captured(net, optimizer, scheduler={"main": scheduler})
    assert caught.value.path == "scheduler.main/callback"


def test_saving_leaves_no_reference_to_a_live_scheduler() -> None:
    net, optimizer, scheduler = build(1, SCHEDULERS["multi_step"])
    captured = Captured(net, optimizer, scheduler=scheduler)
    shared = captured.shared_values()
    before = json.dumps(shared)
    train(net, optimizer, scheduler, 3)
    scheduler.milestones[99] = 1
    assert json.dumps(shared) == before
