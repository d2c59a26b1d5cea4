"""Live objects → named tensors and values, and back, by name. Layer 3, no I/O, no collective.

Tensors are read and filled where they lie. Everything else is tagged JSON (`dist_ckpt.tree`). A
restore runs `Captured.prepare`, reads the tensors into what it returns, then `load_shared`,
`load_rank` and, after all that draws, `load_gradients` and `load_rng`.
"""

from __future__ import annotations

from dist_ckpt.capture._captured import Captured
from dist_ckpt.capture._merge import (
    frame_of,
    merge_frames,
    merge_structures,
    with_frame,
    with_values,
)
from dist_ckpt.capture._parts import check_stateful, load_stateful, state_of
from dist_ckpt.capture._rng import Generator, cuda_devices, encode_rng, restore_rng
from dist_ckpt.capture._schema import check_rank, check_shared
from dist_ckpt.capture._sharding import is_sharded, local_of, parts_of
from dist_ckpt.capture._values import LiveTensor, Stateful, Structure

__all__ = [
    "Captured",
    "Generator",
    "LiveTensor",
    "Stateful",
    "Structure",
    "check_rank",
    "check_shared",
    "check_stateful",
    "cuda_devices",
    "encode_rng",
    "frame_of",
    "is_sharded",
    "load_stateful",
    "local_of",
    "merge_frames",
    "merge_structures",
    "parts_of",
    "restore_rng",
    "state_of",
    "with_frame",
    "with_values",
]
