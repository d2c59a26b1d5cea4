"""Looking at a run from outside: its generations, history, state of health. Layer 6.

Reads, and exports to where it is told; only `pivot_run` changes a run directory. Importing this,
and all of it but `Generation.tensor` and `Generation.load_into`, needs no torch. Names are imported
when they are first used: a list of generations needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.later import imported_later

if TYPE_CHECKING:
    from dist_ckpt.runs._ask import Answered, ask_save, ask_stop
    from dist_ckpt.runs._check import check_generation, check_run, planned_bytes
    from dist_ckpt.runs._check_bin import check_bin, find_origin
    from dist_ckpt.runs._findings import Depth, Fault, Finding
    from dist_ckpt.runs._generation import Generation
    from dist_ckpt.runs._health import Status
    from dist_ckpt.runs._labels import label_runs
    from dist_ckpt.runs._listing import Row, list_rows
    from dist_ckpt.runs._liveness import Evidence, Liveness, State, look_alive
    from dist_ckpt.runs._pivot import Pivoted, pivot_run
    from dist_ckpt.runs._pivot_plan import PivotPlan, plan_pivot
    from dist_ckpt.runs._places import (
        holds_format,
        is_bin,
        is_generation,
        refuse_export,
        require_no_file,
        runs_below,
    )
    from dist_ckpt.runs._run import Run, open_run, settings_of
    from dist_ckpt.runs._status import missing_losses, read_status
    from dist_ckpt.runs._write import FORMATS, Written, write_export

__all__ = [
    "FORMATS",
    "Answered",
    "Depth",
    "Evidence",
    "Fault",
    "Finding",
    "Generation",
    "Liveness",
    "PivotPlan",
    "Pivoted",
    "Row",
    "Run",
    "State",
    "Status",
    "Written",
    "ask_save",
    "ask_stop",
    "check_bin",
    "check_generation",
    "check_run",
    "find_origin",
    "holds_format",
    "is_bin",
    "is_generation",
    "label_runs",
    "list_rows",
    "look_alive",
    "missing_losses",
    "open_run",
    "pivot_run",
    "plan_pivot",
    "planned_bytes",
    "read_status",
    "refuse_export",
    "require_no_file",
    "runs_below",
    "settings_of",
    "write_export",
]

_HOMES = {
    "Answered": "_ask",
    "Depth": "_findings",
    "Evidence": "_liveness",
    "FORMATS": "_write",
    "Fault": "_findings",
    "Finding": "_findings",
    "Generation": "_generation",
    "Liveness": "_liveness",
    "PivotPlan": "_pivot_plan",
    "Pivoted": "_pivot",
    "Row": "_listing",
    "Run": "_run",
    "State": "_liveness",
    "Status": "_health",
    "Written": "_write",
    "ask_save": "_ask",
    "ask_stop": "_ask",
    "check_bin": "_check_bin",
    "check_generation": "_check",
    "check_run": "_check",
    "find_origin": "_check_bin",
    "holds_format": "_places",
    "is_bin": "_places",
    "is_generation": "_places",
    "label_runs": "_labels",
    "list_rows": "_listing",
    "look_alive": "_liveness",
    "missing_losses": "_status",
    "open_run": "_run",
    "pivot_run": "_pivot",
    "plan_pivot": "_pivot_plan",
    "planned_bytes": "_check",
    "read_status": "_status",
    "refuse_export": "_places",
    "require_no_file": "_places",
    "runs_below": "_places",
    "settings_of": "_run",
    "write_export": "_write",
}

__getattr__ = imported_later(__name__, _HOMES)
