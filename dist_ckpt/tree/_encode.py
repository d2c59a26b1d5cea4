"""Values to tagged JSON. Layer 1, pure."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

import numpy as np
import torch

from dist_ckpt.tree._tables import (
    EXACT_INT,
    FACTORIES,
    INLINE_LIMIT_BYTES,
    JSON,
    MAX_DEPTH,
    MAX_INT_BITS,
    NEXT_STEP,
    NUMPY_DTYPES,
    PutTensor,
    check_tensor,
    refuse_value,
)

#: From so many values on it pays to look at all their types first.
_MANY = 16


def encode_tree(value: Any, *, path: str, put_tensor: PutTensor | None = None) -> JSON:
    """Return ``value`` as JSON from which `decode_tree` makes an equal value of the same types.

    Args:
        value: The value; not changed, not kept.
        path: Where it lies (``"extra/ema"``), for errors and for ``put_tensor``.
        put_tensor: Called with a unique path (``"extra/ema/shadow/0"``) and each tensor or
            numeric array, the very object where it has plain elements; what it returns, JSON too,
            is given to ``get_tensor`` at decoding.
            Without it they are kept inline, up to `INLINE_LIMIT_BYTES` each.

    Raises:
        UnsupportedValueError: A type that isn't in the list, a value that contains itself, more
            than 100 levels, or too large a tensor; ``path`` says where.
    """
    return _Encoder(path, put_tensor).encode(value)


class _Encoder:
    """One walk. The path is a stack, joined only when needed: most leaves are numbers."""

    def __init__(self, path: str, put_tensor: PutTensor | None) -> None:
        self.parts = [path]
        self.put_tensor = put_tensor
        self.open: set[int] = set()

    def encode(self, value: Any) -> JSON:
        cls = type(value)
        if value is None or cls is bool or cls is str:
            return value
        if cls is int or cls is float:
            return self._number(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        return _SIMPLE[cls](value) if cls in _SIMPLE else self._container(value, cls)

    def refuse(self, what: str) -> NoReturn:
        refuse_value("/".join(self.parts), what, NEXT_STEP)

    def _number(self, value: Any) -> JSON:
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if -EXACT_INT <= value <= EXACT_INT:
            return value
        if value.bit_length() > MAX_INT_BITS:
            self.refuse(f"is an integer of {value.bit_length()} bits")
        return {"$int": str(value)}

    def _container(self, value: Any, cls: type) -> JSON:
        encode = _CONTAINERS.get(cls)
        if encode is None:
            self.refuse(f"is a {cls.__module__}.{cls.__qualname__}, which can't be kept")
        if id(value) in self.open:
            self.refuse(f"is a {cls.__name__} that contains itself")
        if len(self.open) >= MAX_DEPTH:
            self.refuse(f"lies deeper than {MAX_DEPTH} levels")
        self.open.add(id(value))
        try:
            return encode(self, value)
        finally:
            self.open.discard(id(value))

    def items(self, values: Collection[Any]) -> list[JSON]:
        # A generator's state is hundreds of small integers, taken at each start and each save.
        if len(values) > _MANY and set(map(type, values)) == {int}:
            is_exact = min(values) >= -EXACT_INT and max(values) <= EXACT_INT
            if is_exact:
                return list(values)
        parts = self.parts
        parts.append("")
        nodes = []
        for index, value in enumerate(values):
            parts[-1] = str(index)
            nodes.append(self.encode(value))
        parts.pop()
        return nodes

    def plain_dict(self, value: dict[Any, Any]) -> JSON:
        if not all(type(key) is str and not key.startswith("$") for key in value):
            return {"$dict": self.pairs(value)}
        parts = self.parts
        parts.append("")
        node = {}
        for key, item in value.items():
            parts[-1] = _component(key)
            node[key] = self.encode(item)
        parts.pop()
        return node

    def pairs(self, value: dict[Any, Any]) -> list[JSON]:
        nodes = []
        for index, (key, item) in enumerate(value.items()):
            # Brackets, so that the keys 0 and "0" have paths of their own; other keys by position.
            plain = type(key) in (int, bool, type(None))
            self.parts.append(
                _component(key) if type(key) is str else f"[{key if plain else f'key {index}'}]"
            )
            nodes.append([self.hashable(key), self.encode(item)])
            self.parts.pop()
        return nodes

    def hashable(self, value: Any) -> JSON:
        """Encode a key or a set's element: no tensors, whose equality is identity."""
        if isinstance(value, torch.Tensor):
            self.refuse("is a set element or a key that is a tensor")
        if type(value) in (tuple, frozenset):
            for item in value:
                self.hashable(item)
        return self.encode(value)

    def elements(self, values: Iterable[Any]) -> list[JSON]:
        # A set has no order of its own: sorted, so that equal sets give equal bytes.
        return sorted((self.hashable(value) for value in values), key=json.dumps)

    def default_dict(self, value: defaultdict[Any, Any]) -> JSON:
        factory = value.default_factory
        names = [name for name, known in FACTORIES.items() if known is factory]
        if factory is not None and not names:
            self.refuse(f"is a defaultdict with the factory {factory!r}, which can't be kept")
        name = names[0] if names else None
        return {"$defaultdict": {"factory": name, "items": self.pairs(value)}}

    def _tensor(self, tensor: torch.Tensor) -> JSON:
        path = "/".join(self.parts)
        given = tensor
        if tensor.layout is torch.strided and any(step == 0 for step in tensor.stride()):
            tensor = tensor.detach().contiguous()  # a copy is read, never written: any view will do
        check_tensor(tensor, path)
        is_usual = tensor is given and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        is_usual &= not (tensor.is_conj() or tensor.is_neg())
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        if self.put_tensor is not None:
            return {"$tensor": self.put_tensor(path, given if is_usual else tensor)}
        self._check_inline(tensor.numel() * tensor.element_size())
        whole = tensor.cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # one element may have any stride
        raw = flat.view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"$tensor": {"dtype": dtype, "shape": list(tensor.shape), "data": _base64(raw)}}

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> JSON:
        dtype = value.dtype.str
        if not NUMPY_DTYPES.fullmatch(dtype) or type(value) in (np.ma.MaskedArray, np.matrix):
            self.refuse(f"is a {type(value).__name__} of dtype {value.dtype}, which can't be kept")
        if isinstance(value, np.generic):
            return {"$npscalar": {"dtype": dtype, "data": _base64(value.tobytes())}}
        if self.put_tensor is not None and value.dtype.kind in "biufc":
            return {"$ndarray": self.put_tensor("/".join(self.parts), value)}
        self._check_inline(value.nbytes)
        data = _base64(value.tobytes())
        return {"$ndarray": {"dtype": dtype, "shape": list(value.shape), "data": data}}

    def _check_inline(self, num_bytes: int) -> None:
        if num_bytes > INLINE_LIMIT_BYTES:
            self.refuse(f"has {num_bytes} bytes, more than the {INLINE_LIMIT_BYTES} kept inline")


