"""Generations on disk: prepare → commit or abort; list, read, verify, retire. Layer 4."""

from dist_ckpt.generations._faults import is_bad_bytes
from dist_ckpt.generations._known import Known
from dist_ckpt.generations._retention import Retention, plan_bins, plan_retention
from dist_ckpt.generations._single import SingleGeneration
from dist_ckpt.generations._store import GenerationStore
from dist_ckpt.generations._stored import StoredGenerations
from dist_ckpt.generations._vanished import VANISHED_ADVICE, VANISHED_EVENTS, tell_vanished

__all__ = [
    "VANISHED_ADVICE",
    "VANISHED_EVENTS",
    "GenerationStore",
    "Known",
    "Retention",
    "SingleGeneration",
    "StoredGenerations",
    "is_bad_bytes",
    "plan_bins",
    "plan_retention",
    "tell_vanished",
]
