"""What `read_status` tells of a run, and whether that is health. Layer 6, pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dist_ckpt.history import LossGap
from dist_ckpt.runs._liveness import Liveness, State

__all__ = ["Failing", "Status"]


@dataclass(frozen=True, slots=True)
class Failing:
    """Saves that failed, and none since was committed.

    Attributes:
        count: How many.
        since: When the first did, in seconds since the epoch.
        error: Why the last did.
    """

    count: int
    since: float | None
    error: str


@dataclass(frozen=True, slots=True)
class Status:
    """A run's health at one moment.

    Attributes:
        name: The run's name.
        path: Its directory.
        liveness: Alive or not, by what evidence.
        attempt: Number of the newest attempt.
        last_step: The last step that the loss file or the journal tells of.
        last_step_age_secs: How long ago it was logged; in a replay, a lost step came out as logged.
        secs_per_step: The usual, over the last checkpoints of the newest attempt that tells.
        committed_step: The newest generation.
        committed_age_secs: How long ago it was committed.
        verified_step: The newest generation that was read back whole.
        lost_steps: Finished steps that a crash now would cost (a dead run: has cost).
        generation_bytes: What one more generation takes, its .bin included.
        free_bytes: What this user may still write there.
        failing: Saves that failed since the last one that was committed, None where none did.
        damaged: Step → why that generation can't be used, as far as sizes and manifests tell.
        set_aside: What a start found unusable and moved to archive/.
        lost_losses: What the loss file lacks of what was logged, None where nothing is missing.
        vanished: Says that generations which the journal tells of are gone; None: they aren't.
        attempt_age_secs: How long ago the newest attempt began.
        replays_until: The last lost step that is being computed again, None where none is.
    """

    name: str
    path: str
    liveness: Liveness
    attempt: int | None
    last_step: int | None
    last_step_age_secs: float | None
    secs_per_step: float | None
    committed_step: int | None
    committed_age_secs: float | None
    verified_step: int | None
    lost_steps: int | None
    generation_bytes: int | None
    free_bytes: int | None
    failing: Failing | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)
    set_aside: tuple[str, ...] = ()
    lost_losses: LossGap | None = None
    vanished: str | None = None
    attempt_age_secs: float | None = None
    replays_until: int | None = None

    @property
    def lost_secs(self) -> float | None:
        """The time that computing ``lost_steps`` took."""
        if self.lost_steps is None or self.secs_per_step is None:
            return None
        return self.lost_steps * self.secs_per_step

    @property
    def fitting(self) -> int | None:
        """How many more generations fit on the disk."""
        if not self.generation_bytes or self.free_bytes is None:
            return None
        return self.free_bytes // self.generation_bytes

    @property
    def is_alive(self) -> bool:
        """Not known to be over; a run on another host may be alive."""
        return self.liveness.state in (State.RUNNING, State.SUSPENDED, State.UNKNOWN)

    def ailments(self, max_age_secs: float) -> list[str]:
        """Return why it isn't healthy: alive, saving, its last step no older than that.

        A live attempt has that long for its first step, too, however old the last one's steps are.
        """
        found = []
        age = self.last_step_age_secs
        begun = self.attempt_age_secs if self.is_alive else None
        if not self.is_alive:
            found.append(f"it isn't alive ({self.liveness.state.value})")
        if self.failing is not None:
            found.append("its last save failed")
        if age is None:
            found.append("no step was logged yet")
        elif age > max_age_secs and (begun is None or begun > max_age_secs):
            step = f"step {self.last_step}"
            if self.replays_until is not None:
                step = f"the last lost step (up to {self.replays_until}) that came out again"
            found.append(f"{step} is {age:.1f} s old, more than {max_age_secs:g} s")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        facts = self.liveness.facts
        return {
            "run": self.name,
            "path": self.path,
            "state": self.liveness.state.value,
            "alive": None if self.liveness.state is State.UNKNOWN else self.is_alive,
            "evidence": [
                {"what": found.what, "alive": found.alive, "text": found.text}
                for found in self.liveness.evidence
            ],
            "attempt": self.attempt,
            "attempt_age_secs": self.attempt_age_secs,
            "pid": facts.get("pid"),
            "host": facts.get("host"),
            "world_size": facts.get("world_size"),
            "last_step": self.last_step,
            "last_step_age_secs": self.last_step_age_secs,
            "replays_until": self.replays_until,
            "secs_per_step": self.secs_per_step,
            "committed_step": self.committed_step,
            "committed_age_secs": self.committed_age_secs,
            "verified_step": self.verified_step,
            "lost_steps": self.lost_steps,
            "lost_secs": self.lost_secs,
            "generation_bytes": self.generation_bytes,
            "free_bytes": self.free_bytes,
            "generations_that_fit": self.fitting,
            "saves_failing": None if self.failing is None else asdict(self.failing),
            "damaged": {str(step): why for step, why in self.damaged.items()},
            "set_aside": list(self.set_aside),
            "losses_missing": None if self.lost_losses is None else asdict(self.lost_losses),
            "vanished": self.vanished,
        }
