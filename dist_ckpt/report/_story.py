"""The journal → attempts, marks on the curve, replayed windows. Pure: layer 7.

Nothing is ordered by time: the order of the journal is the order of events.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dist_ckpt.history import replay_summary

__all__ = ["MARKS", "Attempt", "Mark", "attempts_of", "last_until", "marks_of", "replays_of"]

Event = Mapping[str, Any]

_ENDS = ("attempt_ended", "attempt_stopped", "attempt_failed")
#: Event → kind of mark. What others add under these names is shown with the fields that it has.
MARKS: Mapping[str, str] = {
    "signal": "signal",
    "attempt_failed": "crash",
    "rewound": "rewind",
    "rewind": "rewind",
    "pivot": "pivot",
    "pivoted": "pivot",
    "fork": "fork",
    "forked": "fork",
    "undeleted": "rewind",
    "policy_changed": "pivot",
    "policy_differs": "fault",
    "zombie_arms": "fault",
    "skipped": "fault",
    "faulty": "fault",
    "save_failed": "fault",
    "losses_missing": "fault",
    "made_again": "fault",
    "stale": "fault",
    "replay_differs": "fault",
    "loss_not_finite": "fault",
}
_OWN = ("time", "attempt", "event", "step", "id", "moved_to")
#: Fields whose value needs no name before it.
_SELF_EVIDENT = ("error", "errors", "reason", "text", "kind")
_MAX_TEXT = 300
#: A run that diverged journals each of its losses that aren't finite; so many of a kind are drawn.
_MAX_MARKS = 200
#: Whole numbers beyond it are none to a browser.
_MAX_WHOLE = 2**53 - 1


@dataclass
class Attempt:
    """One lifetime of the job, as the journal tells it.

    Attributes:
        number: As counted by the run.
        began: When it locked the run directory.
        ended: When it wrote its last word; None where it wrote none.
        start_step: The step it went on from; None where it died before.
        last_step: The last step that it is known to have finished.
        how: ``ended``, ``stopped``, ``failed``; None where the journal has no end.
        why: The reason or the error.
        host: Where rank 0 ran.
        pid: Its process there.
        world_size: Ranks.
        saved: Generations that it committed.
        blocked_secs: What its saves took from training, together.
        secs_per_step: Between its first and last checkpoint.
    """

    number: Any
    began: float | None = None
    ended: float | None = None
    start_step: int | None = None
    last_step: int | None = None
    how: str | None = None
    why: str | None = None
    host: str | None = None
    pid: int | None = None
    world_size: int | None = None
    saved: int = 0
    blocked_secs: float = 0.0
    secs_per_step: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        kind: ``signal``, ``crash``, ``rewind``, ``pivot``, ``fork`` or ``fault``.
        step: Where.
        attempt: In which attempt.
        time: When; None where nobody knows.
        text: What, in a line.
    """

    kind: str
    step: int
    attempt: Any
    time: float | None
    text: str

    def to_json(self) -> list[Any]:
        """Return it as plain JSON values."""
        return [self.kind, self.step, self.attempt, self.time, self.text]


def attempts_of(journal: Iterable[Event]) -> list[Attempt]:
    """Return the attempts in the order in which they began.

    Commands write into the journal, too, under numbers of their own: those are none.
    """
    found: dict[Any, Attempt] = {}
    moved: dict[Any, list[tuple[float, int]]] = {}
    previous: Attempt | None = None
    for event in journal:
        number = _whole(event.get("attempt"))
        if event.get("event") == "attempt_started" and number is not None:
            previous = next(reversed(found.values()), None)
            found[number] = Attempt(number, began=_number(event.get("time")))
        if number is None or number not in found:
            continue
        attempt = found[number]
        _apply(attempt, event, previous)
        when, step = _number(event.get("time")), _step(event)
        if event.get("event") in ("resumed", "fresh_start", "saved") and when is not None:
            moved.setdefault(number, []).append((when, step or 0))
    for number, points in moved.items():
        (first, start), (last, stop) = points[0], points[-1]
        if stop > start and last > first:
            found[number].secs_per_step = (last - first) / (stop - start)
    return list(found.values())


