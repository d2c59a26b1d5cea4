"""Specs ↔ JSON, on their way between ranks. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dist_ckpt.slices import Box, Role, TensorSpec

__all__ = ["decode_specs", "encode_specs"]


def encode_specs(specs: Sequence[TensorSpec]) -> bytes:
    """Return one rank's specs as JSON, for the other ranks."""
    rows = [
        [s.key, s.role, s.dtype, s.shape, [[b.offsets, b.sizes] for b in s.boxes], s.param]
        for s in specs
    ]
    return json.dumps(rows, allow_nan=False).encode()


def decode_specs(data: bytes) -> list[TensorSpec]:
    """Return what :func:`encode_specs` was given."""
    return [
        TensorSpec(
            key=key,
            role=Role(role),
            dtype=dtype,
            shape=tuple(shape),
            boxes=tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes),
            param=param,
        )
        for key, role, dtype, shape, boxes, param in json.loads(data)
    ]
