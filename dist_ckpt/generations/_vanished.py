"""Whether a run had generations that are gone: the journal remembers them. Layer 4, reads only.

A training that starts there refuses to begin anew, and who only looks hears the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.generations._stored import StoredGenerations

__all__ = ["VANISHED_ADVICE", "VANISHED_EVENTS", "tell_vanished"]

VANISHED_ADVICE: Final = "Is the disk mounted? Move a good generation back into checkpoints/."
#: What `tell_vanished` looks at.
VANISHED_EVENTS: Final = ("fresh_start", "saved", "resumed", "skipped", "faulty")


def tell_vanished(store: StoredGenerations, journal: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence about generations that were there where none is now.

    None where there is one, or where there was none since the run began, maybe anew on purpose.
    """
    if store.steps():
        return None
    last: int | None = None
    begins = False
    for event in journal:
        word, step = event.get("event"), event.get("step")
        if word in VANISHED_EVENTS:
            begins = word == "fresh_start"
            if begins:
                last = None
            elif word == "saved" and type(step) is int:
                last = step
    aside = _aside(store)
    if last is None and (begins or not aside):
        return None
    if store.steps():  # the first may have been saved while the journal was read
        return None
    had = "it had some" if last is None else f"the journal tells of step {last}"
    where = f"; set aside in archive/: {', '.join(aside)}" if aside else ""
    return f"{store.run_dir} has no generation, though {had}{where}."


def _aside(store: StoredGenerations) -> list[str]:
    names = storage.list_names(store.archive) if storage.exists(store.archive) else []
    return sorted(name for name in names if name.startswith("faulty_"))
