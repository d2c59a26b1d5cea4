"""Comparing live values: what agrees, what is a finding, and how it is told."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_ckpt import Comparison, compare
from dist_ckpt.errors import NotFoundError, SettingError, UnsupportedValueError, UsageError


def kinds(found: Comparison) -> dict[str, str]:
    return {finding.path: str(finding.kind) for finding in found.findings}


def values() -> dict[str, Any]:
    return {
        "weights": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "array": np.arange(4, dtype=np.int32),
        "scalar": np.float64(0.25),
        "losses": [0.5, 0.25],
        "rows": [[1, 2], [3, 4]],
        "betas": (0.9, 0.999),
        "name": "Adam",
        "raw": b"\x00\x01",
        "nothing": None,
        "flag": True,
        "by step": {1: "one", 2: "two"},
        "dtype": torch.float32,
        "set": {1, 2},
        "milestones": Counter({3: 1}),
    }


def test_equal_values_of_every_kind_agree_with_largest_difference_0() -> None:
    found = compare(values(), values())
    assert found.agrees
    assert found.findings == ()
    assert found.max_abs == 0.0
    assert found.num_values == 6 + 4 + 1 + 2 + 4 + 2 + 1 + 1 + 1 + 1 + 2 + 1 + 1 + 1
    assert "agree" in str(found)


def test_a_difference_beyond_the_tolerance_is_found_with_its_path_place_and_values() -> None:
    a, b = values(), values()
    b["weights"][1, 2] += 0.5
    found = compare(a, b)
    assert not found.agrees
    (finding,) = found.findings
    assert (finding.path, finding.kind, finding.index) == ("weights", "value", (1, 2))
    assert (finding.a, finding.b, finding.max_abs, finding.num_values) == (5.0, 5.5, 0.5, 1)
    assert "1 of 6 values differ, the largest at [1, 2]: 5.0 and 5.5 differ by 0.5" in str(found)


def test_the_tolerance_is_stated_and_what_it_accepts_is_still_named_as_largest() -> None:
    found = compare([1.0, 2.0], [1.0, 2.0 + 1e-13])
    assert found.agrees
    assert (found.atol, found.rtol) == (1e-12, 0.0)
    assert 0 < found.max_abs < 1e-12
    (largest,) = found.largest
    assert (largest.path, largest.index) == ("", (1,))
    assert "absolute tolerance 1e-12, relative 0" in str(found)
    assert not compare([1.0, 2.0], [1.0, 2.0 + 1e-13], atol=1e-14).agrees


def test_the_relative_tolerance_counts_from_the_larger_side() -> None:
    a, b = {"x": torch.tensor([100.0, 1e-8])}, {"x": torch.tensor([101.0, 1e-8])}
    assert compare(a, b, atol=0, rtol=0.01).agrees
    assert compare(b, a, atol=0, rtol=0.01).agrees
    assert not compare(a, b, atol=0, rtol=0.009).agrees


def test_the_largest_differences_are_named_largest_first_and_ten_at_most() -> None:
    a = {f"p{number}": float(number) for number in range(30)}
    b = {key: value + value / 100 for key, value in a.items()}
    found = compare(a, b, atol=1.0)
    assert found.agrees
    assert [one.path for one in found.largest] == [f"p{number}" for number in range(29, 19, -1)]
    assert found.max_abs == pytest.approx(0.29)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, torch.tensor, np.float64, lambda x: [1.0, x]])
def test_a_value_that_is_not_finite_is_never_accepted_even_when_both_sides_have_it(
    value: float, wrap: Any
) -> None:
    found = compare({"loss": wrap(value)}, {"loss": wrap(value)}, atol=1e300)
    assert kinds(found) == {"loss": "non-finite"}
    json.dumps(found.to_json(), allow_nan=False)


def test_nan_on_one_side_and_a_difference_elsewhere_are_two_findings() -> None:
    a = torch.tensor([1.0, 2.0, math.nan])
    found = compare({"x": a}, {"x": torch.tensor([1.5, 2.0, 3.0])})
    assert [str(finding.kind) for finding in found.findings] == ["non-finite", "value"]
    assert found.max_abs == 0.5
    assert found.findings[0].index == (2,)


def test_infinities_that_are_meant_to_be_are_declared_by_path_and_nan_never_is() -> None:
    a, b = {"s": {"best": math.inf, "x": 1.0}}, {"s": {"best": math.inf, "x": 1.0}}
    found = compare(a, b, expect_infinite=["*/best"])
    assert found.agrees
    assert "equal infinities were expected at */best" in str(found)
    assert not compare(a, b, expect_infinite=["*/x"]).agrees
    b["s"]["best"] = -math.inf
    assert not compare(a, b, expect_infinite=["*/best"]).agrees
    mask = torch.full((3,), -math.inf)
    assert compare({"mask": mask}, {"mask": mask.clone()}, expect_infinite=["mask"]).agrees
    mask[0] = math.nan
    assert not compare({"mask": mask}, {"mask": mask.clone()}, expect_infinite=["mask"]).agrees


@pytest.mark.parametrize(
    ("a", "b", "path", "kind"),
    [
        ({"x": 1, "y": 2}, {"x": 1}, "y", "missing"),
        ({"x": 1}, {"x": 1, "y": 2}, "y", "extra"),
        ({"x": {1: 0}}, {"x": {"1": 0}}, "x/[1]", "missing"),
        ({"x": {1: 0}}, {"x": {True: 0}}, "x/[1]", "missing"),
        ({"x": 1}, {"x": 1.0}, "x", "type"),
        ({"x": 1}, {"x": True}, "x", "type"),
        ({"x": None}, {"x": 0}, "x", "type"),
        ({"x": [1]}, {"x": (1,)}, "x", "type"),
        ({"x": "1"}, {"x": b"1"}, "x", "type"),
        ({"x": {}}, {"x": []}, "x", "type"),
        ({"x": torch.zeros(2)}, {"x": np.zeros(2)}, "x", "type"),
        ({"x": [1.0, 2.0]}, {"x": [1.0]}, "x", "length"),
        ({"x": torch.zeros(2, 3)}, {"x": torch.zeros(3, 2)}, "x", "shape"),
        ({"x": torch.zeros(())}, {"x": torch.zeros(1)}, "x", "shape"),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2).double()}, "x", "dtype"),
        ({"x": np.zeros(2, "i4")}, {"x": np.zeros(2, "i8")}, "x", "dtype"),
        ({"x": "Adam"}, {"x": "SGD"}, "x", "value"),
        ({"x": b"ab"}, {"x": b"ac"}, "x", "value"),
        ({"x": {1, 2}}, {"x": {1, 3}}, "x", "value"),
        ({"x": 2**70}, {"x": 2**70 + 1}, "x", "value"),
        ({"x": torch.tensor([2**60])}, {"x": torch.tensor([2**60 + 1])}, "x", "value"),
        ({"x": torch.tensor([True])}, {"x": torch.tensor([False])}, "x", "value"),
        ({"x": 1j}, {"x": 2j}, "x", "value"),
        ({"x": np.array(["a"])}, {"x": np.array(["b"])}, "x", "value"),
    ],
)
def test_each_kind_of_difference_is_found_in_either_order(
    a: Any, b: Any, path: str, kind: str
) -> None:
    assert kinds(compare(a, b))[path] == kind
    swapped = {"missing": "extra", "extra": "missing"}
    assert kinds(compare(b, a))[path] == swapped.get(kind, kind)
    json.dumps(compare(a, b).to_json(), allow_nan=False)


def test_no_tolerance_makes_whole_numbers_agree_that_differ() -> None:
    assert not compare(
        {"step": 5, "x": torch.tensor([5])}, {"step": 6, "x": torch.tensor([6])}, atol=9
    ).agrees


@pytest.mark.parametrize("make", [float, torch.tensor, np.float32])
def test_without_tolerance_bits_are_compared_so_a_zero_has_a_sign(make: Any) -> None:
    a, b = {"x": make(0.0)}, {"x": make(-0.0)}
    assert compare(a, b).agrees
    assert kinds(compare(a, b, atol=0)) == {"x": "value"}
    assert compare(a, a, atol=0).agrees
    assert kinds(compare({"x": make(1e-45)}, a, atol=0)) == {"x": "value"}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        torch.complex128, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32,
        torch.uint64, torch.bool,
    ],
)  # fmt: skip
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 1, 0]).to(dtype)
    b = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert compare([a], [a.clone()], atol=0).agrees
    (finding,) = compare([a], [b]).findings
    assert (finding.path, finding.index, finding.max_abs) == ("0", (2,), 1.0)


def test_a_large_tensor_is_compared_in_pieces_and_places_are_those_of_the_whole() -> None:
    a = torch.zeros(3, 1_500_000)
    b = a.clone()
    b[2, 1_499_998] = 0.25
    b[1, 7] = -0.5
    b[2, 1_499_999] = math.nan
    found = compare({"x": a}, {"x": b})
    non_finite, value = found.findings
    assert (non_finite.index, value.index) == ((2, 1_499_999), (1, 7))
    assert (value.a, value.b, value.num_values) == (0.0, -0.5, 2)
    assert found.num_values == a.numel()


def test_strides_byte_order_and_read_only_memory_do_not_matter() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    assert compare([a.t()], [a.t().contiguous()]).agrees
    array = np.arange(3, dtype=">f4")
    array.flags.writeable = False
    assert compare([array], [np.arange(3, dtype="<f4")]).agrees
    assert compare([np.arange(3.0)[::-1]], [np.array([2.0, 1.0, 0.0])]).agrees


def test_modules_optimizers_and_schedulers_are_compared_by_their_state() -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    a, b = build(), build()
    assert compare(a, b, atol=0).agrees
    assert compare(a["model"], b["model"].state_dict()).agrees
    with torch.no_grad():
        b["model"][0].weight += 1
    b["optimizer"].state[b["model"][0].bias]["exp_avg"] += 1
    b["optimizer"].param_groups[0]["betas"] = (0.9, 0.99)
    assert sorted(kinds(compare(a, b))) == [
        "model/0.weight", "optimizer/param_groups/0/betas", "optimizer/state/[1]/exp_avg",
    ]  # fmt: skip


def test_generators_are_compared_by_their_state_and_not_drawn_from() -> None:
    def build() -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(1),
            "numpy": np.random.default_rng(1),
            "python": random.Random(1),
        }

    a, b = build(), build()
    assert compare(a, b).agrees
    b["torch"].manual_seed(2)
    b["numpy"].random()
    b["python"].random()
    paths = set(kinds(compare(a, b)))
    assert "torch" in paths
    assert "numpy/state/state" in paths
    assert any(path.startswith("python/1") for path in paths)
    assert a["python"].random() == random.Random(1).random()


def test_the_kind_of_dict_and_the_order_of_keys_do_not_count_but_a_counter_does() -> None:
    assert compare({"a": 1, "b": 2}, OrderedDict(b=2, a=1)).agrees
    assert kinds(compare({"x": {1: 1}}, {"x": Counter({1: 1})})) == {"x": "type"}
    assert kinds(compare({"x": {1: 1}}, {"x": defaultdict(int, {1: 1})})) == {"x": "type"}


def test_findings_come_in_the_order_of_the_tree_and_the_text_ends_after_twenty() -> None:
    a = {f"p{number:02d}": torch.zeros(2) if number % 2 else 0.0 for number in range(30)}
    b = {key: value + 1 for key, value in a.items()}
    found = compare(a, b)
    assert [finding.path for finding in found.findings] == list(a)
    assert "… and 10 more" in str(found)
    assert len(found.to_json()["findings"]) == 30


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"x": {"f": object()}}, "x/f"),
        ({"x": [len]}, "x/0"),
        ({"x": torch.zeros(2, device="meta")}, "x"),
        ({"x": torch.eye(2).to_sparse()}, "x"),
        ({"x": np.array([object()])}, "x"),
        ({"x": np.zeros(1, np.longdouble)}, "x"),
    ],
)
def test_a_value_that_can_not_be_compared_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        compare(value, value)
    assert caught.value.path == path


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="deeper than 100"):
        compare(loop, loop)


def test_comparing_nothing_is_an_error_not_an_agreement() -> None:
    """Case 55: "0 objects checked, ok"."""
    states: list[Any] = [{}, [], torch.zeros(0)]
    for nothing in states:
        with pytest.raises(UsageError, match="nothing to compare"):
            compare(nothing, nothing)


@pytest.mark.parametrize("setting", [{"atol": -1.0}, {"rtol": math.nan}, {"atol": math.inf}])
def test_a_tolerance_that_accepts_everything_or_nothing_is_refused(
    setting: dict[str, Any],
) -> None:
    with pytest.raises(SettingError):
        compare([1.0], [1.0], **setting)


def test_text_as_a_whole_side_is_an_address(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such path"):
        compare(str(tmp_path / "run"), [1.0])
