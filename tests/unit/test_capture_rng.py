"""Random number generators of all kinds go on exactly where they were."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_ckpt import rehearsal
from dist_ckpt.capture import Captured
from dist_ckpt.errors import CorruptFileError, MismatchError, UnsupportedValueError
from helpers.capturing import restore, save


def captured_of(**generators: Any) -> Captured:
    net = nn.Linear(1, 1)
    return Captured(net, torch.optim.SGD(net.parameters()), generators=generators)


def stir() -> None:
    """Leave every global generator in an odd place: half a normal pair cached, half a word used."""
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002
    torch.randn(1)


def test_global_generators_go_on_where_they_were() -> None:
    captured = captured_of()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    stir()
    saved = save(captured)
    draws = captured.rng_draws()
    assert captured.rng_draws() == draws, "draws are put back"
    following = [random.random(), float(np.random.random()), torch.rand(1).item()]  # noqa: NPY002
    stir()
    assert captured.rng_draws() != draws
    captured.load_rng(json.loads(saved.rank))
    assert captured.rng_draws() == draws
    assert [random.random(), float(np.random.random()), torch.rand(1).item()] == following  # noqa: NPY002


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators_of_every_kind_survive_as_plain_json(bits: str) -> None:
    """Case 22: states as integers and bytes, 128-bit ones too."""
    kind = getattr(np.random, bits)
    one, two = np.random.Generator(kind(1)), np.random.Generator(kind(2))
    one.integers(2**32, dtype=np.uint32)  # half a word waits
    saved = save(captured_of(noise=one))
    expected = [one.standard_normal(), int(one.integers(2**32, dtype=np.uint32)), one.random()]
    live = captured_of(noise=two)
    restore(live, saved)
    assert [
        two.standard_normal(),
        int(two.integers(2**32, dtype=np.uint32)),
        two.random(),
    ] == expected


def _same(make: Callable[[int], Any], draw: Callable[[Any], Any]) -> bool:
    one, two = make(1), make(2)
    draw(one)
    saved = save(captured_of(own=one))
    expected = [draw(one), draw(one)]
    live = captured_of(own=two)
    restore(live, saved)
    before = live.rng_draws()
    assert list(before) == ["python", "numpy", "torch", "generators.own"]
    return bool([draw(two), draw(two)] == expected)


def test_torch_and_python_generators_survive() -> None:
    assert _same(
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.randn(3, generator=g).tolist(),
    )
    assert _same(random.Random, lambda g: (g.gauss(0, 1), g.random()))


def test_rng_is_restored_by_nothing_but_load_rng() -> None:
    own = random.Random(1)
    captured = captured_of(own=own)
    saved = save(captured)
    stir()
    own.random()
    draws = captured.rng_draws()
    for key, tensor in captured.prepare(
        saved.specs, saved.stateless, json.loads(saved.shared)
    ).items():
        assert key in saved.tensors
        assert tensor.numel()
    captured.load_shared(json.loads(saved.shared))
    captured.load_rank(json.loads(saved.rank), lambda _: torch.zeros(0))
    assert captured.rng_draws() == draws


def test_a_generator_of_another_kind_is_a_mismatch_and_nothing_is_set() -> None:
    saved = save(captured_of(a=np.random.Generator(np.random.PCG64(1)), b=random.Random(1)))
    live = captured_of(a=np.random.Generator(np.random.Philox(1)), b=random.Random(2))
    draws = live.rng_draws()
    with pytest.raises(MismatchError, match="numpy:PCG64 and is numpy:Philox"):
        live.load_rng(json.loads(saved.rank))
    assert live.rng_draws() == draws
    live.load_rng(json.loads(saved.rank), accept=("generators.a",))
    assert live.rng_draws()["generators.b"] != draws["generators.b"]
    assert live.rng_draws()["generators.a"] == draws["generators.a"]


def test_a_missing_generator_is_a_mismatch_unless_accepted() -> None:
    saved = save(captured_of(a=random.Random(1)))
    live = captured_of(b=random.Random(1))
    with pytest.raises(MismatchError) as caught:
        restore(live, saved)
    assert caught.value.unexpected == ["generators.a"]
    assert caught.value.missing == ["generators.b"]
    with pytest.raises(MismatchError):
        live.load_rng(json.loads(saved.rank))
    restore(live, saved, accept=("generators",))


class Homemade:
    """Looks like a generator, isn't one."""


class OddBits(np.random.PCG64):
    """A bit generator of the user's own."""


@pytest.mark.parametrize(
    ("generator", "match"),
    [
        (Homemade(), r"generators\.own is a .*Homemade"),
        (random.SystemRandom(), "SystemRandom"),
        (np.random.Generator(OddBits(1)), "bit generator OddBits"),
    ],
)
def test_an_unknown_kind_of_generator_is_refused_by_name(generator: Any, match: str) -> None:
    with pytest.raises(UnsupportedValueError, match=match) as caught:
        captured_of(own=generator)
    assert caught.value.path == "generators.own"


