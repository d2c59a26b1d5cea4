"""What the journal says about the other files of the history. Pure: layer 4.

Two things can't stand in the loss file itself: that everything before a place in it is void (a
rewind to before its first entry), and of what kind a loss was that isn't finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dist_ckpt.history._journal import parse_journal

__all__ = [
    "HISTORY_CUT",
    "LOSSES_MISSING",
    "LOSS_NOT_FINITE",
    "nonfinite_kinds",
    "void_counts",
    "void_losses",
]

HISTORY_CUT: Final = "history_cut"
LOSS_NOT_FINITE: Final = "loss_not_finite"
LOSSES_MISSING: Final = "losses_missing"
_KINDS: Final = ("nan", "inf", "-inf")


def void_counts(journal: bytes) -> tuple[int, int]:
    """Return how many entries at the beginning of the loss file, and samples, don't count.

    The last word of the journal holds. Costs a search where the journal says nothing.
    """
    return _last_counts(_events(journal, HISTORY_CUT))


def void_losses(journal: Iterable[Mapping[str, Any]]) -> int:
    """Return how many entries at the beginning of the loss file don't count, by the events."""
    losses, _ = _last_counts(event for event in journal if event.get("event") == HISTORY_CUT)
    return losses


def nonfinite_kinds(journal: bytes, before: Mapping[str, Any] | None = None) -> dict[int, str]:
    """Return step → ``"nan"``, ``"inf"`` or ``"-inf"`` as last journalled.

    Args:
        journal: The file's bytes.
        before: An event of it; what is said behind it doesn't count.
    """
    kinds: dict[int, str] = {}
    until = () if before is None or "event" not in before else (str(before["event"]),)
    for event in _events(journal, LOSS_NOT_FINITE, *until):
        if event == before:
            break
        named = event["event"] == LOSS_NOT_FINITE and event.get("kind") in _KINDS
        if named and type(event.get("step")) is int:
            kinds[event["step"]] = event["kind"]
    return kinds


def _events(journal: bytes, name: str, *others: str) -> Iterable[dict[str, Any]]:
    if name.encode() not in journal:
        return []
    names = (name, *others)
    return [event for event in parse_journal(journal, naming=names) if event.get("event") in names]


def _last_counts(cuts: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    losses = samples = 0
    for event in cuts:
        losses = _count(event.get("void_losses"), losses)
        samples = _count(event.get("void_samples"), samples)
    return losses, samples


def _count(value: Any, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise
