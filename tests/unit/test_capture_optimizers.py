"""Every optimizer of torch goes on bit-equal after its state went through bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dist_ckpt.capture import Captured, check_shared
from dist_ckpt.errors import CorruptFileError, MismatchError, UnsupportedValueError
from dist_ckpt.slices import Role, TensorSpec
from helpers.capturing import everything, fill, prepare, restore, save

Make = Callable[[Any], torch.optim.Optimizer]


def make_net(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(dtype)


def step(net: nn.Module, optimizer: Any) -> float:
    inputs = torch.randn(6, 5, dtype=next(net.parameters()).dtype)
    target = torch.randn(6, 3, dtype=inputs.dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    loss = optimizer.step(closure)
    return float(loss.detach())


def check_goes_on_bit_equal(
    make: Make,
    *,
    dtype: torch.dtype = torch.float32,
    params: Callable[[nn.Module], Any] | None = None,
) -> Captured:
    """Train 3, save, train 3; restore into fresh objects of another seed, train 3: all equal."""
    params = params or (lambda net: net.parameters())
    net = make_net(1, dtype)
    optimizer = make(params(net))
    first = Captured(net, optimizer)
    for _ in range(3):
        step(net, optimizer)
    saved = save(first)
    losses = [step(net, optimizer) for _ in range(3)]

    other = make_net(2, dtype)
    other_optimizer = make(params(other))
    second = Captured(other, other_optimizer)
    restore(second, saved)
    assert everything(second)[:-2] == (saved.specs, saved.tensors, saved.stateless, saved.shared)
    assert [step(other, other_optimizer) for _ in range(3)] == losses
    assert everything(second) == everything(first)
    return second


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adam_tensor_betas": lambda p: torch.optim.Adam(
        p, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False, capturable=False
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "lbfgs_wolfe": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_equal_with(name: str) -> None:
    check_goes_on_bit_equal(OPTIMIZERS[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_goes_on_bit_equal_in_another_dtype(dtype: torch.dtype) -> None:
    check_goes_on_bit_equal(OPTIMIZERS["adamw_loop"], dtype=dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_and_adamw_side_by_side_go_on_bit_equal() -> None:
    def build(seed: int) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
        net = make_net(seed)
        flat = [p for p in net.parameters() if p.ndim != 2]
        square = [p for p in net.parameters() if p.ndim == 2]
        return net, {"muon": torch.optim.Muon(square), "adamw": torch.optim.AdamW(flat)}

    def train(net: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        for optimizer in optimizers.values():
            step(net, optimizer)

    net, optimizers = build(1)
    first = Captured(net, optimizers)
    train(net, optimizers)
    saved = save(first)
    train(net, optimizers)
    other, others = build(2)
    second = Captured(other, others)
    restore(second, saved)
    train(other, others)
    assert everything(second) == everything(first)


def test_every_group_is_whole_though_one_is_empty() -> None:
    """Case 40: later groups keep their lr and betas."""

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        first, second = list(net.parameters())[:2], list(net.parameters())[2:]
        return [
            {"params": first, "lr": 0.1, "betas": (0.8, 0.9)},
            {"params": [], "lr": 0.2},
            {"params": second, "weight_decay": 0.5, "name": "late", "tags": {1: "x"}},
        ]

    net = make_net(1)
    optimizer = torch.optim.AdamW(groups(net), lr=0.01)
    step(net, optimizer)
    optimizer.param_groups[2]["lr"] = 0.7
    optimizer.param_groups[1]["betas"] = (0.1, 0.2)
    saved = save(Captured(net, optimizer))

    other = make_net(2)
    fresh = torch.optim.AdamW(groups(other), lr=0.01)
    held = fresh.param_groups[2]
    restore(Captured(other, fresh), saved)
    without = [
        [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
        for o in (optimizer, fresh)
    ]
    assert without[0] == without[1]
    assert list(without[0][2]) == list(without[1][2])
    assert fresh.param_groups[2] is held, "schedulers hold references to the groups"
    assert type(held["betas"]) is tuple
    check_goes_on_bit_equal(lambda p: torch.optim.AdamW(p, lr=0.01), params=groups)


def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    lr = torch.tensor(0.5)
    net = make_net(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, foreach=False)
    saved = save(Captured(net, optimizer))
    lr.fill_(0.125)
    restore(Captured(net, optimizer), saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_tensors_inside_a_setting_are_filled_in_place_too() -> None:
    betas = torch.tensor(0.5), torch.tensor(0.75)
    net = make_net(1)
    optimizer = torch.optim.Adam(net.parameters(), betas=betas, foreach=False)
    optimizer.param_groups[0]["mine"] = [torch.tensor(1.0), 2]
    saved = save(Captured(net, optimizer))
    for beta in betas:
        beta.fill_(0.125)
    optimizer.param_groups[0]["mine"] = [held := torch.tensor(3.0), 4]
    restore(Captured(net, optimizer), saved)
    group = optimizer.param_groups[0]
    assert type(group["betas"]) is tuple
    assert all(found is beta for found, beta in zip(group["betas"], betas, strict=True))
    assert [beta.item() for beta in betas] == [0.5, 0.75]
    assert group["mine"][0] is held
    assert group["mine"] == [torch.tensor(1.0), 2]


def test_how_an_update_is_computed_stays_as_built_here_and_is_noted() -> None:
    net = make_net(1)
    saved = save(Captured(net, torch.optim.AdamW(net.parameters(), lr=0.3, foreach=True)))
    other = make_net(2)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    captured = Captured(other, optimizer)
    restore(captured, saved)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["foreach"] is None
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert any("fused" in note for note in captured.notes)


class WideMoments(torch.optim.Optimizer):
    """Moments wider than their parameter, a plain number, an array, and a nested list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["step"] = 0
                        state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                        state["recent"] = []
                        state["odd/key.%"] = {0: torch.zeros(2), "0": torch.ones(2)}
                        state["counts"] = torch.zeros(3).numpy()
                    state["step"] += 1
                    state["counts"][state["step"] % 3] += 1
                    state["exp_avg"].lerp_(p.grad.float(), 0.1)
                    state["recent"] = [*state["recent"][-1:], p.grad.clone()]
                    state["odd/key.%"][0] += state["odd/key.%"]["0"]
                    p.sub_((group["lr"] * state["exp_avg"]).to(p.dtype))
        return loss


