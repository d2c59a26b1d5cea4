"""What makes two runs the same (structure, config, data, code, versions), and how they differ.

Layer 3. `describe` looks at the live run, on rank 0; `compare`, `check` and `carry_on` are pure and
need no torch.
"""

from __future__ import annotations

from dist_ckpt.identity._check import ACCEPT_VARIABLE, carry_on, check
from dist_ckpt.identity._compare import ABSENT, Difference, compare
from dist_ckpt.identity._describe import Described, describe
from dist_ckpt.identity._words import unknown_words

__all__ = [
    "ABSENT",
    "ACCEPT_VARIABLE",
    "Described",
    "Difference",
    "carry_on",
    "check",
    "compare",
    "describe",
    "unknown_words",
]
