"""One resume point as a value, and the names of its files. Layer 1, pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "FORMAT",
    "INDEX_NAME",
    "RESUME_POINT_NAME",
    "UNFINISHED_NAME",
    "VERIFIED_NAME",
    "VERSION",
    "Canonical",
    "ResumePoint",
    "shard_name",
    "state_name",
]

FORMAT = "dist_ckpt.resume_point"
VERSION = 1
RESUME_POINT_NAME = "resume_point.json"
INDEX_NAME = ".snapshot_metadata"
VERIFIED_NAME = "verified.json"
#: In a run directory: it is being brought here, and not all of it has arrived.
UNFINISHED_NAME = "unfinished.json"


def shard_name(rank: int) -> str:
    """Return the name of the file with a rank's parameters and moments."""
    return f"rank_{rank:05d}.shard"


def state_name(rank: int) -> str:
    """Return the name of the file with everything else that a rank keeps."""
    return f"rank_{rank:05d}.state"


@dataclass(frozen=True, slots=True)
class Canonical:
    """How the canonical ``step_N.bin`` is made from a generation.

    Attributes:
        names: Parameters in the file's order, tied ones once.
        num_params: Elements of all parameters together.
        is_shard: Rank 0's shard already is the file, byte for byte.
        refused: Why there can't be one, None where there can.
        stateless: Parameters without moments; their m and v are zeros, and restore leaves them
            without state.
    """

    names: tuple[str, ...]
    num_params: int
    is_shard: bool
    refused: str | None = None
    stateless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """One restorable instant of the whole job, on all ranks.

    Attributes:
        run: Name of the run.
        step: Finished optimizer updates.
        id: Random name of this very save (32 hex digits).
        parent: ``{"step", "id"}`` of the resume point that this attempt last saved or resumed from.
        attempt: Which lifetime of the job wrote it, counted from 1.
        time: Seconds since the epoch when it was committed; for people, never used to order.
        reasons: Why it was written: cadence, SIGUSR1, SIGTERM, last, save, …
        world_size: Number of ranks that wrote it.
        files: name → ``{"size_bytes", "piece_bytes", "pieces", "whole"}``, see docs/format.md.
        index: ``{"size_bytes", "digest"}`` of ``.snapshot_metadata``.
        canonical: How step_N.bin is made from it.
        identity: Structure, configuration, data, code and versions.
        shared: Tagged JSON of the values that are the same on every rank (rank 0's).
        notes: Free facts for people and later commands (progress of the data, lineage, …).
    """

    run: str
    step: int
    id: str
    parent: Mapping[str, Any] | None
    attempt: int
    time: float
    reasons: tuple[str, ...]
    world_size: int
    files: Mapping[str, Mapping[str, Any]]
    index: Mapping[str, Any]
    canonical: Canonical
    identity: Mapping[str, Any]
    shared: Any
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks' files together."""
        return sum(int(record["size_bytes"]) for record in self.files.values())
