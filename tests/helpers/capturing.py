"""A capture in bytes and back into other live objects, as a generation does it, without files."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_ckpt.capture import Captured
from dist_ckpt.slices import TensorSpec
from dist_ckpt.tree import TORCH_DTYPES


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order, whatever the tensor's strides."""
    flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fill(tensor: torch.Tensor, raw: bytes) -> None:
    """Write row-major bytes into a live tensor, whatever its strides."""
    if raw:
        source = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.dtype)
        tensor.detach().copy_(source.reshape(tensor.shape))


@dataclass
class Saved:
    """Bytes and JSON text only: nothing of the live objects can leak through."""

    specs: dict[str, TensorSpec]
    tensors: dict[str, bytes]
    stateless: list[str]
    shared: str
    rank: str
    own: list[tuple[str, str, tuple[int, ...], bytes]] = field(default_factory=list)


def save(captured: Captured) -> Saved:
    """Return everything that `captured` holds, now."""
    live = captured.tensors()
    own: list[tuple[str, str, tuple[int, ...], bytes]] = []

    def put(path: str, tensor: torch.Tensor) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        own.append((path, dtype, tuple(tensor.shape), to_bytes(tensor)))
        return len(own) - 1

    rank = json.dumps(captured.rank_values(put), allow_nan=False)
    assert len({item[0] for item in own}) == len(own)
    return Saved(
        specs={item.spec.key: item.spec for item in live},
        tensors={item.spec.key: to_bytes(item.tensor) for item in live},
        stateless=captured.stateless(),
        shared=json.dumps(captured.shared_values(), allow_nan=False),
        rank=rank,
        own=own,
    )


def prepare(
    captured: Captured, saved: Saved, accept: Collection[str] = (), omit: Collection[str] = ()
) -> dict[str, Any]:
    """Run the first step of a restore."""
    shared = json.loads(saved.shared)
    return captured.prepare(saved.specs, saved.stateless, shared, accept=accept, omit=omit)


def restore(
    captured: Captured, saved: Saved, accept: Collection[str] = (), omit: Collection[str] = ()
) -> None:
    """Put everything back in the order that a resume has, random numbers last."""
    for key, tensor in prepare(captured, saved, accept, omit).items():
        fill(tensor, saved.tensors[key])
    captured.load_shared(json.loads(saved.shared), accept=accept, omit=omit)
    values = json.loads(saved.rank)

    def get(number: int) -> torch.Tensor:
        _, dtype, shape, raw = saved.own[number]
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        fill(tensor, raw)
        return tensor

    captured.load_rank(values, get, accept=accept, omit=omit)
    captured.load_gradients(values)
    captured.load_rng(values, accept=accept)


def everything(captured: Captured) -> tuple[Any, ...]:
    """Return all that is comparable bit by bit: equal means that two trainings are at one point."""
    saved = save(captured)
    return saved.specs, saved.tensors, saved.stateless, saved.shared, saved.rank, saved.own