def test_fp32_moments_of_bf16_weights_stay_fp32() -> None:
    captured = check_goes_on_bit_equal(WideMoments, dtype=torch.bfloat16)
    specs = {item.spec.key: item.spec for item in captured.tensors()}
    assert specs["model/0.weight"].dtype == "bfloat16"
    assert specs["optimizer/0.weight/exp_avg"].dtype == "float32"
    assert "optimizer/0.weight/recent.1" in specs
    assert {
        "optimizer/0.weight/odd%2Fkey%2E%25.[0]",
        "optimizer/0.weight/odd%2Fkey%2E%25.0",
    } <= set(specs)
    assert specs["optimizer/0.weight/counts"].role is Role.OPTIMIZER


class SharedStep(torch.optim.Optimizer):
    """One counter tensor for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            self.state[p].setdefault("step", self.state[params[0]].get("step", self.count))
        self.state[params[0]]["step"] += 1
        with torch.no_grad():
            for p in params:
                p.sub_(p.grad / self.state[p]["step"])
        return loss


def test_one_tensor_in_two_states_is_one_again() -> None:
    captured = check_goes_on_bit_equal(SharedStep)
    keys = [item.spec.key for item in captured.tensors() if item.spec.role is Role.OPTIMIZER]
    assert keys == ["optimizer/0.weight/step"]


class Counting(torch.optim.SGD):
    """State without any tensor."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return loss


@pytest.mark.parametrize("kind", [Counting, SharedStep])
def test_state_without_a_tensor_of_its_own_is_kept_though_called_stateless(kind: Any) -> None:
    net, other = make_net(1), make_net(2)
    optimizer, fresh = kind(net.parameters()), kind(other.parameters())
    for _ in range(2):
        step(net, optimizer)
    saved = save(Captured(net, optimizer))
    assert saved.stateless == []
    own = {spec.param for spec in saved.specs.values() if spec.role is Role.OPTIMIZER}
    saved.stateless = [name for name, _ in net.named_parameters() if name not in own]
    assert len(saved.stateless) >= 3
    restore(Captured(other, fresh), saved)
    restored = [fresh.state[p] for p in other.parameters()]
    assert restored == [optimizer.state[p] for p in net.parameters()]


