"""A policy's state as JSON for people, and where two of them differ. Layer 6, pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from dist_ckpt.tree import encode_tree

__all__ = ["differing_paths", "plain_state"]


def differing_paths(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield where two states differ, in the order of the first."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            below = f"{path}/{key}" if path else str(key)
            if key not in a or key not in b:
                yield below
            else:
                yield from differing_paths(a[key], b[key], below)
    elif a != b:
        yield path or "/"


def plain_state(state: Any) -> Any:
    """Return a state as JSON for people; a tensor is told by its dtype, shape and digest."""

    def tell(_path: str, tensor: Any) -> dict[str, Any]:
        array = tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else tensor
        array = torch.as_tensor(array).contiguous()
        content: Any = array.as_strided((array.numel(),), (1,)).view(torch.uint8).numpy()
        return {
            "dtype": str(array.dtype).removeprefix("torch."),
            "shape": list(array.shape),
            "xxh3_128": xxhash.xxh3_128(content).hexdigest(),
        }

    return json.loads(json.dumps(encode_tree(state, path="policy", put_tensor=tell)))
