"""A generation rewritten for another number of ranks, as a new run directory. Layer 5.

Neither a GPU nor torch.distributed is needed, and the memory is bounded whatever the size: source
and target both lie in the canonical order, so each file is gone through once, from front to back.
"""

from __future__ import annotations

from dist_ckpt.reshard._prepare import Prepared, prepare
from dist_ckpt.reshard._reshard import DEFAULT_MEMORY_BYTES, Resharded, reshard

__all__ = ["DEFAULT_MEMORY_BYTES", "Prepared", "Resharded", "prepare", "reshard"]