def _apply(attempt: Attempt, event: Event, previous: Attempt | None) -> None:
    kind, step = event.get("event"), _step(event)
    if kind == "attempt_started":
        attempt.host, attempt.pid = _text(event.get("host")), _whole(event.get("pid"))
        attempt.world_size = _whole(event.get("world_size"))
    elif kind in ("resumed", "fresh_start"):
        attempt.start_step = attempt.last_step = step or 0
    elif kind == "saved":
        attempt.saved += 1
        attempt.blocked_secs += _number(event.get("blocked_secs")) or 0.0
    elif kind in _ENDS:
        attempt.how = str(kind).removeprefix("attempt_")
        attempt.why = _text(event.get("error") or event.get("reason"))
        attempt.ended = _number(event.get("time"))
    elif kind == "replayed" and previous is not None and previous.how is None:
        # What it computed again, the one before had logged before it was killed.
        logged = (_whole(event.get("resumed_step")) or 0) + (_whole(event.get("of")) or 0)
        previous.last_step = max(previous.last_step or 0, logged)
    if step is not None and kind in ("saved", "already_saved", "signal", *_ENDS):
        attempt.last_step = max(attempt.last_step or 0, step)


def marks_of(journal: Iterable[Event], attempts: Iterable[Attempt], *, alive: bool) -> list[Mark]:
    """Return what is drawn on the curve, in the order in which it happened.

    Args:
        journal: The events.
        attempts: What `attempts_of` made of them.
        alive: The newest attempt isn't known to be over.
    """
    silent = {attempt.number: attempt for attempt in attempts if attempt.how is None}
    marks: list[Mark] = []
    drawn: Counter[str] = Counter()
    step, number = 0, None
    for event in journal:
        attempt = _whole(event.get("attempt"))
        if attempt not in (None, number):
            # The one before has said its last word, if it said one.
            marks += _crash(silent.pop(number, None))
            number = attempt
        name = str(event.get("event"))
        found = _step(event)
        step = step if found is None else found
        drawn[name] += 1
        if name in MARKS and drawn[name] <= _MAX_MARKS:
            when = _number(event.get("time"))
            marks.append(Mark(MARKS[name], step, number, when, _tell(name, event)))
    return marks if alive else marks + _crash(silent.get(number))


def _crash(attempt: Attempt | None) -> list[Mark]:
    if attempt is None:
        return []
    return [Mark("crash", attempt.last_step or 0, attempt.number, None, "gone without a word")]


def _tell(name: str, event: Event) -> str:
    if name == "signal":
        return _spell(event.get("signals") or "signal")
    fields = {key: value for key, value in event.items() if key not in _OWN}
    facts = ", ".join(
        _spell(value) if key in _SELF_EVIDENT else f"{key.replace('_', ' ')} {_spell(value)}"
        for key, value in fields.items()
        if value not in (None, False, "", [], {})
    )
    text = f"{name.replace('_', ' ')}: {facts}" if facts else name.replace("_", " ")
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _spell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def replays_of(journal: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the windows of steps that resumes computed again."""
    return [
        {**asdict(found), "all_agreed": found.all_agreed}
        for found in replay_summary(filter(_is_replay, journal))
    ]


def _is_replay(event: Event) -> bool:
    needed = (event.get("resumed_step", 0), event.get("agreed", 0), event.get("of", 0))
    others = (event.get("first_difference"), event.get("first_step"))
    return (
        all(_whole(value) is not None for value in needed)
        and all(value is None or _whole(value) is not None for value in others)
        and all(type(event.get(key, True)) is bool for key in ("complete", "comparable"))
        and isinstance(event.get("likely_cause"), str | None)
    )


def last_until(journal: Iterable[Event]) -> int | None:
    """Return the step that the newest attempt trains to; None where the journal doesn't say."""
    until = None
    for event in journal:
        if event.get("event") == "attempt_started":
            until = None
        elif event.get("event") == "loop_started":
            until = _whole(event.get("until"))
    return until


def _step(event: Event) -> int | None:
    return _whole(event.get("step"))


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= _MAX_WHOLE else None


def _number(value: Any) -> float | None:
    # Neither NaN nor a whole number that no float holds.
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return float(value) if is_number else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
