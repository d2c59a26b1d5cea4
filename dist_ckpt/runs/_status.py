"""How a run is doing: alive, how far, how fast, what a crash would cost. Layer 6, reads only."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.canonical import bin_size
from dist_ckpt.errors import CorruptFileError, DistCkptError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.history import LossGap, history_path, read_gap, run_name
from dist_ckpt.resume_point import INDEX_NAME, ResumePoint
from dist_ckpt.runs._liveness import Evidence, Liveness, State, look_alive
from dist_ckpt.runs._run import Run
from dist_ckpt.runs._vanished import tell_vanished

__all__ = ["Failing", "Status", "read_status"]

#: So many of an attempt's last checkpoints tell its speed.
_NUM_MARKS = 10
_MARKS = ("saved", "resumed", "fresh_start", "already_saved")

_Mark = tuple[float, int]


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
        last_step_age_secs: How long ago it was logged.
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
        """Return why it isn't healthy: alive, saving, its last step no older than that."""
        found = []
        age = self.last_step_age_secs
        if not self.is_alive:
            found.append(f"it isn't alive ({self.liveness.state.value})")
        if self.failing is not None:
            found.append("its last save failed")
        if age is None:
            found.append("no step was logged yet")
        elif age > max_age_secs:
            found.append(f"step {self.last_step} is {age:.1f} s old, more than {max_age_secs:g} s")
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
            "pid": facts.get("pid"),
            "host": facts.get("host"),
            "world_size": facts.get("world_size"),
            "last_step": self.last_step,
            "last_step_age_secs": self.last_step_age_secs,
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


def read_status(run: Run) -> Status:
    """Return how the run is doing now.

    Times of change say how long ago something happened; they never order anything.

    Raises:
        CorruptFileError: Its loss file is something else.
        StorageError: The file system refused.
    """
    now = time.time()
    store = run.store
    journal = run.journal()
    liveness = look_alive(store.run_dir, journal)
    marks = _newest_marks(journal)
    committed, damaged = _newest(store)
    logged = _last_logged(run, marks, committed)
    if logged is not None and marks and logged[0] > marks[-1][0] and logged[1] > marks[-1][1]:
        marks = [*marks, logged]
    speed = _secs_per_step(marks)
    age = None if logged is None else max(0.0, now - logged[0])
    last_step = None if logged is None else logged[1]
    committed_step = None if committed is None else committed.step
    lost = None if last_step is None else max(0, last_step - (committed_step or 0))
    return Status(
        name=run.name,
        path=str(run.path),
        liveness=_with_age(liveness, last_step, age, speed),
        attempt=_attempt(liveness.facts, journal),
        last_step=last_step,
        last_step_age_secs=age,
        secs_per_step=speed,
        committed_step=committed_step,
        committed_age_secs=None if committed is None else max(0.0, now - committed.time),
        verified_step=_newest_verified(store, damaged),
        lost_steps=lost,
        generation_bytes=None if committed is None else _bytes_of_one(store, committed),
        free_bytes=_free_bytes(store.run_dir),
        failing=_failing(journal),
        damaged=damaged,
        set_aside=_set_aside(store),
        lost_losses=None if committed is None else _gap(store, committed, journal),
        vanished=None if run.is_single else tell_vanished(store, journal),
    )


def _attempt(facts: Mapping[str, Any], journal: Sequence[Mapping[str, Any]]) -> int | None:
    known = facts.get("attempt", journal[-1].get("attempt") if journal else None)
    return known if type(known) is int else None


def _newest_marks(journal: Sequence[Mapping[str, Any]]) -> list[_Mark]:
    """Return ``(time, step)`` of the last events of the newest attempt that moved."""
    by_attempt: dict[str, list[_Mark]] = {}
    for event in journal:
        step, when = event.get("step"), event.get("time")
        if event.get("event") in _MARKS and type(step) is int and isinstance(when, int | float):
            by_attempt.setdefault(str(event.get("attempt")), []).append((float(when), step))
    for marks in reversed(by_attempt.values()):
        if marks[-1][1] > marks[0][1]:
            return marks[-_NUM_MARKS:]
    return list(by_attempt.values())[-1][-1:] if by_attempt else []


