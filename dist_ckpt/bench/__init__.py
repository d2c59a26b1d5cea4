"""Side by side with the limits of the machine and with other libraries, in one run. Layer 7.

Each case is a state of a kind and size on a number of ranks. Its ranks are processes of their own,
which measure everything in turn, round by round: absolute times drift, ratios within a run hold.
A user of the library as any other: it brings up ``torch.distributed``, and calls other libraries
and the system by itself (docs/decisions/0040-bench-as-a-user.md).
"""

from __future__ import annotations

from dist_ckpt.bench._bars import Bar, judge
from dist_ckpt.bench._plan import CASES, Case, Options
from dist_ckpt.bench._plot import check_plot, draw
from dist_ckpt.bench._run import run_bench
from dist_ckpt.bench._table import describe

__all__ = [
    "CASES",
    "Bar",
    "Case",
    "Options",
    "check_plot",
    "describe",
    "draw",
    "judge",
    "run_bench",
]
