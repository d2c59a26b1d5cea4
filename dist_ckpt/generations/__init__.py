"""Generations on disk: prepare → commit or abort; list, read, verify, retire. Layer 4."""

from dist_ckpt.generations._faults import is_bad_bytes
from dist_ckpt.generations._retention import Retention, plan_bins, plan_retention
from dist_ckpt.generations._store import GenerationStore

__all__ = ["GenerationStore", "Retention", "is_bad_bytes", "plan_bins", "plan_retention"]
