"""Tagged JSON back to values; everything in it is checked, nothing is executed. Layer 1, pure."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.tree._tables import (
    FACTORIES,
    JSON,
    MAX_DEPTH,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    GetTensor,
)


def decode_tree(node: JSON, *, get_tensor: GetTensor | None = None) -> Any:
    """Return the value that `encode_tree` was given.

    A device that this machine doesn't have comes back as the CPU.

    Raises:
        CorruptFileError: An unknown tag, or a node that isn't as `encode_tree` writes it.
    """
    return _decode(node, get_tensor, 0)


def _corrupt(what: str, node: JSON) -> CorruptFileError:
    shown = repr(node)[:120]
    message = f"The saved state {what}: {shown}."
    return CorruptFileError(
        message, next_step="Verify the generation, or use another.", found=shown
    )


def _decode(node: JSON, get: GetTensor | None, depth: int) -> Any:
    cls = type(node)
    if node is None or cls is bool or cls is str or cls is int:
        return node
    if cls is float:
        if not math.isfinite(node):
            raise _corrupt("holds a bare number that isn't finite", node)
        return node
    if depth > 2 * MAX_DEPTH:
        raise _corrupt(f"is nested deeper than {2 * MAX_DEPTH} levels", "…")
    if cls is list:
        if _LEAVES.issuperset(map(type, node)):
            return list(node)
        return [_decode(item, get, depth + 1) for item in node]
    if cls is not dict:
        raise _corrupt(f"holds a {cls.__name__}", node)
    if not any(key.startswith("$") for key in node):
        return {key: _decode(item, get, depth + 1) for key, item in node.items()}
    if len(node) != 1:
        raise _corrupt("holds a tag beside other keys", node)
    ((tag, payload),) = node.items()
    return _decode_tag(tag, payload, get, depth)


def _decode_tag(tag: str, payload: JSON, get: GetTensor | None, depth: int) -> Any:
    if tag in ("$tensor", "$ndarray"):
        if get is None:
            return _build(tag, payload, _inline_tensor if tag == "$tensor" else _inline_array)
        inline_text = tag == "$ndarray" and isinstance(payload, dict) and "data" in payload
        if inline_text:
            return _build(tag, payload, _inline_array)
        found = get(payload)
        return found if tag == "$tensor" else _build(tag, payload, lambda _: found.numpy())
    if tag in _LEAF_TAGS:
        return _build(tag, payload, _LEAF_TAGS[tag])
    if tag not in _NODE_TAGS:
        raise _corrupt(f"holds the unknown tag {tag!r}", payload)
    # Children first: an error of theirs, or of get_tensor, is not ours to reword.
    options = payload if tag in ("$defaultdict", "$deque") else None
    if options is not None and not isinstance(options, dict):
        raise _corrupt(f"holds a malformed {tag}", payload)
    nodes = payload if options is None else options.get("items")
    if not isinstance(nodes, list):
        raise _corrupt(f"holds a malformed {tag}", payload)
    items = _decode(nodes, get, depth)
    return _build(tag, payload, lambda _: _NODE_TAGS[tag](items, options or {}))


def _build(tag: str, payload: JSON, build: Callable[[Any], Any]) -> Any:
    try:
        return build(payload)
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        AttributeError,
    ) as error:
        raise _corrupt(f"holds a malformed {tag}", payload) from error


def _inline_tensor(payload: JSON) -> torch.Tensor:
    dtype = TORCH_DTYPES[payload["dtype"]]
    shape = _sizes(payload["shape"])
    raw = bytearray(base64.b64decode(payload["data"], validate=True))
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(len(raw))
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _inline_array(payload: JSON) -> np.ndarray[Any, Any]:
    raw = bytearray(base64.b64decode(payload["data"], validate=True))
    dtype = _numpy_dtype(payload["dtype"])
    shape = _sizes(payload["shape"])
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(len(raw))
    return np.frombuffer(raw, dtype=dtype).reshape(shape) if raw else _numpy_empty(shape, dtype)


def _sizes(shape: JSON) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(shape)
    return tuple(shape)


def _numpy_dtype(name: JSON) -> np.dtype[Any]:
    if not NUMPY_DTYPES.fullmatch(name):
        raise ValueError(name)
    return np.dtype(name)


def _numpy_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # Texts of no characters take no bytes in the file, and one character each in memory.
    if dtype.itemsize == 0 and math.prod(shape) > 1 << 20:
        raise ValueError(shape)
    return np.empty(shape, dtype)


def _numpy_scalar(payload: JSON) -> np.generic:
    dtype = _numpy_dtype(payload["dtype"])
    raw = base64.b64decode(payload["data"], validate=True)
    if len(raw) != dtype.itemsize:
        raise ValueError(len(raw))
    return dtype.type() if not raw else np.frombuffer(raw, dtype=dtype)[0]  # type: ignore[no-any-return]


def _device(payload: JSON) -> torch.device:
    device = torch.device(payload)
    if device.type in {"cpu", "meta"}:
        return device
    backend: Any = getattr(torch, device.type, None)
    present = backend is not None and hasattr(backend, "device_count")
    return device if present and (device.index or 0) < backend.device_count() else _CPU


def _float(payload: JSON) -> float:
    if payload not in ("inf", "-inf", "nan"):
        raise ValueError(payload)
    return float(payload)


def _complex(payload: JSON) -> complex:
    real, imag = (part if type(part) is float else _float(part) for part in payload)
    return complex(real, imag)


def _int(payload: JSON) -> int:
    if not re.fullmatch(r"-?[0-9]{1,4000}", payload):
        raise ValueError(payload)
    return int(payload)


def _integers(payload: JSON) -> list[int]:
    if not isinstance(payload, list) or any(type(item) is not int for item in payload):
        raise ValueError(payload)
    return payload


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in items]


_CPU = torch.device("cpu")
#: Types that stand for themselves, whatever the value.
_LEAVES = frozenset({int, str, bool, type(None)})
_LEAF_TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": _int,
    "$float": _float,
    "$complex": _complex,
    "$bytes": lambda payload: base64.b64decode(payload, validate=True),
    "$bytearray": lambda payload: bytearray(base64.b64decode(payload, validate=True)),
    "$dtype": lambda payload: TORCH_DTYPES[payload],
    "$device": _device,
    "$size": lambda payload: torch.Size(_sizes(payload)),
    "$range": lambda payload: range(*_integers(payload)),
    "$npdtype": _numpy_dtype,
    "$npscalar": _numpy_scalar,
}
_NODE_TAGS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "$tuple": lambda items, _: tuple(items),
    "$dict": lambda items, _: dict(_pairs(items)),
    "$odict": lambda items, _: OrderedDict(_pairs(items)),
    "$counter": lambda items, _: Counter(dict(_pairs(items))),
    "$defaultdict": lambda items, options: defaultdict(
        None if options["factory"] is None else FACTORIES[options["factory"]], _pairs(items)
    ),
    "$deque": lambda items, options: deque(items, options["maxlen"]),
    "$set": lambda items, _: set(items),
    "$frozenset": lambda items, _: frozenset(items),
    "$slice": lambda items, _: slice(*items),
}
