"""Whether a run had generations that are gone: the journal remembers them. Layer 6, reads only.

A training that starts there refuses to begin anew; who only looks must hear the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.generations import StoredGenerations

__all__ = ["VANISHED_ADVICE", "tell_vanished"]

VANISHED_ADVICE: Final = "Is the disk mounted? Move a good generation back into checkpoints/."


def tell_vanished(store: StoredGenerations, journal: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence about generations that the journal tells of where none is there now.

    None where there is one, or where nothing was saved since the run began anew on purpose.
    """
    if store.steps():
        return None
    last: int | None = None
    for event in journal:
        word, step = event.get("event"), event.get("step")
        if word == "fresh_start":
            last = None
        elif word == "saved" and type(step) is int:
            last = step
    if last is None or store.steps():  # the first may have been saved while the journal was read
        return None
    had = f"the journal tells of step {last}"
    return f"{store.run_dir} has no generation, though {had}{_aside(store)}."


def _aside(store: StoredGenerations) -> str:
    names = storage.list_names(store.archive) if storage.exists(store.archive) else []
    aside = sorted(name for name in names if name.startswith("faulty_"))
    return f"; set aside in archive/: {', '.join(aside)}" if aside else ""
