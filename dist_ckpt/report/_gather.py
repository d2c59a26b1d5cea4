"""A run → all that its page tells, as plain JSON values and its losses. Layer 7, reads only.

What can't be read is named on the page and costs it only that part; a loss file that is something
else is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt import __version__, storage
from dist_ckpt.errors import CorruptFileError, DistCkptError, NotFoundError
from dist_ckpt.generations import VANISHED_ADVICE
from dist_ckpt.history import FollowedHistory, LossEntry, proven_steps, read_samples
from dist_ckpt.report._story import attempts_of, last_until, marks_of, replays_of
from dist_ckpt.runs import Run, Status, list_rows, read_status
from dist_ckpt.wording import counted

__all__ = [
    "SCHEMA",
    "Gathered",
    "gather",
    "later_of",
    "now_of",
    "sample_loss",
    "story_of",
]

SCHEMA = "dist_ckpt.report/1"
_STATE_LIMIT_BYTES = 1 << 20
#: The newest samples go into a page, as long as their texts together aren't longer than this.
_SAMPLES_CHARS = 200_000
_SAMPLE_CHARS = 20_000
_AGES = ("last_step_age_secs", "committed_age_secs", "attempt_age_secs")
_MAX_DAMAGED = 3
_MAX_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a page is made of.

    Attributes:
        now: How the run is, small.
        story: What happened: attempts, marks, generations, samples, policy.
        entries: The loss file, void entries included.
        void: How many entries from its beginning don't count at all.
    """

    now: dict[str, Any]
    story: dict[str, Any]
    entries: Sequence[LossEntry]
    void: int


def gather(run: Run) -> Gathered:
    """Return everything about a run, read once.

    Raises:
        CorruptFileError: Its loss file is something else.
        StorageError: The file system refused.
    """
    history = FollowedHistory(run.store.run_dir)
    status = read_status(run, history)
    journal, losses = history.journal(), history.losses()
    return Gathered(
        now=now_of(status, journal),
        story=story_of(run, status, journal),
        entries=losses.entries(),
        void=losses.void,
    )


def now_of(status: Status, journal: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the run is, with the time at which that was so."""
    until = last_until(journal)
    left = None
    if until is not None and status.last_step is not None and status.secs_per_step:
        left = max(0, until - status.last_step) * status.secs_per_step
    said = status.to_json()
    del said["damaged"], said["set_aside"]  # of any number; the troubles tell of them
    return {
        **said,
        "is_alive": status.is_alive,
        "troubles": _troubles(status),
        "until": until,
        "left_secs": left,
        "time": time.time(),
    }


def later_of(now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `now_of` told, as it is by this time if nothing has happened since."""
    passed = max(0.0, time.time() - now["time"])
    ages = {key: now[key] for key in _AGES}
    aged = {key: None if age is None else age + passed for key, age in ages.items()}
    return {**now, **aged, "time": now["time"] + passed}


def _troubles(status: Status) -> list[str]:
    """Return what somebody should look after, a sentence each."""
    damaged = list(status.damaged.items())
    troubles = [f"Step {step} can't be used: {why}" for step, why in damaged[:_MAX_DAMAGED]]
    if len(damaged) > _MAX_DAMAGED:
        older = counted(len(damaged) - _MAX_DAMAGED, "older generation")
        troubles.append(f"{older} can't be used, either.")
    if status.vanished is not None:
        troubles.append(f"{status.vanished} {VANISHED_ADVICE}")
    if status.failing is not None:
        count = status.failing.count
        which = "The last save" if count == 1 else f"The last {count} saves"
        troubles.append(f"{which} failed: {status.failing.error}")
    if status.lost_losses is not None:
        text = str(status.lost_losses)
        troubles.append(f"{text[0].upper()}{text[1:]}.")
    if status.set_aside:
        troubles.append(f"Found unusable and set aside in archive/: {', '.join(status.set_aside)}.")
    return troubles


def story_of(run: Run, status: Status, journal: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what happened so far; it is the same until something else happens."""
    problems: list[str] = []
    attempts = attempts_of(journal)
    if attempts and attempts[-1].how is None and status.last_step is not None:
        # The newest attempt's steps stand in the loss file before the journal tells of them.
        attempts[-1].last_step = max(attempts[-1].last_step or 0, status.last_step)
    marks = marks_of(journal, attempts, alive=status.is_alive)
    return {
        "attempts": [attempt.to_json() for attempt in attempts],
        "marks": [mark.to_json() for mark in marks],
        "replays": replays_of(journal),
        "generations": _try(problems, lambda: _generations(run, journal)) or [],
        "samples": _try(problems, lambda: _samples(run)) or {"total": 0, "rows": []},
        "policy": _try(problems, lambda: _policy(run)),
        "problems": problems,
        "version": __version__,
        "schema": SCHEMA,
    }


def _try(problems: list[str], read: Callable[[], Any]) -> Any:
    try:
        return read()
    except NotFoundError:
        return None
    except (DistCkptError, ValueError, RecursionError) as error:
        problems.append(str(error))
        return None


def _generations(run: Run, journal: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of `ls`, as arrays: a page may have thousands."""
    return [
        [
            row.step,
            row.time,
            list(row.reasons),
            row.world_size,
            row.num_bytes,
            row.verified_at,
            row.pinned,
            row.proven,
            row.fault,
        ]
        for row in list_rows(run.store, proven_steps(journal))
    ]


def _samples(run: Run) -> dict[str, Any]:
    samples = read_samples(run.store.run_dir)
    rows: list[list[Any]] = []
    room = _SAMPLES_CHARS
    for sample in reversed(samples):
        text = str(sample.get("text", ""))
        if len(text) > _SAMPLE_CHARS:
            text = f"{text[:_SAMPLE_CHARS]}… ({len(text):,} characters)"
        room -= len(text)
        if room < 0:
            break
        rows.append([sample["step"], sample_loss(sample), text])
    return {"total": len(samples), "rows": rows[::-1]}


def sample_loss(sample: Mapping[str, Any]) -> float | None:
    """Return a sample's loss; None where it is no number: others write samples, too."""
    loss = sample.get("loss")
    return loss if type(loss) in (int, float) else None


def _policy(run: Run) -> dict[str, Any] | None:
    """Return the policy's state and the settings that a person gave it; None without either."""
    found = {what: _sidecar(run, f".{what}.json") for what in ("state", "policy")}
    return None if found == {"state": None, "policy": None} else found


def _sidecar(run: Run, suffix: str) -> Any:
    path = run.store.run_dir / f"{run.name}{suffix}"
    if not storage.exists(path):
        return None
    value = json.loads(storage.read_file(path, limit_bytes=_STATE_LIMIT_BYTES))
    if _is_deep(value):
        raise CorruptFileError(f"{path} is nested deeper than {_MAX_LEVELS} levels.", path=path)
    return value


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested so deeply that neither side may be able to encode it."""
    level = [value]
    for _ in range(_MAX_LEVELS):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        level = [x for one in nested for x in (one.values() if isinstance(one, dict) else one)]
    return True
