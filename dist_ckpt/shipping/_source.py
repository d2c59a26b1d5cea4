"""The run that is shipped from: its generation kept meanwhile, the shipment journalled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from dist_ckpt import lifecycle
from dist_ckpt.errors import DistCkptError, LockedError, StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.lifecycle import Origin

__all__ = ["SHIPPED", "SourcePin", "journal_shipment"]

#: Event of the run's journal.
SHIPPED: Final = "shipped"


class SourcePin:
    """A pin that has retention keep the generation until the copy is confirmed.

    One that is pinned already, one in archive/ and one outside of a run need none; where none can
    be written (a run that may only be read), there is none.

    Args:
        origin: Where the generation lies.
        label: Of the destination, for whoever wonders.
    """

    def __init__(self, origin: Origin, label: str) -> None:
        self._step = origin.step
        self._reason = f"being shipped to {label}"
        is_in_run = origin.run_dir is not None and origin.home is None
        self._store = GenerationStore(origin.run_dir) if is_in_run and origin.run_dir else None

    def take(self) -> None:
        """Have the generation pinned."""
        if self._store is None:
            return
        with suppress(StorageError, LockedError):
            if self._step not in self._store.pins():
                self._store.pin(self._step, self._reason)

    def give_back(self) -> None:
        """Have the pin gone, if it is this one: also one that a call left which was cut off."""
        if self._store is None:
            return
        with suppress(DistCkptError):
            if self._store.pins().get(self._step) == self._reason:
                self._store.unpin(self._step)


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
