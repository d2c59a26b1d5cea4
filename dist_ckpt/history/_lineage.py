"""Which resume point came from which, as the journal tells. Pure: layer 4.

A run owns what it saved, resumed from or was forked from; a generation that somebody copied into
its directory isn't its own. Going back makes branches, and each generation has one past.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["FORKED", "LINEAGE_EVENTS", "Lineage", "trace_lineage"]

FORKED: Final = "forked"
#: What `trace_lineage` looks at.
LINEAGE_EVENTS: Final = ("attempt_started", "saved", "resumed", FORKED, "fresh_start")


@dataclass(frozen=True, slots=True)
class Lineage:
    """The resume points of a run and where each came from.

    Attributes:
        parents: Id → the id that training went on from when it was saved; None for none known.
        nonces: Of the attempts that were made in the run's directory.
    """

    parents: Mapping[str, str | None] = field(default_factory=dict)
    nonces: Collection[str] = ()

    def owns(self, id_: str) -> bool:
        """Return whether the run saved this resume point, resumed from it or was forked from it."""
        return id_ in self.parents

    def is_past_of(self, older: str, newer: str) -> bool:
        """Return whether the training that saved ``newer`` had gone through ``older``.

        False too where the journal doesn't reach back so far.
        """
        return older in self._past(newer)

    def _past(self, id_: str) -> Iterator[str]:
        seen: set[str] = set()
        current: str | None = id_
        while current is not None and current not in seen:
            seen.add(current)
            yield current
            current = self.parents.get(current)


def trace_lineage(journal: Iterable[Mapping[str, Any]]) -> Lineage:
    """Return the lineage of all resume points that a journal names.

    Args:
        journal: The events in their order.
    """
    parents: dict[str, str | None] = {}
    nonces: set[str] = set()
    current: str | None = None
    for event in journal:
        kind, id_ = event.get("event"), event.get("id")
        if kind == "saved" and isinstance(id_, str):
            parents[id_], current = current, id_
        elif kind in ("resumed", FORKED) and isinstance(id_, str):
            parents.setdefault(id_, None)
            current = id_
        elif kind == "fresh_start":
            current = None
        elif kind == "attempt_started" and isinstance(event.get("nonce"), str):
            nonces.add(event["nonce"])
    return Lineage(parents, frozenset(nonces))