def test_frozen_and_unused_parameters_stay_without_state() -> None:
    net = make_net(1)
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    saved = save(Captured(net, optimizer))
    assert saved.stateless == ["0.weight"]
    assert "model/0.weight" in saved.specs

    other = make_net(2)
    fresh = torch.optim.AdamW(other.parameters())
    step(other, fresh)
    assert other[0].weight in fresh.state
    restore(Captured(other, fresh), saved)
    assert other[0].weight not in fresh.state
    assert torch.equal(other[0].weight, net[0].weight)


def test_restore_runs_no_step_and_creates_no_state_by_looking() -> None:
    net = make_net(1)
    optimizer = torch.optim.AdamW(net.parameters())
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    captured = Captured(net, optimizer)
    saved = save(captured)
    restore(captured, saved)
    assert steps == []
    assert len(optimizer.state) == 0


def test_state_dict_of_the_restored_optimizer_is_torchs_own() -> None:
    net, other = make_net(1), make_net(2)
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    fresh = torch.optim.AdamW(other.parameters(), amsgrad=True)
    for _ in range(2):
        step(net, optimizer)
    restore(Captured(other, fresh), save(Captured(net, optimizer)))
    one, two = optimizer.state_dict(), fresh.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert [list(state) for state in one["state"].values()] == [
        list(state) for state in two["state"].values()
    ]
    assert {t.device.type for state in two["state"].values() for t in state.values()} == {"cpu"}


