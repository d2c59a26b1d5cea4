"""bytes ↔ ``resume_point.json``, which names one resume point. Layer 1, pure, no torch.

The file says what ``.snapshot_metadata`` can't: the step, who wrote which file with which digests,
identities, values that are the same on every rank, why it was written and after what. It is written
last; without it there is no generation. It ends with a digest of all its own other bytes, white
space included, so that a change anywhere shows.
"""

from __future__ import annotations

from dist_ckpt.resume_point._codec import encode_resume_point, parse_resume_point
from dist_ckpt.resume_point._point import (
    FORMAT,
    INDEX_NAME,
    RESUME_POINT_NAME,
    UNFINISHED_NAME,
    VERIFIED_NAME,
    VERSION,
    Canonical,
    ResumePoint,
    shard_name,
    state_name,
)
from dist_ckpt.resume_point._strict_json import load_strict_json

__all__ = [
    "FORMAT",
    "INDEX_NAME",
    "RESUME_POINT_NAME",
    "UNFINISHED_NAME",
    "VERIFIED_NAME",
    "VERSION",
    "Canonical",
    "ResumePoint",
    "encode_resume_point",
    "load_strict_json",
    "parse_resume_point",
    "shard_name",
    "state_name",
]
