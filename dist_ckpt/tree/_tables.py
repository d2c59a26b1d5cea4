"""What the format knows: dtypes, limits, and which tensors can be kept. Layer 1, pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from dist_ckpt.errors import UnsupportedValueError

JSON: TypeAlias = Any
PutTensor: TypeAlias = Callable[[str, "torch.Tensor | np.ndarray[Any, Any]"], JSON]
GetTensor: TypeAlias = Callable[[JSON], torch.Tensor]

INLINE_LIMIT_BYTES = 2**20
MAX_DEPTH = 100
EXACT_INT = 2**53
MAX_INT_BITS = 13_000  # Python refuses to parse more than 4,300 decimal digits

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32",
        "complex32", "int64", "uint64", "float64", "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip
"""Name → torch dtype, every dtype that the format keeps."""

NUMPY_DTYPES = re.compile(
    r"[|]b1|[|][iu]1|<[iu][248]|<f[248]|<c(8|16)|<U[0-9]{1,6}|[|]S[0-9]{1,6}|<[Mm]8(\[[0-9]{0,6}[a-zA-Z]{1,2}\])?"
)
FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int, "float": float, "list": list, "dict": dict, "str": str,
}  # fmt: skip
NEXT_STEP = (
    "Keep None, numbers, text, bytes, lists, tuples, dicts, sets, tensors and arrays in the state; "
    "turn anything else into one of these in state_dict()."
)


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Return if the bytes of ``tensor`` can be kept as they are.

    Raises:
        UnsupportedValueError: It is a part of one (DTensor), sparse, quantized, on the meta device,
            not yet initialised, a view that overlaps itself, or a wrapper around other tensors.
    """
    cls = type(tensor)
    if any(base.__name__ == "DTensor" for base in cls.__mro__):
        refuse_value(
            path,
            "is a DTensor, of which this rank has only a part",
            "Give the module that holds it as a model (a dict of named ones is fine), or keep its "
            "full_tensor().",
        )
    if torch.nn.parameter.is_lazy(tensor):
        refuse_value(path, "is not initialised yet", "Run one forward pass first.")
    if hasattr(cls, "__tensor_flatten__"):
        refuse_value(path, f"is a {cls.__name__}, a wrapper around other tensors", NEXT_STEP)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        refuse_value(
            path, f"is a tensor of layout {tensor.layout}, {tensor.dtype}", "Use dense tensors."
        )
    if tensor.is_meta:
        refuse_value(path, "is on the meta device and has no values", "Materialise it first.")
    if str(tensor.dtype).removeprefix("torch.") not in TORCH_DTYPES:
        refuse_value(
            path, f"has the dtype {tensor.dtype}, which the format doesn't know", NEXT_STEP
        )
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if tensor.numel() and any(step == 0 and size > 1 for step, size in strides):
        refuse_value(
            path, "is an expanded view whose elements share memory", "Call .contiguous() on it."
        )


def refuse_value(path: str, what: str, next_step: str) -> NoReturn:
    message = f"{path} {what}."
    raise UnsupportedValueError(message, next_step=next_step, path=path)
