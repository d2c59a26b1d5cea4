"""What differs between two training states: live objects, resume points, canonical files.

Above resume and export, below service. Reads only, not collective. Tensors are compared in pieces,
so that two generations larger than memory can be.
"""

from dist_ckpt.comparison._compare import compare, compare_watched
from dist_ckpt.comparison._result import Comparison, Difference, Finding, Kind

__all__ = ["Comparison", "Difference", "Finding", "Kind", "compare", "compare_watched"]
