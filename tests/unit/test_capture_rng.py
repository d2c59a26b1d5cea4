"""Random number generators of all kinds go on exactly where they were."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