def _component(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F").replace("[", "%5B")


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _np_dtype(value: np.dtype[Any]) -> JSON:
    if not NUMPY_DTYPES.fullmatch(value.str):
        refuse_value("a NumPy dtype", f"is {value}, which can't be kept", NEXT_STEP)
    return {"$npdtype": value.str}


def _simple_float(value: float) -> JSON:
    return value if math.isfinite(value) else repr(value)


_SIMPLE: dict[type, Callable[[Any], JSON]] = {
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
    complex: lambda value: {"$complex": [_simple_float(value.real), _simple_float(value.imag)]},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
    torch.Size: lambda value: {"$size": list(value)},
    range: lambda value: {"$range": [value.start, value.stop, value.step]},
    **{type(np.dtype(code)): _np_dtype for code in "?bBhHiIlLqQefdgFDGSUmMVO"},
}
_CONTAINERS: dict[type, Callable[[_Encoder, Any], JSON]] = {
    list: _Encoder.items,
    dict: _Encoder.plain_dict,
    tuple: lambda encoder, value: {"$tuple": encoder.items(value)},
    OrderedDict: lambda encoder, value: {"$odict": encoder.pairs(value)},
    Counter: lambda encoder, value: {"$counter": encoder.pairs(value)},
    defaultdict: _Encoder.default_dict,
    deque: lambda encoder, value: {
        "$deque": {"items": encoder.items(value), "maxlen": value.maxlen}
    },
    set: lambda encoder, value: {"$set": encoder.elements(value)},
    frozenset: lambda encoder, value: {"$frozenset": encoder.elements(value)},
    slice: lambda encoder, value: {"$slice": encoder.items((value.start, value.stop, value.step))},
}