def test_the_groups_own_order_of_parameters_is_restored_for_lbfgs() -> None:
    net, other = make_net(1), make_net(2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    fresh = torch.optim.LBFGS(reversed(list(other.parameters())), max_iter=3)
    first, second = Captured(net, optimizer), Captured(other, fresh)
    step(net, optimizer)
    restore(second, save(first))
    assert [id(p) for p in fresh._params] == [id(p) for p in other.parameters()]
    losses = []
    for model, opt in ((net, optimizer), (other, fresh)):
        torch.manual_seed(0)
        losses.append([step(model, opt) for _ in range(2)])
    assert losses[0] == losses[1]
    assert everything(first) == everything(second)


def test_moments_come_after_all_weights_and_in_their_order() -> None:
    net = make_net(1)
    net.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.AdamW(reversed(list(net.parameters())))
    step(net, optimizer)
    captured = Captured(net, optimizer)
    specs = [item.spec for item in captured.tensors()]
    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [spec.key for spec in specs] == [
        *[f"model/{name}" for name in names],
        *[f"optimizer/{name}/exp_avg" for name in names],
        *[f"optimizer/{name}/exp_avg_sq" for name in names],
        *[f"optimizer/{name}/step" for name in names],
        "model/seen",
    ]
    roles = [specs[index].role for index in (0, 4, 8, 12, 16)]
    assert roles == [Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.OPTIMIZER, Role.BUFFER]
    assert specs[5].param == "0.bias"


@pytest.mark.parametrize("name", ["adam", "adam_amsgrad", "adamw_fused", "sgd", "sgd_momentum"])
def test_the_tensors_after_the_first_update_are_predicted(name: str) -> None:
    net = make_net(1)
    net[3].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[name](net.parameters())
    captured = Captured(net, optimizer)
    predicted = captured.predicted_tensors()
    assert len(optimizer.state) == 0
    step(net, optimizer)
    actual = [item.spec for item in captured.tensors()]
    assert predicted == actual
    assert captured.predicted_tensors() == actual


def test_what_an_unknown_optimizer_will_hold_is_not_predicted() -> None:
    net = make_net(1)
    assert Captured(net, torch.optim.Adadelta(net.parameters())).predicted_tensors() is None


def test_live_tensors_share_memory_and_need_no_gradient() -> None:
    net = make_net(1)
    net[0].weight.data = net[0].weight.data.t().contiguous().t()
    captured = Captured(net, torch.optim.SGD(net.parameters()))
    live = {item.spec.key: item.tensor for item in captured.tensors()}
    assert not live["model/0.weight"].is_contiguous()
    assert not live["model/0.weight"].requires_grad
    assert live["model/0.weight"].data_ptr() == net[0].weight.data_ptr()
    fill(live["model/0.bias"], bytes(4 * 8))
    assert not net[0].bias.any()


def test_channels_last_moments_keep_their_memory_format() -> None:
    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net: Any = nn.Conv2d(3, 4, 2)
        net.to(memory_format=torch.channels_last)
        return net, torch.optim.AdamW(net.parameters())

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net(torch.ones(2, 3, 4, 4)).square().sum().backward()
        optimizer.step()

    (net, optimizer), (other, fresh) = build(1), build(2)
    train(net, optimizer)
    restore(Captured(other, fresh), save(Captured(net, optimizer)))
    moment = fresh.state[other.weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moment, optimizer.state[net.weight]["exp_avg"])


class Rotating(torch.optim.Optimizer):
    """As SOAP: state is what `torch.linalg.eigh` returns, which is column-major."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if p.dim() == 2 and not state:
                state["Q"] = torch.linalg.eigh(p.grad @ p.grad.T).eigenvectors
                state["square"] = torch.zeros_like(p).t().contiguous().t()
            if state:
                state["square"].lerp_((state["Q"].T @ p.grad).square(), 0.05)
                p.sub_(state["Q"] @ (state["square"].sqrt() + p.grad), alpha=self.defaults["lr"])


def test_the_dims_of_state_lie_in_the_order_in_which_they_lay() -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = net(torch.randn(16, 5)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    net, other = nn.Linear(5, 31), nn.Linear(5, 31)
    optimizer, fresh = Rotating(net.parameters()), Rotating(other.parameters())
    train(net, optimizer)
    state = optimizer.state[net.weight]
    assert not state["Q"].is_contiguous()
    saved = save(Captured(net, optimizer))
    restore(Captured(other, fresh), saved)
    for key in ("Q", "square"):
        assert fresh.state[other.weight][key].stride() == state[key].stride(), key
    assert everything(Captured(other, fresh)) == everything(Captured(net, optimizer))
    losses = train(net, optimizer)
    assert train(other, fresh) == losses
    restore(Captured(other, fresh), saved)  # into state that is there and fits
    assert train(other, fresh) == losses
    other.weight.data = other.weight.data.t().contiguous().t()
    fresh.state[other.weight]["Q"] = state["Q"].contiguous()
    restore(Captured(other, fresh), saved)
    assert fresh.state[other.weight]["Q"].stride() == state["Q"].stride()


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], [0, 1, 2], "10", [0, True], [1.0, 0.0]])
def test_an_order_of_dims_that_is_none_is_a_corrupt_file(order: Any) -> None:
    net = nn.Linear(2, 2)
    optimizer = Rotating(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = save(Captured(net, optimizer))
    shared = json.loads(saved.shared)
    assert shared["optimizers"][""]["orders"]["weight"]["Q"] == [1, 0]
    shared["optimizers"][""]["orders"]["weight"]["Q"] = order
    saved.shared = json.dumps(shared)
    fresh = Captured(net := nn.Linear(2, 2), Rotating(net.parameters()))

    def check() -> None:
        check_shared(shared)
        prepare(fresh, saved)

    with pytest.raises(CorruptFileError):
        check()


def test_three_way_check_full_equals_uninterrupted_and_differs_from_weights_only() -> None:
    """Case 16: a load "with optimizer" must not equal a load of weights only."""
    net = make_net(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for _ in range(3):
        step(net, optimizer)
    saved = save(Captured(net, optimizer))
    losses = [step(net, optimizer) for _ in range(3)]

    def resumed(omit: tuple[str, ...]) -> list[float]:
        other = make_net(2)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
        captured = Captured(other, fresh)
        if not omit:
            restore(captured, saved)
        else:
            shared = json.loads(saved.shared)
            keys = {k: s for k, s in saved.specs.items() if k.startswith("model/")}
            every = list(captured.parameters())
            for key, tensor in captured.prepare(keys, every, shared, omit=omit).items():
                fill(tensor, saved.tensors[key])
            captured.load_shared(shared, omit=omit)
            captured.load_rng(json.loads(saved.rank))
        return [step(other, fresh) for _ in range(3)]

    full, cold = resumed(()), resumed(("optimizer",))
    assert full == losses
    assert cold[0] == losses[0], "the first loss is computed before the optimizer matters"
    assert cold[1:] != losses[1:]


def test_parameters_that_the_model_does_not_have_are_refused_with_a_hint() -> None:
    net, stranger = make_net(1), make_net(2)
    with pytest.raises(UnsupportedValueError, match=r"4 parameters.*\(8, 5\).*before") as caught:
        Captured(net, torch.optim.SGD(stranger.parameters()))
    assert caught.value.path == "optimizer"


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    net = make_net(1)
    both = {"a": torch.optim.SGD(net.parameters()), "b": torch.optim.SGD(net[0].parameters())}
    with pytest.raises(UnsupportedValueError, match=r"0\.weight is updated by two optimizers"):
        Captured(net, both)


def test_state_that_belongs_to_no_parameter_is_refused_by_its_name() -> None:
    net = make_net(1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state["global"] = {"n": 1}  # type: ignore[index]
    with pytest.raises(UnsupportedValueError, match="'global' is state of something"):
        Captured(net, optimizer)
    del optimizer.state["global"]  # type: ignore[arg-type]
    optimizer.state[torch.zeros(7)]["x"] = torch.zeros(1)
    with pytest.raises(UnsupportedValueError, match=r"shape \(7,\) is state of something"):
        Captured(net, optimizer)


def test_state_that_is_no_dict_is_refused() -> None:
    net = make_net(1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net[0].weight] = torch.zeros(3)
    with pytest.raises(UnsupportedValueError, match=r"0\.weight is a Tensor, not a dict"):
        Captured(net, optimizer)


def test_a_value_in_the_state_that_cannot_be_kept_is_refused_with_its_path() -> None:
    net = make_net(1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net[0].weight]["hook"] = {"f": [print]}
    with pytest.raises(UnsupportedValueError) as caught:
        Captured(net, optimizer)
    assert caught.value.path == "optimizer/0.weight/hook/f/0"
    optimizer.state.clear()
    optimizer.param_groups[0]["schedule"] = lambda x: x
    with pytest.raises(UnsupportedValueError) as caught:
        Captured(net, optimizer)
    assert caught.value.path == "optimizer/param_groups/0/schedule"


class Elsewhere(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lookahead": 3}


def test_an_optimizer_that_keeps_state_elsewhere_is_refused() -> None:
    net = make_net(1)
    with pytest.raises(UnsupportedValueError, match=r"\(Elsewhere\) keeps lookahead outside"):
        Captured(net, Elsewhere(net.parameters()))


def test_something_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="optimizer is a Linear"):
        Captured(make_net(1), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_another_optimizer_than_the_saved_one_is_a_mismatch_unless_accepted() -> None:
    net, other = make_net(1), make_net(2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    step(net, optimizer)
    saved = save(Captured(net, optimizer))
    kin = torch.optim.Adam(other.parameters(), lr=0.5)
    captured = Captured(other, kin)
    with pytest.raises(MismatchError, match=r"optimizer \(saved AdamW, here Adam\)") as caught:
        restore(captured, saved)
    assert "accept=('optimizer',)" in str(caught.value)
    restore(captured, saved, accept=("optimizer",))
    assert captured.accepted == ["optimizer: AdamW saved, Adam here"]
    assert captured.notes == ["optimizer goes on with the saved state and settings"]
    assert kin.param_groups[0]["lr"] == 0.25
    moments = [kin.state[p]["exp_avg"].tolist() for p in other.parameters()]
    assert moments == [optimizer.state[p]["exp_avg"].tolist() for p in net.parameters()]


class Subclass(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "build", "expected"),
    [
        ("AdamW", torch.optim.Adam, True),
        ("Adam", torch.optim.AdamW, True),
        ("SGD", Subclass, True),
        ("Subclass", torch.optim.SGD, True),
        ("AdamW", torch.optim.SGD, False),
        ("Adamax", torch.optim.RAdam, False),
        ("Optimizer", torch.optim.SGD, False),
    ],
)
def test_state_means_something_to_an_optimizer_above_or_below(
    kind: str, build: Callable[..., torch.optim.Optimizer], expected: bool
) -> None:
    from dist_ckpt.capture._fit import is_kin

    assert is_kin(kind, build([nn.Parameter(torch.zeros(1))], lr=0.1)) is expected


def test_an_accepted_optimizer_of_another_kind_begins_anew() -> None:
    """Momenta and settings of the one mean nothing to the other; what was built stays."""
    net, other = make_net(1), make_net(2)
    before = torch.optim.AdamW(net.parameters(), lr=0.25, weight_decay=0.5)
    step(net, before)
    saved = save(Captured(net, before))
    sgd = torch.optim.SGD([{"params": [p]} for p in other.parameters()], lr=0.125, momentum=0.5)
    captured = Captured(other, sgd)
    restore(captured, saved, accept=("optimizer",))
    assert [p.tolist() for p in other.parameters()] == [p.tolist() for p in net.parameters()]
    assert not sgd.state
    assert {(g["lr"], g["weight_decay"], g["momentum"]) for g in sgd.param_groups} == {
        (0.125, 0, 0.5)
    }
    assert not any("betas" in group for group in sgd.param_groups)
    assert captured.accepted == ["optimizer: AdamW saved, SGD here"]
    assert captured.notes == ["optimizer begins anew, with the settings it was built with"]
    step(other, sgd)
    assert set(sgd.state[other[0].weight]) == {"momentum_buffer"}


@pytest.mark.parametrize("how", ["accept", "omit"])
def test_one_of_two_optimizers_begins_anew_and_the_other_goes_on(how: str) -> None:
    def build(seed: int, kind: Callable[..., torch.optim.Optimizer]) -> Any:
        net = make_net(seed)
        kept = torch.optim.AdamW(net[0].parameters(), lr=0.25)
        return net, {"kept": kept, "other": kind(net[3].parameters(), lr=0.5)}

    def update(net: Any, optimizers: Any) -> None:
        net(torch.ones(2, 5)).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    net, optimizers = build(1, torch.optim.AdamW)
    update(net, optimizers)
    saved = save(Captured(net, optimizers))
    other, fresh = build(2, torch.optim.SGD if how == "accept" else torch.optim.AdamW)
    captured = Captured(other, fresh)
    given: dict[str, Any] = {how: ("optimizer.other",)}
    targets = captured.prepare(saved.specs, saved.stateless, json.loads(saved.shared), **given)
    captured.load_shared(json.loads(saved.shared), **given)
    assert not fresh["other"].state
    assert fresh["other"].param_groups[0]["lr"] == 0.5
    assert len(fresh["kept"].state) == 2
    assert {key for key in targets if key.startswith("optimizer/")} == {
        f"optimizer/0.{name}/{path}"
        for name in ("weight", "bias")
        for path in ("exp_avg", "exp_avg_sq", "step")
    }


class Tied(nn.Module):
    """Two names for one tensor, declared in either order."""

    out: Any
    emb: Any

    def __init__(self, *, out_first: bool) -> None:
        super().__init__()
        torch.manual_seed(int(out_first))
        names = ("out", "emb") if out_first else ("emb", "out")
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=False))
        self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.out(self.emb(x)).square().sum()
        return loss


@pytest.mark.parametrize("how", ["accept", "omit"])
def test_an_optimizer_begins_anew_whatever_name_of_a_tied_tensor_was_kept(how: str) -> None:
    net, other = Tied(out_first=False), Tied(out_first=True)
    before = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(2, 3)).backward()
    before.step()
    saved = save(Captured(net, before))
    captured = Captured(other, torch.optim.SGD(other.parameters(), lr=0.5))
    given: dict[str, Any] = {how: ("optimizer",)}
    shared = json.loads(saved.shared)
    targets = captured.prepare(saved.specs, saved.stateless, shared, **given)
    captured.load_shared(shared, **given)
    assert [key.split("/")[0] for key in targets] == ["model"]


def test_optimizers_that_are_left_out_may_have_any_keys() -> None:
    """Weights alone are loaded with one optimizer that stands for none."""
    net, other = make_net(1), make_net(2)
    optimizers = {
        "first": torch.optim.AdamW(net[0].parameters()),
        "second": torch.optim.AdamW(net[3].parameters()),
    }
    net(torch.ones(2, 5)).square().sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    saved = save(Captured(net, optimizers))
    captured = Captured(other, torch.optim.SGD(other.parameters()))
    shared = json.loads(saved.shared)
    targets = captured.prepare(saved.specs, saved.stateless, shared, omit=("optimizer",))
    captured.load_shared(shared, omit=("optimizer",))
    assert {key.split("/")[0] for key in targets} == {"model"}


def test_a_schedule_beside_an_optimizer_that_begins_anew_is_told_of() -> None:
    net, other = make_net(1), make_net(2)
    before = torch.optim.SGD(net.parameters(), lr=0.5)
    step(net, before)
    schedule = torch.optim.lr_scheduler.LambdaLR(before, lambda _: 1.0)
    saved = save(Captured(net, before, scheduler=schedule))
    anew = torch.optim.AdamW(other.parameters(), lr=0.125)
    again = torch.optim.lr_scheduler.LambdaLR(anew, lambda _: 1.0)
    captured = Captured(other, anew, scheduler=again)
    restore(captured, saved, accept=("optimizer",))
    assert anew.param_groups[0]["lr"] == 0.125
    assert captured.notes[-1] == (
        "scheduler goes on with what was saved, base_lrs too: it sets the rate from them"
    )


@pytest.mark.parametrize("word", ["optimizer", "optimizer.a", "scheduler", "scaler"])
def test_a_part_that_is_told_of_and_has_no_state_is_a_corrupt_file(word: str) -> None:
    net = make_net(1)
    shared = json.loads(save(Captured(net, torch.optim.SGD(net.parameters()))).shared)
    check_shared(shared)
    shared["parts"][word] = "SGD"
    shared["optimizers"].clear()
    with pytest.raises(CorruptFileError, match="shared"):
        check_shared(shared)


@pytest.mark.parametrize(
    ("path", "group", "expected"),
    [
        ("step", {"capturable": False, "fused": None}, True),
        ("step", {"capturable": True, "fused": None}, False),
        ("step", {"capturable": False, "fused": True}, False),
        ("mu_product", {"capturable": False}, True),
        ("row_var", {}, False),
        ("step", {}, True),
        ("old_dirs.0", {}, False),
    ],
)
def test_small_state_lies_where_torch_puts_it(path: str, group: Any, expected: bool) -> None:
    from dist_ckpt.capture._fit import lies_on_host

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert lies_on_host(path, group, optimizer, {}) is expected
    averaged = torch.optim.ASGD([nn.Parameter(torch.zeros(1))])
    assert lies_on_host(path, group, averaged, {}) is False


def test_small_state_of_a_foreign_optimizer_lies_where_it_was_saved() -> None:
    from dist_ckpt.capture._fit import lies_on_host

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert lies_on_host("scale", {}, optimizer, {"scale": "host"}) is True
    assert lies_on_host("step", {}, optimizer, {"step": "device"}) is False


@pytest.mark.parametrize("beside", [0, 1, 2], ids=["all on the host", "one beside", "all beside"])
def test_moments_lie_on_the_host_again_where_all_lay_there(beside: int) -> None:
    """Offloaded state. Parameters on "meta" stand for those on a device."""
    from dist_ckpt.capture._fit import StatePlan
    from dist_ckpt.capture._optim import encode_optimizer, read_states
    from dist_ckpt.capture._walk import view_models

    view = view_models(
        {"": nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)).to("meta")}
    )
    optimizer = torch.optim.SGD(view.parameters.values(), momentum=0.9)
    places = ["meta"] * beside + ["cpu"] * (2 - beside)
    for parameter, place in zip(view.parameters.values(), places, strict=True):
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, device=place)}
    states = read_states({"": optimizer}, view)
    saved = {"": encode_optimizer("", optimizer, view, states)}
    optimizer.state.clear()
    plan = StatePlan({"": optimizer}, view, read_states({"": optimizer}, view), saved, {})
    for name, parameter in view.parameters.items():
        key = f"optimizer/{name}/momentum_buffer"
        plan.add(key, TensorSpec(key, Role.OPTIMIZER, "float32", tuple(parameter.shape), (), name))
    found = [tensor.device.type for tensor in plan.build().values()]
    assert found == ["meta" if beside else "cpu"] * 2
