"""An endless, resumable iterator of batches over a map-style dataset.

Layer 3. `ResumableLoader` is the public name; `permutation` is the frozen rule of the order, for
proofs.
"""

from __future__ import annotations

from dist_ckpt.loader._loader import ResumableLoader
from dist_ckpt.loader._order import permutation

__all__ = ["ResumableLoader", "permutation"]
