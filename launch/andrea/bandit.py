"""The bandit over the sources of text: which one the next batch comes from.

Each source is an arm. Its tentative weight is ``mean + C·sqrt(ln N / n)``: the moving average of
its rewards, and more for one that was pulled rarely (n of N pulls). The final weight is not below
the source's floor and not above its ceiling. Sources get their turns in proportion to their
weights, by counting and not by drawing, so that no random number is needed.

What was learned is the state; floors, ceilings and the rest are settings, and can be changed by a
pivot (``dist-ckpt pivot RUN --policy FILE``), whose FILE holds any of the fields of `Settings`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A stretch of the training with settings of its own; what is None is as in `Settings`."""

    name: str
    pulls: int | None = None
    """How many pulls it lasts; None for the last one."""
    c: float | None = None
    floors: Mapping[str, float] | None = None
    ceilings: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Settings:
    """What a person decides about the bandit."""

    c: float = 0.5
    """How much rarely pulled sources are preferred."""
    decay: float = 0.9
    """How much of a reward's moving average stays at each new reward."""
    floors: Mapping[str, float] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """A ceiling of 0 turns a source off."""
    phases: tuple[Phase, ...] = (Phase("main"),)


@dataclass
class Arm:
    """What was learned of one source."""

    pulls: int = 0
    reward: float | None = None
    """Moving average; None before the first."""
    weight: float = 0.0
    """As of the last pull; for people."""
    credit: float = 0.0
    """Shares of turns that it was due and didn't get; below 0 when it got more."""


class Bandit:
    """A policy as `dist_ckpt.policy` wants it: state, sources, settings.

    Deterministic: the same rewards give the same pulls. On several ranks give each the same
    rewards (their mean), and all pull the same source.

    Args:
        sources: Names, in the order in which they are pulled first.
        settings: See there.
    """

    def __init__(self, sources: Iterable[str], settings: Settings | None = None) -> None:
        self.sources = tuple(sources)
        self.settings = settings or Settings()
        self.arms = {name: Arm() for name in self.sources}
        self.phase = 0
        self.phase_pulls = 0
        self._check()

    def pull(self) -> str:
        """Return the source of the next batch, and count it."""
        weights = self._weights()
        fresh = [name for name, arm in self.arms.items() if not arm.pulls and weights[name] > 0]
        total = sum(weights.values())
        if total <= 0:
            msg = "every source is turned off by a ceiling of 0"
            raise ValueError(msg)
        for name, arm in self.arms.items():
            arm.weight = weights[name]
            if arm.pulls and not fresh:
                arm.credit += weights[name] / total
        on = [name for name, weight in weights.items() if weight > 0]
        chosen = fresh[0] if fresh else max(on, key=lambda name: self.arms[name].credit)
        if not fresh:
            self.arms[chosen].credit -= 1.0
        self.arms[chosen].pulls += 1
        self._count_phase()
        return chosen

    def reward(self, source: str, value: float) -> None:
        """Learn what the last batch from `source` was worth; a value that isn't finite is none."""
        if not math.isfinite(value):
            return
        arm, decay = self.arms[source], self.settings.decay
        arm.reward = value if arm.reward is None else decay * arm.reward + (1 - decay) * value

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Take these fields of `Settings`; those that aren't there are as by default."""
        names = {item.name for item in fields(Settings)}
        if unknown := sorted(settings.keys() - names):
            msg = f"unknown settings {', '.join(unknown)}; there are {', '.join(sorted(names))}"
            raise ValueError(msg)
        plain = dict(settings)
        if "phases" in plain:
            plain["phases"] = tuple(Phase(**phase) for phase in plain["phases"])
        self.settings = replace(Settings(), **plain)
        self._check()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned; settings are not part of it."""
        return {
            "arms": {name: dict(vars(arm)) for name, arm in self.arms.items()},
            "phase": {
                "number": self.phase,
                "name": self._settings_now().name,
                "pulls": self.phase_pulls,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Sources that the state doesn't know start clean."""
        arms = state["arms"]
        self.arms = {name: Arm(**arms[name]) if name in arms else Arm() for name in self.sources}
        last = len(self.settings.phases) - 1
        self.phase = min(int(state["phase"]["number"]), last)
        self.phase_pulls = int(state["phase"]["pulls"])

    def _weights(self) -> dict[str, float]:
        now = self._settings_now()
        floors = self.settings.floors if now.floors is None else now.floors
        ceilings = self.settings.ceilings if now.ceilings is None else now.ceilings
        c = self.settings.c if now.c is None else now.c
        num_pulls = sum(arm.pulls for arm in self.arms.values())
        weights = {}
        for name, arm in self.arms.items():
            bonus = c * math.sqrt(math.log(num_pulls) / arm.pulls) if arm.pulls else 1.0
            weight = max((arm.reward or 0.0) + bonus, floors.get(name, 0.0), 0.0)
            weights[name] = min(weight, ceilings.get(name, math.inf))
        return weights

    def _settings_now(self) -> Phase:
        return self.settings.phases[self.phase]

    def _count_phase(self) -> None:
        self.phase_pulls += 1
        length = self._settings_now().pulls
        is_last = self.phase + 1 == len(self.settings.phases)
        if length is not None and self.phase_pulls >= length and not is_last:
            self.phase, self.phase_pulls = self.phase + 1, 0

    def _check(self) -> None:
        settings = self.settings
        if not self.sources or not settings.phases:
            msg = "a bandit needs one source and one phase at least"
            raise ValueError(msg)
        for phase in settings.phases:
            floors = settings.floors if phase.floors is None else phase.floors
            ceilings = settings.ceilings if phase.ceilings is None else phase.ceilings
            for name, floor in floors.items():
                if not 0 <= floor <= ceilings.get(name, math.inf):
                    msg = f"the floor {floor} of {name} isn't between 0 and its ceiling"
                    raise ValueError(msg)
            unknown = sorted((floors.keys() | ceilings.keys()) - set(self.sources))
            if unknown:
                text = f"floors or ceilings of {', '.join(unknown)}: no such source, no effect"
                warnings.warn(text, stacklevel=3)
