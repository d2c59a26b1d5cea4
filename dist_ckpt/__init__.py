"""A checkpoint service: stop training at any instant, go on bit-equal, on one GPU or many ranks.

``Checkpointer`` saves and resumes, ``ResumableLoader`` feeds it, ``open_run`` looks at what is
there, ``Ledger`` lists what batch work has finished. Names are imported when they are first used,
so that looking at a run costs no import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.later import imported_later

if TYPE_CHECKING:
    from dist_ckpt.canonical import CanonicalState
    from dist_ckpt.comparison import Comparison, compare
    from dist_ckpt.errors import DistCkptError
    from dist_ckpt.export import read_bin, write_bin
    from dist_ckpt.ledger import Ledger, read_ledger
    from dist_ckpt.loader import ResumableLoader
    from dist_ckpt.rehearsal import rehearse
    from dist_ckpt.runs import Generation, Run, open_run
    from dist_ckpt.service import Checkpointer

__version__ = "0.1.0"

__all__ = [
    "CanonicalState",
    "Checkpointer",
    "Comparison",
    "DistCkptError",
    "Generation",
    "Ledger",
    "ResumableLoader",
    "Run",
    "__version__",
    "compare",
    "open_run",
    "read_bin",
    "read_ledger",
    "rehearse",
    "write_bin",
]

_HOMES = {
    "CanonicalState": "canonical",
    "Checkpointer": "service",
    "Comparison": "comparison",
    "DistCkptError": "errors",
    "Generation": "runs",
    "Ledger": "ledger",
    "ResumableLoader": "loader",
    "Run": "runs",
    "compare": "comparison",
    "open_run": "runs",
    "read_bin": "export",
    "read_ledger": "ledger",
    "rehearse": "rehearsal",
    "write_bin": "export",
}

__getattr__ = imported_later(__name__, _HOMES)
