"""The life of a run: go back, branch off, change policy, bring back, keep and retire. Layer 5.

Each holds the run's lock, can be cut off at any instant and be called again. Importing this imports
no torch.
"""

from __future__ import annotations

from dist_ckpt.lifecycle._fork import Forked, check_fork, fork
from dist_ckpt.lifecycle._hold import hold_open, hold_run, last_attempt
from dist_ckpt.lifecycle._new_run import (
    check_target,
    refuse_half_a_copy,
    require_room_for_names,
    taken,
)
from dist_ckpt.lifecycle._origin import Origin, find_origin, past_of, pivot_due
from dist_ckpt.lifecycle._pivot import (
    Pivot,
    carry_out_pivot,
    finish_pivot,
    last_pivot,
    pivots_of,
    saved_since,
)
from dist_ckpt.lifecycle._request import (
    REQUEST_FILE,
    PivotRequest,
    new_request,
    read_request,
    remove_request,
    write_request,
)
from dist_ckpt.lifecycle._retire import Verdict, judge, retire
from dist_ckpt.lifecycle._rewind import Rewound, finish_rewind, plan_rewind, rewind
from dist_ckpt.lifecycle._settle import settle
from dist_ckpt.lifecycle._undelete import (
    Archived,
    find_archived,
    find_brought_back,
    list_archived,
    undelete,
)

__all__ = [
    "REQUEST_FILE",
    "Archived",
    "Forked",
    "Origin",
    "Pivot",
    "PivotRequest",
    "Rewound",
    "Verdict",
    "carry_out_pivot",
    "check_fork",
    "check_target",
    "find_archived",
    "find_brought_back",
    "find_origin",
    "finish_pivot",
    "finish_rewind",
    "fork",
    "hold_open",
    "hold_run",
    "judge",
    "last_attempt",
    "last_pivot",
    "list_archived",
    "new_request",
    "past_of",
    "pivot_due",
    "pivots_of",
    "plan_rewind",
    "read_request",
    "refuse_half_a_copy",
    "remove_request",
    "require_room_for_names",
    "retire",
    "rewind",
    "saved_since",
    "settle",
    "taken",
    "undelete",
    "write_request",
]