def test_states_of_cuda_generators_are_left_out_where_there_is_no_cuda() -> None:
    """Case 49: a point of a CUDA run on a machine without CUDA."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    captured = captured_of(own=torch.Generator())
    values = json.loads(save(captured).rank)
    assert values["rng"]["cuda"] is None
    values["rng"]["cuda"] = values["rng"]["torch"]
    values["rng"]["named"]["own"]["kind"] = "torch:cuda"
    captured.load_rng(values)
    assert len(captured.notes) == 2
    assert "rng/cuda" in captured.notes[0]


class Machine:
    """CUDA devices of which only the generators exist; the current one is 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, current: int = 0) -> None:
        self.states = {index: self.state(index) for index in range(4)}
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: current)
        monkeypatch.setattr(cuda, "get_rng_state", lambda index=current: self.states[index])
        monkeypatch.setattr(cuda, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, index: int = 0) -> None:
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.states[index] = state.clone()

    @staticmethod
    def state(value: int) -> torch.Tensor:
        return torch.full((16,), value, dtype=torch.uint8)

    def held(self) -> list[int]:
        return [int(state[0]) for state in self.states.values()]


class OnDevice(nn.Parameter):
    """Says that it lies on cuda:1."""

    device = torch.device("cuda", 1)


def on_device_1() -> Captured:
    net = nn.Linear(1, 1)
    net.weight = OnDevice(net.weight.detach())
    return Captured(net, torch.optim.SGD(net.parameters()))


def moved(saved: list[int], here: list[int], notes: list[str]) -> dict[int, int]:
    """Return device → the state it goes on from, of states that were saved."""
    from dist_ckpt.capture._rng import _place_cuda

    placed = _place_cuda({str(index): bytes([index]) for index in saved}, here, notes)
    return {index: state[0] for index, state in placed.items()}


def test_cuda_states_of_the_models_devices_are_kept_besides_the_current_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 on cuda:1, without `set_device`."""
    machine = Machine(monkeypatch)
    captured = on_device_1()
    machine.states[1] = machine.state(71)
    values = json.loads(save(captured).rank)
    assert list(values["rng"]["cuda"]) == ["0", "1"]
    machine.states = {index: machine.state(9) for index in range(4)}
    captured.load_rng(values)
    assert machine.held() == [0, 71, 9, 9]
    assert captured.notes == []


def test_a_rehearsal_puts_back_the_cuda_states_of_the_models_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    net = nn.Linear(1, 1)
    net.weight = OnDevice(net.weight.detach())
    with rehearsal._put_back(net, None, {}):
        machine.states[1] = machine.state(9)
    assert machine.held() == [0, 1, 2, 3]


def test_a_point_with_the_one_cuda_state_of_earlier_versions_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    captured, two = captured_of(), on_device_1()
    values = json.loads(save(captured).rank)
    values["rng"]["cuda"] = {"$bytes": base64.b64encode(bytes([5] * 16)).decode()}
    captured.load_rng(values)
    assert machine.held() == [5, 1, 2, 3]
    assert captured.notes == []
    two.load_rng(values)
    assert machine.held() == [5, 5, 2, 3]
    assert two.notes == ["rng/cuda: cuda:0, cuda:1 go on from the one state that was saved"]


@pytest.mark.parametrize(
    ("saved", "here", "placed", "noted"),
    [
        ([0], [0], {0: 0}, []),
        ([0], [1], {1: 0}, []),
        ([0, 1], [0, 2], {0: 0, 2: 1}, []),
        ([0, 1], [1], {1: 1}, ["states of cuda:0 left out"]),
        ([1], [0, 1], {1: 1}, ["nothing saved for cuda:0"]),
        ([0, 1], [2], {}, ["states of cuda:0, cuda:1 left out", "nothing saved for cuda:2"]),
    ],
)
def test_a_cuda_state_goes_to_another_device_only_where_one_is_left_on_both_sides(
    saved: list[int], here: list[int], placed: dict[int, int], noted: list[str]
) -> None:
    notes: list[str] = []
    assert moved(saved, here, notes) == placed
    assert len(notes) == len(noted)
    assert all(text in note for text, note in zip(noted, notes, strict=True))


@pytest.mark.parametrize(
    "forged",
    [{"0": 5}, {"a": {"$bytes": "AAAA"}}, {"9" * 5000: {"$bytes": "AAAA"}}, [], {"$bytes": "AA=="}],
    ids=["number", "name", "long", "list", "short"],
)
def test_forged_cuda_states_are_a_corrupt_file(
    monkeypatch: pytest.MonkeyPatch, forged: Any
) -> None:
    Machine(monkeypatch)
    captured = captured_of()
    values = json.loads(save(captured).rank)
    values["rng"]["cuda"] = forged
    with pytest.raises(CorruptFileError, match="rng/cuda"):
        captured.load_rng(values)


@pytest.mark.parametrize(
    ("place", "forged"),
    [
        ("python", {"$tuple": [3, {"$tuple": [1, 2]}, None]}),
        ("python", {"$tuple": []}),
        ("python", 5),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": 1, "pos": 2}}),
        ("numpy", {"bit_generator": "MT19937"}),
        ("numpy", {"$tuple": []}),
        ("numpy", {}),
        ("numpy", None),
        ("torch", {"$bytes": "AAAA"}),
        ("torch", {"$tuple": []}),
    ],
)
def test_a_state_that_its_generator_does_not_take_is_a_corrupt_file(
    place: str, forged: Any
) -> None:
    captured = captured_of()
    values = json.loads(save(captured).rank)
    values["rng"][place] = forged
    with pytest.raises(CorruptFileError, match=f"rng/{place}"):
        captured.load_rng(values)
