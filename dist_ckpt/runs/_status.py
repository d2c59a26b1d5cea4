"""How a run is doing: alive, how far, how fast, what a crash would cost. Layer 6, reads only."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.canonical import bin_size
from dist_ckpt.errors import CorruptFileError, DistCkptError
from dist_ckpt.generations import StoredGenerations, tell_vanished
from dist_ckpt.history import FollowedHistory, LossGap, read_gap, replays_until
from dist_ckpt.resume_point import INDEX_NAME, ResumePoint
from dist_ckpt.runs._health import Failing, Status
from dist_ckpt.runs._liveness import Evidence, Liveness, look_alive
from dist_ckpt.runs._run import Run

__all__ = ["missing_losses", "read_status"]

#: So many of an attempt's last checkpoints tell its speed.
_NUM_MARKS = 10
_MARKS = ("saved", "resumed", "fresh_start", "already_saved")

_Mark = tuple[float, int]


def read_status(run: Run, history: FollowedHistory | None = None) -> Status:
    """Return how the run is doing now.

    Times of change say how long ago something happened; they never order anything.

    Args:
        run: The run.
        history: Its history, where the caller looks at it again and again.

    Raises:
        CorruptFileError: Its loss file is something else.
        StorageError: The file system refused.
    """
    now = time.time()
    store = run.store
    history = history or FollowedHistory(store.run_dir)
    journal = history.journal()
    liveness = look_alive(store.run_dir, journal)
    marks = _newest_marks(journal)
    committed, damaged = _newest(store)
    logged = _last_logged(history, marks, committed)
    replays = replays_until(journal)
    # In a replay the time is that of a step before the last one: it tells no speed.
    if logged and not replays and marks and logged[0] > marks[-1][0] and logged[1] > marks[-1][1]:
        marks = [*marks, logged]
    speed = _secs_per_step(marks)
    age = None if logged is None else max(0.0, now - logged[0])
    last_step = None if logged is None else logged[1]
    committed_step = None if committed is None else committed.step
    lost = None if last_step is None else max(0, last_step - (committed_step or 0))
    return Status(
        name=run.name,
        path=str(run.path),
        liveness=_with_age(liveness, last_step, age, speed, replays),
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
        lost_losses=None if committed is None else _gap(history, committed),
        vanished=None if run.is_single else tell_vanished(store, journal),
        attempt_age_secs=_attempt_age_secs(journal, now),
        replays_until=replays,
    )


def _attempt(facts: Mapping[str, Any], journal: Sequence[Mapping[str, Any]]) -> int | None:
    known = facts.get("attempt", journal[-1].get("attempt") if journal else None)
    return known if type(known) is int else None


def _attempt_age_secs(journal: Sequence[Mapping[str, Any]], now: float) -> float | None:
    begun = (e.get("time") for e in reversed(journal) if e.get("event") == "attempt_started")
    when = next(begun, None)
    return max(0.0, now - when) if isinstance(when, int | float) else None


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


def _last_logged(
    history: FollowedHistory, marks: Sequence[_Mark], committed: ResumePoint | None
) -> _Mark | None:
    """Return when the last step was logged and which; from the checkpoints where no losses are.

    A loss file may have been changed later by others: `rewind`, `undelete`, a copy. Where it ends
    with the newest generation, that tells the time: the training itself has written it there.
    """
    step = history.index().last_step
    if step is not None and committed is not None and step == committed.step:
        return committed.time, committed.step
    if step is not None:
        when = storage.lstat(history.loss_path).st_mtime
        if not marks or step >= marks[-1][1]:
            return when, step
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


def missing_losses(run: Run) -> LossGap | None:
    """Return what the loss file lacks of what the newest usable generation, or a resume, knows of.

    Raises:
        CorruptFileError: Its loss file is something else.
        StorageError: The file system refused.
    """
    committed, _ = _newest(run.store)
    return None if committed is None else _gap(FollowedHistory(run.store.run_dir), committed)


def _gap(history: FollowedHistory, point: ResumePoint) -> LossGap | None:
    return read_gap(history, point.id, point.step, point.notes.get("history"))


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
    liveness: Liveness,
    last_step: int | None,
    age: float | None,
    usual: float | None,
    replays: int | None,
) -> Liveness:
    """Add the last step's age: a held lock can't tell a run that hangs from one that trains."""
    if age is None:
        return liveness
    again = "" if replays is None else ", or one before it came out again as logged,"
    text = f"step {last_step} was logged{again} {age:.1f} s ago"
    if usual is not None:
        text += f", usual is one every {usual:.3g} s"
    found = Evidence("last step", None, text)
    return Liveness(liveness.state, (*liveness.evidence, found), liveness.facts, liveness.is_locked)
