"""The bytes of a canonical file, put together of any sharding of a generation. Layer 5, reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from dist_ckpt import storage
from dist_ckpt.canonical import encode_header
from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.export._pieces import Pieces
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.slices import dtype_size
from dist_ckpt.snapshot_index import IndexedTensor, encode_name

__all__ = ["canonical_pieces"]

#: Of the file, in its order: what a tensor's key begins and ends with.
_ARRAYS = (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))


def canonical_pieces(store: StoredGenerations, point: ResumePoint) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the canonical file in order, each piece at most 32 MiB.

    Every piece of a shard is compared with its digest as it is read. What was yielded is only valid
    until the next is asked for.

    Raises:
        UsageError: This generation can't have one; the message says why.
        CorruptFileError: The generation's bytes aren't what was written, or contradict each other.
    """
    canonical = point.canonical
    if canonical.refused is not None:
        raise UsageError(
            f"Step {point.step} has no canonical file: {canonical.refused}.",
            next_step="Its sharded generation is whole; resume from that.",
            step=point.step,
        )
    index = store.index(point)
    stateless = set(canonical.stateless)
    with closing(Pieces(store.path(point.step), store.digests(point))) as files:
        yield encode_header(point.step, canonical.num_params)
        for prefix, suffix in _ARRAYS:
            for name in canonical.names:
                is_zero = bool(suffix) and name in stateless
                kind, end = ("model", "") if is_zero else (prefix, suffix)
                tensor = index.get(f"{kind}/{encode_name(name)}{end}")
                if tensor is None:
                    raise _contradiction(
                        store, point, f"{name!r} has no {end or 'weight'} in the index"
                    )
                yield from _zeros(tensor) if is_zero else _float32(files, tensor)


def _contradiction(store: StoredGenerations, point: ResumePoint, what: str) -> CorruptFileError:
    path = store.path(point.step)
    return CorruptFileError(
        f"{path} contradicts itself: {what}.",
        next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        path=str(path),
    )


def _zeros(weight: IndexedTensor) -> Iterator[bytes]:
    left = 4 * math.prod(weight.shape)
    while left > 0:
        num_bytes = min(left, storage.PIECE_BYTES)
        yield bytes(num_bytes)
        left -= num_bytes


def _float32(files: Pieces, tensor: IndexedTensor) -> Iterator[memoryview]:
    """Yield a tensor's elements as float32, row-major over the global tensor."""
    for raw in files.in_order(tensor):
        yield _widen(raw, tensor).data.cast("B")


def _widen(raw: np.ndarray, tensor: IndexedTensor) -> np.ndarray:
    """Return the bytes of little-endian float32 with the values in ``raw``."""
    if tensor.dtype == "float32":
        return raw
    if raw.nbytes % dtype_size(tensor.dtype):
        raise CorruptFileError(
            f"{tensor.key} doesn't begin at a multiple of its elements' size.",
            next_step="Use another generation.",
        )
    if tensor.dtype == "float16":
        return raw.view("<f2").astype("<f4").view(np.uint8)
    if tensor.dtype == "bfloat16":
        # A bfloat16 is the upper half of the float32 with the same value.
        return (raw.view("<u2").astype("<u4") << 16).view(np.uint8)
    raise UsageError(
        f"{tensor.dtype} values don't fit into float32.", next_step="Keep the sharded generation."
    )
