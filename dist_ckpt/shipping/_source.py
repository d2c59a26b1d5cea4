"""The run that is shipped from: its generation kept meanwhile, the shipment journalled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dist_ckpt import lifecycle
from dist_ckpt.errors import DistCkptError, LockedError, StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.lifecycle import Origin

__all__ = ["SHIPPED", "SourcePin", "is_shipments_pin", "journal_shipment"]

#: Event of the run's journal.
SHIPPED: Final = "shipped"
_REASON: Final = "being shipped to "
_NEXT: Final = f"; {_REASON}"


class SourcePin:
    """A pin that has retention keep the generation until the copy is confirmed.

    A generation has one pin, so its reason names each destination: the shipment that ends takes its
    own name out, and with the last one the pin goes. One that somebody else has pinned, one in
    archive/ and one outside of a run need none; where none can be written (a run that may only be
    read), there is none.

    Args:
        origin: Where the generation lies.
        label: Of the destination, for whoever wonders.
    """

    def __init__(self, origin: Origin, label: str) -> None:
        self._step = origin.step
        self._label = label.replace(_NEXT, _NEXT.replace(" ", "_"))
        is_in_run = origin.run_dir is not None and origin.home is None
        self._store = GenerationStore(origin.run_dir) if is_in_run and origin.run_dir else None

    def take(self) -> None:
        """Have the generation pinned."""
        if self._store is not None:
            with suppress(StorageError, LockedError):
                self._store.repin(self._step, self._with)

    def give_back(self) -> None:
        """Have the pin gone, if it is this one: also one that a call left which was cut off."""
        if self._store is not None:
            with suppress(DistCkptError):
                self._store.repin(self._step, self._without)

    def _with(self, reason: str | None) -> str:
        labels = _labels(reason)
        if reason is not None and (not labels or self._label in labels):
            return reason
        return _spell([*labels, self._label])

    def _without(self, reason: str | None) -> str | None:
        labels = _labels(reason)
        if self._label not in labels:
            return reason
        return _spell([label for label in labels if label != self._label]) or None


def is_shipments_pin(reason: str | None) -> bool:
    """Return whether a pin of this reason goes with the shipments that it names."""
    return bool(_labels(reason))


def _labels(reason: str | None) -> list[str]:
    """Return the destinations that a pin names; none where no shipment has made it."""
    if reason is None or not reason.startswith(_REASON):
        return []
    return reason.removeprefix(_REASON).split(_NEXT)


def _spell(labels: Sequence[str]) -> str:
    return _REASON + _NEXT.join(labels) if labels else ""


def journal_shipment(origin: Origin, facts: Mapping[str, Any]) -> bool:
    """Return whether the run's journal tells of the shipment.

    Not while a job trains, since a journal has one writer; nor where the run may only be read.
    """
    if origin.run_dir is None:
        return False
    try:
        with lifecycle.hold_open(origin.run_dir, "ship") as (_, history):
            history.journal.append(SHIPPED, step=origin.step, **facts)
    except (LockedError, StorageError):
        return False
    return True
