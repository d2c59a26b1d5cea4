"""The first difference between two scenarios: where, and in what. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt.proof._tracks import Track

__all__ = [
    "DRAWS",
    "INPUTS",
    "LOSS",
    "RATES",
    "STATE",
    "STEP",
    "First",
    "drawn_from",
    "find_first",
]

STEP = "step"
INPUTS = "inputs"
DRAWS = "draws"
LOSS = "loss"
RATES = "learning rate"
STATE = "state"


@dataclass(frozen=True)
class First:
    """The first boundary at which two scenarios aren't the same, and all that differs there.

    Attributes:
        step: The finished step at whose boundary it shows; the step resumed from, at a start.
        at_start: It shows before the first body.
        rank: The lowest rank that shows it.
        kinds: What differs, in the order of cause: kind → names (generators, parts, groups).
        shown: Kind → what was expected and what was found, where a person can read it.
    """

    step: int
    at_start: bool
    rank: int
    kinds: Mapping[str, tuple[str, ...]]
    shown: Mapping[str, tuple[Any, Any]]

    @property
    def kind(self) -> str:
        """What differs first in the order of cause."""
        return next(iter(self.kinds))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "step": self.step,
            "before_first_body": self.at_start,
            "rank": self.rank,
            "what": {kind: list(names) for kind, names in self.kinds.items()},
            "shown": {kind: list(pair) for kind, pair in self.shown.items()},
        }


def drawn_from(tracks: Sequence[Track]) -> set[str]:
    """Return the generators that move in the loop of a scenario, on any rank.

    The others may be unseeded, and so in another state in each process, without any harm.
    """
    return {
        name
        for track in tracks
        if track.start is not None
        for line in track.steps.values()
        for name, state in line["rng"].items()
        if track.start["rng"].get(name) != state
    }


def find_first(
    expected: Sequence[Track],
    found: Sequence[Track],
    *,
    opened_at: int,
    before: Sequence[Track] | None = None,
    ignore: Collection[str] = (),
) -> First | None:
    """Return the first difference of a scenario from the continuous run; None where they agree.

    Args:
        expected: The continuous run, by rank.
        found: The scenario, by rank.
        opened_at: The step that it had to resume from.
        before: The scenario that saved what this one resumed from; its generators that the
            continuous run doesn't draw from must have been put back, too.
        ignore: Parts whose own state doesn't count, as ``"scheduler"``.
    """
    for track in found:
        if track.opened_at != opened_at:
            pair = {STEP: (opened_at, track.opened_at)}
            return First(opened_at, True, track.rank, {STEP: ()}, pair)
    drawn = drawn_from(expected)
    last = found[0].last_step
    for step in range(opened_at, last + 1):
        for want, have in zip(expected, found, strict=True):
            here, there = have.at(step), want.at(step)
            if here is None or there is None:
                continue
            is_start = step == opened_at
            idle = have.start if before is None or not is_start else before[have.rank].at(step)
            rng = _expected_rng(there, here, idle, drawn)
            kinds, shown = _differences({**there, "rng": rng}, here, ignore, is_start=is_start)
            if kinds:
                return First(step, is_start, have.rank, kinds, shown)
    return _at_the_end(expected, found, last, drawn)


def _expected_rng(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    idle: Mapping[str, Any] | None,
    drawn: Collection[str],
) -> dict[str, Any]:
    """Return the state that each generator must have: the continuous run's, or its own of before.

    Args:
        there: The line of the continuous run.
        here: The line to be judged.
        idle: Where generators are that nobody draws from.
        drawn: Generators that the continuous run draws from.
    """
    still = (idle or here)["rng"]
    names = {**there["rng"], **here["rng"]}
    return {name: (there["rng"] if name in drawn else still).get(name) for name in names}


def _at_the_end(
    expected: Sequence[Track], found: Sequence[Track], last: int, drawn: Collection[str]
) -> First | None:
    for want, have in zip(expected, found, strict=True):
        if want.end is None or have.end is None or want.end["step"] != last:
            continue
        names = _names_of(want.end["draws"], have.end["draws"])
        if draws := tuple(name for name in names if name in drawn):
            return First(last, False, have.rank, {DRAWS: draws}, {})
    return None


def _differences(
    want: Mapping[str, Any],
    have: Mapping[str, Any],
    ignore: Collection[str],
    *,
    is_start: bool,
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Any, Any]]]:
    kinds: dict[str, tuple[str, ...]] = {}
    shown: dict[str, tuple[Any, Any]] = {}
    keys = ("data",) if is_start else ("indices", "data")
    if inputs := tuple(key for key in keys if want.get(key) != have.get(key)):
        kinds[INPUTS] = inputs
        shown[INPUTS] = (want.get(inputs[0]), have.get(inputs[0]))
    if draws := _names_of(want["rng"], have["rng"]):
        kinds[DRAWS] = draws
    if not is_start and want["loss"] != have["loss"]:
        kinds[LOSS] = ()
        shown[LOSS] = (_number(want["loss"]), _number(have["loss"]))
    if want["lr"] != have["lr"]:
        kinds[RATES] = ()
        shown[RATES] = (_numbers(want["lr"]), _numbers(have["lr"]))
    words = _names_of(want["state"], have["state"])
    if words := tuple(word for word in words if not _is_part(word, ignore)):
        kinds[STATE] = words
    return kinds, shown


def _names_of(want: Mapping[str, Any], have: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in {**want, **have} if want.get(key) != have.get(key))


def _is_part(word: str, parts: Collection[str]) -> bool:
    return any(word == part or word.startswith(f"{part}.") for part in parts)


def _number(text: str | None) -> Any:
    # As `float.hex` spells it; what isn't finite stays text, for JSON.
    value = None if text is None else float.fromhex(text)
    return text if value is None or value != value or abs(value) == float("inf") else value  # noqa: PLR0124


def _numbers(rates: Sequence[Sequence[str]]) -> list[list[Any]]:
    return [[_number(rate) for rate in group] for group in rates]
