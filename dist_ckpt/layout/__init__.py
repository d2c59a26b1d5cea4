"""Which rank writes which slice where, and which bytes a restore must read. Layer 3, pure.

Parameters and their optimizer state are replicas wherever several ranks hold the same box. Each
such group of ranks shares the work so that its ranks write equal bytes, decided before anything is
copied. Buffers may differ by rank, so every rank writes its own and the index points at rank 0's.
The same input gives the same layout on every rank.
"""

from __future__ import annotations

from dist_ckpt.layout._plan import STATE_ALIGN, Layout, Owned, RankLayout, plan_layout
from dist_ckpt.layout._runs import Run, plan_runs
from dist_ckpt.layout._specs import decode_all, decode_specs, encode_specs

__all__ = [
    "STATE_ALIGN",
    "Layout",
    "Owned",
    "RankLayout",
    "Run",
    "decode_all",
    "decode_specs",
    "encode_specs",
    "plan_layout",
    "plan_runs",
]
