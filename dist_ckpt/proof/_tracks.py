"""What the library saw inside a scenario's processes, one track a rank. Reads files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import IncompleteError
from dist_ckpt.service import witness_file

__all__ = ["Track", "read_tracks"]

_LIMIT_BYTES = 1 << 32


@dataclass
class Track:
    """One rank's way through a scenario.

    Attributes:
        rank: Which.
        world_size: How many there are.
        opened_at: The step that was resumed from, 0 at a fresh start.
        parts: What is kept: word → kind.
        start: What the loop began with; None where it never began.
        steps: Step → what it consumed and left.
        end: How the loop ended; None where it was left half-way.
        strays: Generators and schedulers that aren't kept.
    """

    rank: int
    world_size: int
    opened_at: int
    parts: Mapping[str, Any]
    start: Mapping[str, Any] | None = None
    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    strays: list[Mapping[str, str]] = field(default_factory=list)

    def at(self, step: int) -> Mapping[str, Any] | None:
        """Return what there was at the boundary of ``step``."""
        if self.start is not None and self.start["step"] == step:
            return self.start
        return self.steps.get(step)

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return max(self.steps, default=self.opened_at)


def read_tracks(directory: Path) -> list[Track]:
    """Return the tracks of all ranks; none where no ``Checkpointer`` was entered.

    Raises:
        IncompleteError: Ranks are missing, or a second ``Checkpointer`` was entered.
    """
    if not storage.exists(witness_file(directory, 0)):
        return []
    tracks = [_read(witness_file(directory, 0))]
    for rank in range(1, tracks[0].world_size):
        path = witness_file(directory, rank)
        if not storage.exists(path):
            raise IncompleteError(
                f"Rank {rank} of {tracks[0].world_size} told nothing.",
                next_step="Every rank has to enter the Checkpointer.",
            )
        tracks.append(_read(path))
    return tracks


def _read(path: Path) -> Track:
    lines = storage.read_file(path, limit_bytes=_LIMIT_BYTES).split(b"\n")
    entries = [json.loads(line) for line in lines[:-1]]  # what has no end of line was cut off
    if not entries:
        raise IncompleteError("A scenario was cut off at its start.", next_step="Run it again.")
    first = entries[0]
    track = Track(first["rank"], first["world_size"], first["step"], first["parts"])
    for entry in entries[1:]:
        kind = entry["kind"]
        if kind == "open":
            raise IncompleteError(
                "The script enters a Checkpointer twice; which of the two trainings is meant can't "
                "be told.",
                next_step="Prove a command that trains once.",
            )
        if kind == "step":
            track.steps[entry["step"]] = entry
            track.end = None  # a later loop goes on
        elif kind == "strays":
            track.strays = entry["strays"]
        elif kind == "start":
            track.start = entry
        else:
            track.end = entry
    return track
