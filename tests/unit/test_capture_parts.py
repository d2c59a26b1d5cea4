"""Data, policy and the user's own objects: kept by their state_dict, refused by their path."""

from __future__ import annotations

import copy
import json
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dist_ckpt.capture import Captured
from dist_ckpt.errors import MismatchError, UnsupportedValueError
from helpers.capturing import everything, prepare, restore, save


class Box:
    """Holds whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def captured_of(**parts: Any) -> Captured:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    return Captured(net, torch.optim.SGD(net.parameters()), **parts)


def test_everything_of_the_user_comes_back_as_it_was() -> None:
    state: dict[str, Any] = {
        "cursor": 20,
        "permutation": np.arange(24).reshape(4, 6)[:, ::2],
        "best": float("inf"),
        "arms": {1: (0.5, "text"), "1": [None, True]},
        "counts": Counter({3: 2}),
        "recent": deque([1, 2], maxlen=2),
        "shadow": [torch.arange(6).reshape(2, 3).t(), torch.tensor(2.5, dtype=torch.bfloat16)],
        "empty": torch.zeros(0, 3),
        "big": 2**127,
    }
    frozen = np.arange(3)
    frozen.flags.writeable = False
    parts = {"data": Box(state), "policy": Box({"pulls": [1, 2]}), "extra": {"x.y": Box([frozen])}}
    live_parts: dict[str, Any] = {
        "data": Box(None),
        "policy": Box(None),
        "extra": {"x.y": Box(None)},
    }
    saved = save(captured_of(**parts))
    live = captured_of(**live_parts)
    restore(live, saved)
    found = live_parts["data"].state
    assert list(found) == list(state)
    assert np.array_equal(found["permutation"], state["permutation"])
    assert found["permutation"].dtype == state["permutation"].dtype
    assert torch.equal(found["shadow"][0], state["shadow"][0])
    assert found["shadow"][1].dtype == torch.bfloat16
    assert found["empty"].shape == (0, 3)
    for key in ("cursor", "best", "arms", "counts", "recent", "big"):
        assert (found[key], type(found[key])) == (state[key], type(state[key])), key
    assert found["recent"].maxlen == 2
    assert live_parts["policy"].state == {"pulls": [1, 2]}
    assert live_parts["extra"]["x.y"].state[0].tolist() == [0, 1, 2]
    assert {item[0] for item in saved.own} >= {"data/permutation", "data/shadow/0", "extra/x.y/0"}


def test_an_averaged_model_in_extra_keeps_its_own_names_and_goes_on() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(net)
    net[0].weight.data.add_(1.0)
    average.update_parameters(net)
    saved = save(Captured(net, torch.optim.SGD(net.parameters()), extra={"ema": average}))
    assert "extra/ema/module.0.weight" in {item[0] for item in saved.own}

    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    again = AveragedModel(other)
    restore(Captured(other, torch.optim.SGD(other.parameters()), extra={"ema": again}), saved)
    for key, value in average.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_saving_changes_nothing_and_keeps_no_reference() -> None:
    box = Box({"list": [1], "tensor": torch.zeros(2)})
    captured = captured_of(extra={"box": box})
    before = copy.deepcopy(box.state)
    saved = save(captured)
    box.state["list"].append(2)
    assert json.loads(saved.rank)["values"]["extra.box"]["list"] == [1]
    assert before["list"] == [1]
    assert box.loads == 0


def test_data_is_loaded_last() -> None:
    order: list[str] = []

    class Noting(Box):
        def load_state_dict(self, state: Any) -> None:  # noqa: ARG002
            order.append(self.state)

    parts = {"extra": {"e": Noting("extra")}, "policy": Noting("policy"), "data": Noting("data")}
    captured = captured_of(**parts)
    restore(captured, save(captured))
    assert order == ["extra", "policy", "data"]


@pytest.mark.parametrize("part", ["data", "policy", "extra.ema"])
@pytest.mark.parametrize("side", ["saved", "live"])
def test_a_part_on_one_side_only_is_a_mismatch_unless_accepted(part: str, side: str) -> None:
    def parts() -> dict[str, Any]:
        return {"extra": {"ema": Box(1)}} if part == "extra.ema" else {part: Box(1)}

    saved = save(captured_of(**(parts() if side == "saved" else {})))
    live = captured_of(**(parts() if side == "live" else {}))
    before = everything(live)
    with pytest.raises(MismatchError) as caught:
        prepare(live, saved)
    assert (caught.value.unexpected if side == "saved" else caught.value.missing) == [part]
    assert f"accept=({part!r},)" in str(caught.value)
    with pytest.raises(MismatchError):
        live.load_shared(json.loads(saved.shared))
    with pytest.raises(MismatchError):
        live.load_rank(json.loads(saved.rank), lambda _: torch.zeros(0))
    assert everything(live) == before
    restore(live, saved, accept=(part,))


def test_what_is_omitted_stays_as_it_is_here() -> None:
    saved = save(captured_of(data=Box(1), policy=Box(1)))
    boxes = Box(2), Box(2)
    live = captured_of(data=boxes[0], policy=boxes[1])
    live.load_rank(json.loads(saved.rank), lambda _: torch.zeros(0), omit=("policy",))
    assert (boxes[0].state, boxes[1].state) == (1, 2)


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"data": Box({"a": [0, print]})}, "data/a/1"),
        ({"policy": Box({"f": lambda: 0})}, "policy/f"),
        ({"extra": {"ema": Box({"m": nn.Linear(1, 1)})}}, "extra/ema/m"),
        ({"extra": {"set": Box({1: {2: object()}})}}, "extra/set/[1]/[2]"),
        ({"data": object()}, "data"),
        ({"extra": {"x": 3}}, "extra.x"),
        ({"scheduler": {"s": object()}}, "scheduler.s"),
        ({"scaler": 1.0}, "scaler"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_construction_with_its_path(
    parts: dict[str, Any], path: str
) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        captured_of(**parts)
    assert caught.value.path == path
    assert caught.value.next_step


class Failing(Box):
    def state_dict(self) -> Any:
        raise RuntimeError("mine")


class FailingLoad(Box):
    def load_state_dict(self, state: Any) -> None:  # noqa: ARG002
        raise RuntimeError("mine")


def test_an_error_of_the_user_says_which_part_it_was() -> None:
    with pytest.raises(RuntimeError, match="mine") as caught:
        captured_of(extra={"e": Failing(1)})
    assert caught.value.__notes__ == ["while asking extra.e for its state"]
    captured = captured_of(extra={"e": FailingLoad(1)})
    with pytest.raises(RuntimeError, match="mine") as caught:
        restore(captured, save(captured))
    assert caught.value.__notes__ == ["while giving extra.e its saved state"]


def test_devices_of_another_machine_come_back_as_the_cpu() -> None:
    """Case 49: device names in the state of a CUDA run."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    box = Box({"device": torch.device("cuda", 1), "t": torch.ones(2)})
    captured = captured_of(extra={"box": box})
    saved = save(captured)
    values = json.loads(saved.rank)
    values["values"]["extra.box"]["t"]["$tensor"]["device"] = "cuda"
    saved.rank = json.dumps(values)
    restore(captured, saved)
    assert box.state["device"] == torch.device("cpu")
    assert box.state["t"].device.type == "cpu"
    assert box.state["t"].tolist() == [1.0, 1.0]
