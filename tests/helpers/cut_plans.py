"""Which combinations of what happened to pending operations are tried, and how many were.

Each operation has its ways, the words of `helpers.power_cuts`; a plan gives each one of them.
Nothing here knows what the operations are.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: With so many pending operations the names are tried in every combination, and all ways where
#: these are few enough; above, the telling ones and a sample.
EXHAUSTIVE = 8

Plan = tuple[str, ...]
Ways = Sequence[Sequence[str]]


@dataclass
class Coverage:
    """At how many instants how much was tried.

    Attributes:
        instants: All of them.
        small: Those with up to ``EXHAUSTIVE`` pending operations.
        whole: Every combination was tried.
        small_whole: Of the small ones.
        telling: Not every combination, but each beginning, all but one and only one.
    """

    instants: int = 0
    small: int = 0
    whole: int = 0
    small_whole: int = 0
    telling: int = 0

    def __str__(self) -> str:
        rest = self.instants - self.whole - self.telling
        return (
            f"{self.instants} instants: {self.whole} in every combination ({self.small_whole} of "
            f"{self.small} with up to {EXHAUSTIVE} operations pending), {self.telling} in each "
            f"beginning, all but one, only one and a sample, {rest} in a part of these"
        )


class Plans:
    """The plans of one instant, each once: the two plain ones, and ``at_most`` others.

    First those that tell most: each beginning is kept, all but one, only one. Then every other
    combination, in an order drawn, where there are no more than ``at_most``. Elsewhere, with few
    operations, every combination of kept and lost; and a sample.

    Args:
        ways: Of each operation.
        generator: Draws order and sample.
        at_most: So many, and the two plain ones.
    """

    def __init__(self, ways: Ways, generator: random.Random, at_most: int) -> None:
        self._ways = ways
        self._generator = generator
        self._at_most = at_most
        self._drawn = 0
        self._num_telling = 0
        self._plans = self._iterate()

    @property
    def is_small(self) -> bool:
        """Few operations are pending."""
        return len(self._ways) <= EXHAUSTIVE

    @property
    def is_whole(self) -> bool:
        """Every combination was given."""
        return self._drawn == math.prod(map(len, self._ways))

    @property
    def is_told(self) -> bool:
        """The telling ones were given, all of them."""
        return 0 < self._num_telling <= self._drawn

    def count_in(self, coverage: Coverage) -> None:
        """Count this instant, by what was given of it."""
        coverage.instants += 1
        coverage.small += self.is_small
        coverage.whole += self.is_whole
        coverage.small_whole += self.is_small and self.is_whole
        coverage.telling += self.is_told and not self.is_whole

    def __iter__(self) -> Iterator[Plan]:
        return self

    def __next__(self) -> Plan:
        plan = next(self._plans)
        self._drawn += 1
        return plan

    def _iterate(self) -> Iterator[Plan]:
        count = len(self._ways)
        plain = dict.fromkeys([("lost",) * count, ("kept",) * count])
        yield from plain
        seen = set(plain)
        telling = dict.fromkeys(plan for plan in _telling(self._ways) if plan not in seen)
        self._num_telling = len(plain) + len(telling)
        shuffled = list(telling)
        self._generator.shuffle(shuffled)
        left = self._at_most
        for plan in itertools.chain(shuffled, self._others()):
            if left == 0:
                return
            if plan not in seen:
                seen.add(plan)
                left -= 1
                yield plan

    def _others(self) -> Iterator[Plan]:
        whole = math.prod(map(len, self._ways)) <= self._at_most
        if whole or self.is_small:
            ways = self._ways if whole else [("lost", "kept")] * len(self._ways)
            plans = list(itertools.product(*ways))
            self._generator.shuffle(plans)
            yield from plans
        if not whole:
            for _ in range(self._at_most):
                yield tuple(self._generator.choice(way) for way in self._ways)


def _telling(ways: Ways) -> Iterator[Plan]:
    count = len(ways)
    for number in range(count):
        yield ("kept",) * number + ("lost",) * (count - number)
        for rest in ("lost", "kept"):
            before, after = (rest,) * number, (rest,) * (count - number - 1)
            yield from ((*before, way, *after) for way in ways[number] if way != rest)
