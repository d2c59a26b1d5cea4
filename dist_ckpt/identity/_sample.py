"""The digest of one sample: tensors, arrays, numbers, text and bytes in containers. Pure, no I/O.

Part of layer 3. A frozen rule: each value is written as its kind, its length and its bytes, so that
no two different samples are written alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

__all__ = ["UndigestibleError", "sample_digest"]

_MAX_DEPTH = 50


class UndigestibleError(Exception):
    """A sample holds a value without a digest; names its type. Never leaves `identity`."""


def sample_digest(sample: Any) -> bytes:
    """Return 32 bytes of SHA-256 over ``sample``, the same on every machine.

    Raises:
        UndigestibleError: It holds a value of another type than those listed above.
    """
    digest = hashlib.sha256()
    _write(digest, sample, 0)
    return digest.digest()


def _put(digest: Any, kind: str, data: bytes | memoryview) -> None:
    digest.update(f"{kind}:{len(data)}:".encode())
    digest.update(data)


def _write(digest: Any, value: Any, depth: int) -> None:  # noqa: C901 - one branch a kind
    if depth > _MAX_DEPTH:
        raise UndigestibleError(f"a sample nested deeper than {_MAX_DEPTH} levels")
    if value is None:
        _put(digest, "none", b"")
    elif isinstance(value, bool | np.bool_):
        _put(digest, "bool", b"1" if value else b"0")
    elif isinstance(value, int | np.integer):
        _put(digest, "int", str(int(value)).encode())
    elif isinstance(value, float | np.floating):
        _put(digest, "float", struct.pack("<d", float(value)))
    elif isinstance(value, complex | np.complexfloating):
        _put(digest, "complex", struct.pack("<dd", value.real, value.imag))
    elif isinstance(value, str):
        _put(digest, "str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _put(digest, "bytes", memoryview(value).cast("B"))
    elif isinstance(value, torch.Tensor):
        _write_tensor(digest, value)
    elif isinstance(value, np.ndarray):
        _write_array(digest, value, depth)
    else:
        _write_container(digest, value, depth)


def _write_tensor(digest: Any, value: torch.Tensor) -> None:
    if value.layout != torch.strided or value.is_quantized:
        raise UndigestibleError(f"a tensor of layout {value.layout}")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
    _put(digest, f"tensor {value.dtype} {list(value.shape)}", flat.view(torch.uint8).numpy().data)


def _write_array(digest: Any, value: np.ndarray[Any, Any], depth: int) -> None:
    if value.dtype.hasobject:
        _put(digest, "objects", str(list(value.shape)).encode())
        for item in value.reshape(-1).tolist():
            _write(digest, item, depth + 1)
        return
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    _put(digest, f"array {little.dtype.str} {list(value.shape)}", little.tobytes())


def _write_container(digest: Any, value: Any, depth: int) -> None:
    if isinstance(value, Mapping):
        _put(digest, "mapping", str(len(value)).encode())
        # A dataset may fill a dictionary in any order, and means the same.
        for key, item in sorted(
            ((sample_digest(key), item) for key, item in value.items()), key=lambda pair: pair[0]
        ):
            _put(digest, "key", key)
            _write(digest, item, depth + 1)
    elif isinstance(value, AbstractSet):
        _put(digest, "set", b"".join(sorted(sample_digest(item) for item in value)))
    elif isinstance(value, list | tuple):
        _put(digest, "sequence", str(len(value)).encode())
        for item in value:
            _write(digest, item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _put(digest, "dataclass", type(value).__qualname__.encode())
        for field in dataclasses.fields(value):
            _put(digest, "field", field.name.encode())
            _write(digest, getattr(value, field.name), depth + 1)
    elif all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # an image of Pillow
        _put(digest, f"image {value.mode} {tuple(value.size)}", value.tobytes())
    else:
        raise UndigestibleError(f"a {type(value).__module__}.{type(value).__qualname__}")