def _secs_per_step(marks: Sequence[_Mark]) -> float | None:
    # The median of the intervals: one long evaluation or a suspended laptop isn't the usual.
    rates = sorted(
        (later[0] - earlier[0]) / (later[1] - earlier[1])
        for earlier, later in pairwise(marks)
        if later[1] > earlier[1] and later[0] > earlier[0]
    )
    return rates[len(rates) // 2] if rates else None


def _last_logged(run: Run, marks: Sequence[_Mark], committed: ResumePoint | None) -> _Mark | None:
    """Return when the last step was logged and which; from the checkpoints where no losses are.

    A loss file may have been changed later by others: `rewind`, `undelete`, a copy. Where it ends
    with the newest generation, that tells the time: the training itself has written it there.
    """
    entries = run.loss()
    if entries and committed is not None and entries[-1][0] == committed.step:
        return committed.time, committed.step
    if entries:
        name = run_name(run.store.run_dir)
        status = storage.lstat(history_path(run.store.run_dir, name, "loss"))
        step = entries[-1][0]
        if not marks or step >= marks[-1][1]:
            return status.st_mtime, step
    return marks[-1] if marks else None


def _newest(store: StoredGenerations) -> tuple[ResumePoint | None, dict[int, str]]:
    """Return the newest generation that may be used, and why each newer one can't.

    Sizes and manifests are looked at, no data is read: `verify` does that.
    """
    damaged: dict[int, str] = {}
    for step in reversed(store.steps()):
        try:
            point = store.manifest(step)
            store.check_files(point)
            _check_index(store, point)
        except DistCkptError as error:
            if store.has(step):  # else it was retired meanwhile
                damaged[step] = error.message
            continue
        return point, damaged
    return None, damaged


def _check_index(store: StoredGenerations, point: ResumePoint) -> None:
    path, expected = store.path(point.step) / INDEX_NAME, int(point.index["size_bytes"])
    found = storage.file_size(path)
    if found != expected:
        raise CorruptFileError(f"{path} has {found:,} bytes where {expected:,} were written.")


def _failing(journal: Sequence[Mapping[str, Any]]) -> Failing | None:
    failed: list[Mapping[str, Any]] = []
    for event in reversed(journal):
        word = event.get("event")
        if word in ("saved", "already_saved", "attempt_started"):
            break
        if word == "save_failed":
            failed.append(event)
    if not failed:
        return None
    since = failed[-1].get("time")
    return Failing(len(failed), since, str(failed[0].get("error")))


def _gap(
    store: StoredGenerations, point: ResumePoint, journal: Sequence[Mapping[str, Any]]
) -> LossGap | None:
    return read_gap(store.run_dir, point.id, point.step, point.notes.get("history"), journal)


def _set_aside(store: StoredGenerations) -> tuple[str, ...]:
    if not storage.exists(store.archive):
        return ()
    return tuple(name for name in storage.list_names(store.archive) if name.startswith("faulty_"))


def _newest_verified(store: StoredGenerations, damaged: Collection[int]) -> int | None:
    steps = reversed(store.steps())
    return next((s for s in steps if s not in damaged and store.verified_at(s) is not None), None)


def _bytes_of_one(store: StoredGenerations, point: ResumePoint) -> int:
    """Return what a generation like this one takes; a .bin that is a link takes nothing more."""
    path = store.bin_path(point.step)
    own_bin = 0
    if storage.exists(path) and point.canonical.refused is None:
        is_link = point.canonical.is_shard and storage.lstat(path).st_nlink > 1
        own_bin = 0 if is_link else bin_size(point.canonical.num_params)
    return point.num_bytes + int(point.index["size_bytes"]) + own_bin


def _free_bytes(run_dir: Path) -> int | None:
    try:
        return storage.free_bytes(run_dir)
    except DistCkptError:
        return None


def _with_age(
    liveness: Liveness, last_step: int | None, age: float | None, usual: float | None
) -> Liveness:
    """Add the last step's age: a held lock can't tell a run that hangs from one that trains."""
    if age is None:
        return liveness
    text = f"step {last_step} was logged {age:.1f} s ago"
    if usual is not None:
        text += f", usual is one every {usual:.3g} s"
    found = Evidence("last step", None, text)
    return Liveness(liveness.state, (*liveness.evidence, found), liveness.facts, liveness.is_locked)
