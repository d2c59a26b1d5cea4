"""What a run leaves to read: losses, metrics, samples, journal. Layer 4, I/O through ``storage``.

`History` writes it (rank 0 only), the ``read_`` functions read it, also beside a running job.
Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

from dist_ckpt.history._branches import Branches, Window, compare_branches
from dist_ckpt.history._follow import FollowedHistory, FollowedLosses
from dist_ckpt.history._gap import LossGap
from dist_ckpt.history._history import History
from dist_ckpt.history._journal import (
    UNREADABLE,
    Journal,
    NullJournal,
    encode_event,
    parse_journal,
)
from dist_ckpt.history._json_array import strict_loads
from dist_ckpt.history._lineage import FORKED, LINEAGE_EVENTS, Lineage, trace_lineage
from dist_ckpt.history._loss_file import LossFile
from dist_ckpt.history._loss_format import (
    MISSING,
    LossEntry,
    Missing,
    canonical,
    parse_loss,
)
from dist_ckpt.history._marks import HISTORY_CUT, LOSS_NOT_FINITE
from dist_ckpt.history._metrics import Metrics, check_metric_names, parse_metrics
from dist_ckpt.history._null import NullHistory
from dist_ckpt.history._own import OwnPoints
from dist_ckpt.history._paths import history_path, run_name
from dist_ckpt.history._proven import proven_steps
from dist_ckpt.history._readers import (
    RunHistory,
    read_gap,
    read_history,
    read_journal,
    read_loss,
    read_loss_raw,
    read_metrics,
    read_samples,
)
from dist_ckpt.history._rejoin import (
    Past,
    bookmark_history,
    carry_kinds,
    encode_kinds,
    encode_past,
    read_past,
    rejoin_history,
    write_past,
)
from dist_ckpt.history._replay import ReplayResult, replay_summary, replays_until
from dist_ckpt.history._samples import Samples, canonical_samples, parse_samples
from dist_ckpt.history._sidecars import (
    ABSENT,
    encode_settings,
    encode_state,
    parse_settings,
    read_policy,
    read_state,
    write_policy,
    write_state,
)

__all__ = [
    "ABSENT",
    "FORKED",
    "HISTORY_CUT",
    "LINEAGE_EVENTS",
    "LOSS_NOT_FINITE",
    "MISSING",
    "UNREADABLE",
    "Branches",
    "FollowedHistory",
    "FollowedLosses",
    "History",
    "Journal",
    "Lineage",
    "LossEntry",
    "LossFile",
    "LossGap",
    "Metrics",
    "Missing",
    "NullHistory",
    "NullJournal",
    "OwnPoints",
    "Past",
    "ReplayResult",
    "RunHistory",
    "Samples",
    "Window",
    "bookmark_history",
    "canonical",
    "canonical_samples",
    "carry_kinds",
    "check_metric_names",
    "compare_branches",
    "encode_event",
    "encode_kinds",
    "encode_past",
    "encode_settings",
    "encode_state",
    "history_path",
    "parse_journal",
    "parse_loss",
    "parse_metrics",
    "parse_samples",
    "parse_settings",
    "proven_steps",
    "read_gap",
    "read_history",
    "read_journal",
    "read_loss",
    "read_loss_raw",
    "read_metrics",
    "read_past",
    "read_policy",
    "read_samples",
    "read_state",
    "rejoin_history",
    "replay_summary",
    "replays_until",
    "run_name",
    "strict_loads",
    "trace_lineage",
    "write_past",
    "write_policy",
    "write_state",
]
