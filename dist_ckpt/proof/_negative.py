"""Negative controls: what happens when one part isn't restored. Runs scenarios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dist_ckpt.errors import UsageError
from dist_ckpt.proof._causes import describe_first
from dist_ckpt.proof._first import First, drawn_from, find_first
from dist_ckpt.proof._scenario import Runner, Scenario
from dist_ckpt.proof._tracks import Track

__all__ = [
    "MUST_DIVERGE",
    "PARTS",
    "Control",
    "Verdict",
    "check_kinds",
    "choose_parts",
    "run_control",
]

#: Left out one after the other unless the user names others.
PARTS = ("rng", "data", "optimizer", "scheduler", "scaler")
MUST_DIVERGE = ("rng", "data")
#: What a training may have besides; which of all these it has, the continuous run tells.
_KINDS = (*PARTS, "policy", "extra")
_NO_CONTROL = ("model", "buffers", "generators")


class Verdict(StrEnum):
    """What is known of a part."""

    DIVERGED = "diverged"
    NOT_PROVEN = "not proven"
    NOT_USED = "not used"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Control:
    """One part's negative control.

    Attributes:
        part: What was left out.
        verdict: What came of it.
        reason: In words.
        cut: The cut at which it diverged, or the last that was tried.
        first: The first difference.
    """

    part: str
    verdict: Verdict
    reason: str
    cut: int | None = None
    first: First | None = None

    @property
    def is_fault(self) -> bool:
        """Whether the proof fails by it."""
        return self.part in MUST_DIVERGE and self.verdict is Verdict.NOT_PROVEN

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "part": self.part,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "cut": self.cut,
            "first_difference": None if self.first is None else self.first.to_json(),
        }


def check_kinds(wanted: Sequence[str]) -> None:
    """Return if these can be parts of a training at all; known before anything has run.

    Raises:
        UsageError: One can't be.
    """
    for part in wanted:
        if part.partition(".")[0] not in _KINDS:
            raise UsageError(
                f"--leave-out {part} isn't a part of any training.",
                next_step=f"There are: {', '.join(_KINDS)}.NAME.",
                found=part,
            )


def choose_parts(wanted: Sequence[str], parts: Mapping[str, Any]) -> list[str]:
    """Return the parts to leave out: the user's, or all five kinds.

    Raises:
        UsageError: One isn't a part of this training.
    """
    if not wanted:
        return list(PARTS)
    there = sorted({"rng", *(word for word in parts if not _is_of(word, _NO_CONTROL))})
    kinds = {word.partition(".")[0] for word in there}
    for part in wanted:
        if part not in there and part not in kinds:
            raise UsageError(
                f"--leave-out {part} isn't a part of this training.",
                next_step=f"There are: {', '.join(there)}.",
                found=part,
            )
    return list(dict.fromkeys(wanted))


def run_control(
    part: str, runner: Runner, continuous: Scenario, before: Sequence[Scenario]
) -> Control:
    """Return what leaving out ``part`` does, tried at one cut after the other until it shows.

    Args:
        part: What to leave out.
        runner: Runs the scenarios.
        continuous: The run without a cut.
        before: Scenarios that ended at a cut; the first is tried first.
    """
    unused = _why_unused(part, continuous.tracks)
    if unused is not None:
        return Control(part, Verdict.NOT_USED, unused)
    control = None
    for scenario in _worth_trying(part, continuous, before):
        cut = scenario.stop_at
        negative = runner.run(
            f"without-{part}-{cut}", continuous.stop_at, after=scenario, omit=part
        )
        # A part that isn't restored differs in itself: what counts is what it does to the rest.
        ignore = () if part in MUST_DIVERGE else (part,)
        first = find_first(continuous.tracks, negative.tracks, opened_at=cut, ignore=ignore)
        if first is not None:
            reason = f"{describe_first(first)}; {_reach(continuous, negative)}"
            return Control(part, Verdict.DIVERGED, reason, cut, first)
        control = Control(part, Verdict.NOT_PROVEN, _why_not_proven(part, continuous), cut)
    return control or Control(part, Verdict.NOT_PROVEN, _why_not_proven(part, continuous))


def _reach(continuous: Scenario, negative: Scenario) -> str:
    """Return whether the weights are touched by it, in words."""
    pairs = list(zip(continuous.tracks, negative.tracks, strict=True))
    for step in range(negative.opened_at + 1, negative.stop_at + 1):
        for want, have in pairs:
            if want.steps[step]["state"]["model"] != have.steps[step]["state"]["model"]:
                return f"the weights differ from step {step} on"
    return "the weights stay the same"


def _worth_trying(
    part: str, continuous: Scenario, before: Sequence[Scenario]
) -> Sequence[Scenario]:
    # Where the rates stay the same another cut shows no more.
    return before[:1] if part == "scheduler" and not _rates_change(continuous) else before


def _rates_change(continuous: Scenario) -> bool:
    track = continuous.tracks[0]
    return any(line["lr"] != (track.start or line)["lr"] for line in track.steps.values())


def _why_unused(part: str, tracks: Sequence[Track]) -> str | None:
    if part == "rng":
        return None if drawn_from(tracks) else "no generator drew anything in the continuous run"
    words = {word: kind for word, kind in tracks[0].parts.items() if _is_of(word, (part,))}
    if not words:
        return f"the Checkpointer was given no {part}"
    if set(words.values()) == {"disabled"}:
        return "it is disabled"
    return None


def _why_not_proven(part: str, continuous: Scenario) -> str:
    if part == "rng":
        return (
            "random state was drawn from, but without it the continuation is the same: does the "
            "script seed in each step, or draw only after the cut?"
        )
    if part == "data":
        return (
            "without it the continuation is the same: its state_dict() doesn't move with what is "
            "consumed"
        )
    if part == "scheduler" and not _rates_change(continuous):
        return "the learning rate never changed; more steps (--until) may show it"
    if part == "optimizer":
        return "without it the continuation is the same: it may have no state"
    return "without it the continuation is the same"


def _is_of(word: str, parts: Sequence[str]) -> bool:
    return any(word == part or word.startswith(f"{part}.") for part in parts)
