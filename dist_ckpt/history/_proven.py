"""Which generations a real resume has proven, as the journal tells. Pure: layer 4.

A run that crashes and resumes computes steps again whose losses are logged already. Where all of
them come out bit for bit the same, the generation it began from held everything that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dist_ckpt.history._replay import REPLAYED

__all__ = ["proven_steps"]

_GONE: Final = ("saved", "faulty", "skipped")  # what a step's generation was isn't there any more


def proven_steps(journal: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return step → how its generation was proven, for those that were.

    It takes a resume with nothing left out, and one replayed loss at least; all of the window must
    have been computed again and agree. A generation that took the place of a proven one isn't.

    Args:
        journal: The events in their order.
    """
    proven: dict[int, str] = {}
    resumed: dict[Any, int] = {}
    for event in journal:
        kind, step, attempt = event.get("event"), event.get("step"), event.get("attempt")
        if kind == "resumed" and type(step) is int:
            resumed[attempt] = step
        elif kind == "restored_with" and event.get("omit"):
            resumed.pop(attempt, None)
        elif kind in _GONE and type(step) is int:
            proven.pop(step, None)
        elif kind == "rewound":
            for later in event.get("set_aside") or ():
                proven.pop(later, None)
        elif kind == REPLAYED and _agreed(event):
            start = resumed.get(attempt)
            if start is not None and start == event.get("resumed_step"):
                agreed = event["agreed"]
                proven[start] = f"{agreed} of {agreed} replayed losses, attempt {attempt}"
    return proven


def _agreed(event: Mapping[str, Any]) -> bool:
    agreed = event.get("agreed")
    return (
        type(agreed) is int
        and agreed > 0
        and agreed == event.get("of")
        and event.get("first_difference") is None
        and bool(event.get("complete"))
        and bool(event.get("comparable"))
    )
