"""What a value is to a comparison. Pure."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dist_ckpt.comparison._leaves import LEAVES
from dist_ckpt.errors import UnsupportedValueError
from dist_ckpt.tree import TORCH_DTYPES

__all__ = ["is_number", "kind_of", "plain"]

_NUMBERS = (int, float, complex)
#: Compared by `==` once their types are the same.
_LEAVES = (
    bool, int, float, complex, str, bytes, bytearray, set, frozenset, range, slice, type(None),
    torch.dtype, torch.device, np.dtype,
)  # fmt: skip
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", deque: "deque", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {Counter: "Counter", defaultdict: "defaultdict"}


def plain(value: Any) -> Any:
    """Return a live object's state, a NumPy scalar as an array, anything else as it is.

    Modules, optimizers, schedulers, scalers, loaders and generators have state.
    """
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, Mapping):
        return value.state_dict()
    return value


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a plain number; a truth value isn't."""
    return type(value) in _NUMBERS


def kind_of(value: Any, path: str) -> str:
    """Return a word that is the same for values that can be compared with each other.

    Raises:
        UnsupportedValueError: Nothing is known about such values.
    """
    if isinstance(value, LEAVES):
        return value.kind
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        is_plain = (
            value.dtype.kind in "biufc" and str(value.dtype.newbyteorder("=")) in TORCH_DTYPES
        )
        return "array" if is_plain else _kind_of_array(value, path)
    cls = type(value)
    if isinstance(value, Mapping):
        # In what order keys were put in doesn't count, nor does who keeps that order.
        return "dict" if cls in {dict, OrderedDict} else _MAPPINGS.get(cls, "mapping")
    if cls in _SEQUENCES:
        return _SEQUENCES[cls]
    for leaf in _LEAVES:
        if cls is leaf or (isinstance(value, leaf) and leaf in {torch.dtype, np.dtype}):
            return "None" if value is None else leaf.__name__
    raise UnsupportedValueError(
        f"{path or 'The value'} is a {cls.__module__}.{cls.__qualname__}, which can't be compared.",
        next_step="Compare its state: plain values, tensors, arrays, a state_dict().",
        path=path,
    )


def _kind_of_array(value: np.ndarray[Any, Any], path: str) -> str:
    if value.dtype.hasobject or value.dtype.kind in "fc":
        raise UnsupportedValueError(
            f"{path or 'The value'} is an array of {value.dtype}, which can't be compared.",
            next_step="Use a list, or an array of a dtype that torch knows.",
            path=path,
        )
    return "array of text" if value.dtype.kind in "US" else f"array of {value.dtype.kind}"
