"""The arena: one instant copied, overlapped and fenced where that can be. Layer 3."""

from dist_ckpt.staging._arena import Staging, torch_dtype
from dist_ckpt.staging._compose import RankValues
from dist_ckpt.staging._overlap import CudaStreams, Overlap, Streams
from dist_ckpt.staging._staged import Staged, Streamed, Writable, Written
from dist_ckpt.staging._state_file import (
    TAIL_BYTES,
    OwnTensor,
    StateTail,
    encode_tail,
    parse_tail,
    tail_start,
)

__all__ = [
    "TAIL_BYTES",
    "CudaStreams",
    "Overlap",
    "OwnTensor",
    "RankValues",
    "Staged",
    "Staging",
    "StateTail",
    "Streamed",
    "Streams",
    "Writable",
    "Written",
    "encode_tail",
    "parse_tail",
    "tail_start",
    "torch_dtype",
]
