"""What happens to a run between trainings: pivot. Layer 5, under the run's lock; no torch."""

from __future__ import annotations

from dist_ckpt.lifecycle._pivot import (
    Pivot,
    carry_out_pivot,
    finish_pivot,
    last_pivot,
    pivots_of,
)
from dist_ckpt.lifecycle._request import (
    REQUEST_FILE,
    PivotRequest,
    new_request,
    read_request,
    remove_request,
    write_request,
)

__all__ = [
    "REQUEST_FILE",
    "Pivot",
    "PivotRequest",
    "carry_out_pivot",
    "finish_pivot",
    "last_pivot",
    "new_request",
    "pivots_of",
    "read_request",
    "remove_request",
    "write_request",
]
