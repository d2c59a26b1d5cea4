"""A configuration as dotted keys: what is followed, how values are written, what is refused."""

from __future__ import annotations

import argparse
import enum
import json
import math
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.errors import SettingError
from dist_ckpt.identity._config import flatten_config


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Config:
    name: str = "tiny"
    optimizer: Optimizer = field(default_factory=Optimizer)


class Kind(enum.Enum):
    GELU = 1


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - the untyped one is met too


def test_nested_settings_have_dotted_keys() -> None:
    expected = {"name": "tiny", "optimizer.betas": [0.9, 0.999], "optimizer.lr": 0.1}
    assert flatten_config(Config()) == expected
    nested = {"name": "tiny", "optimizer": {"lr": 0.1, "betas": [0.9, 0.999]}}
    assert flatten_config(nested) == expected
    assert flatten_config(argparse.Namespace(**nested)) == expected
    assert flatten_config(SimpleNamespace(name="tiny", optimizer=Optimizer())) == expected
    assert list(flatten_config(nested)) == sorted(expected)


def test_a_list_of_settings_is_followed_by_position() -> None:
    config = {"layers": [{"size": 3}, {"size": 4}], "pair": Pair(1, {"x": 2}), "none": []}
    assert flatten_config(config) == {
        "layers.0.size": 3, "layers.1.size": 4, "none": [], "pair.left": 1, "pair.right.x": 2,
    }  # fmt: skip


def test_a_pydantic_model_is_followed() -> None:
    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"lr": 0.5}

    assert flatten_config({"train": Model()}) == {"train.lr": 0.5}


def test_values_are_written_as_plain_json() -> None:
    values = {
        "path": Path("a/b"), "kind": Kind.GELU, "nan": math.nan, "inf": -math.inf,
        "set": {3, 1, 2}, "dtype": torch.float16, "device": torch.device("cpu"),
        "class": torch.nn.GELU, "function": math.sqrt, "npint": np.int64(3),
        "npfloat": np.float32(0.5), "empty": {}, "none": None, "flag": True, "big": 2**70,
        1: "one", "bytes": b"ab", "complex": 1j,
    }  # fmt: skip
    flat = flatten_config(values)
    digest = "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603"
    assert flat == {
        "path": "a/b", "kind": "Kind.GELU", "nan": {"$float": "nan"}, "inf": {"$float": "-inf"},
        "set": [1, 2, 3], "dtype": "torch.float16", "device": "device(type='cpu')",
        "class": "torch.nn.modules.activation.GELU", "function": "math.sqrt", "npint": 3,
        "npfloat": 0.5, "empty": {}, "none": None, "flag": True, "big": 2**70,
        "1": "one", "bytes": f"bytes[2] sha256:{digest}", "complex": "1j",
    }  # fmt: skip
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat


def test_an_array_or_a_tensor_is_a_digest_of_its_values() -> None:
    weights = flatten_config({"w": np.array([1.0, 2.0])})["w"]
    assert weights.startswith("float64[2] sha256:")
    assert flatten_config({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)})["w"] == weights
    assert flatten_config({"w": np.array([1.0, 3.0])})["w"] != weights


def test_ignored_keys_are_left_out_by_name_by_parent_and_by_pattern() -> None:
    config = {"out": "x", "log": {"dir": "y", "every": 1}, "train": {"lr": 1, "out_dir": "z"}}
    assert flatten_config(config, ("out", "log", "*.out_*")) == {"train.lr": 1}
    assert flatten_config({"out": lambda: None}, ("out",)) == {}


@pytest.mark.parametrize("value", [lambda: None, object(), [object()]])
def test_a_value_that_differs_in_every_process_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match=r"'model\.act'.* config_ignore=") as caught:
        flatten_config({"model": {"act": value}})
    assert caught.value.path == "model.act"


def test_two_values_under_one_dotted_key_are_refused() -> None:
    with pytest.raises(SettingError, match=r"'a\.b'"):
        flatten_config({"a.b": 1, "a": {"b": 2}})


def test_a_configuration_that_refers_to_itself_is_refused() -> None:
    config: dict[str, Any] = {}
    config["self"] = config
    with pytest.raises(SettingError, match="nested deeper"):
        flatten_config(config)


def test_what_has_no_named_settings_is_refused() -> None:
    with pytest.raises(SettingError, match="of type int"):
        flatten_config(3)
