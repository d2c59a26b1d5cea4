"""Going back to an earlier step; nothing is deleted. Layer 5, I/O; the run's lock is held.

The journal's ``rewind_started`` comes first, ``rewound`` last. Whoever finds the one without the
other ends the rewind before anything else, so that a crash leaves no run between two branches.
That the other can't be read any more is no such case: what came after it tells that there it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.errors import CorruptFileError, NotFoundError, StorageError
from dist_ckpt.generations import GenerationStore, StoredGenerations
from dist_ckpt.history import HISTORY_CUT, UNREADABLE, History, bookmark_history, read_journal
from dist_ckpt.lifecycle._settle import settle

__all__ = [
    "REWOUND",
    "Rewound",
    "finish_rewind",
    "is_rewinding",
    "plan_rewind",
    "rewind",
    "started_rewind",
]

REWIND_STARTED: Final = "rewind_started"
REWOUND: Final = "rewound"
#: Nobody writes these before a rewind that was cut off is ended: a start does that after
#: ``attempt_started`` and ahead of all else, a command before whatever it does.
_LATER: Final = frozenset({"fresh_start", "resumed", "loop_started", "saved", "undeleted"})


@dataclass(frozen=True, slots=True)
class Rewound:
    """What going back sets aside.

    Attributes:
        step: Where the run is now.
        set_aside: Steps of the later generations.
        bins: Steps of later ``step_N.bin`` files without a generation.
        home: Their directory in ``archive/``; None where nothing was moved.
    """

    step: int
    set_aside: tuple[int, ...]
    bins: tuple[int, ...] = ()
    home: str | None = None


def plan_rewind(store: StoredGenerations, step: int) -> Rewound:
    """Return what `rewind` would set aside; reads names only."""
    later = tuple(other for other in store.steps() if other > step)
    names = storage.list_names(store.run_dir) if storage.is_dir(store.run_dir) else []
    found = (parse_step_name(name) for name in names if name.endswith(".bin"))
    bins = sorted({other for other in found if other is not None and other > step} - {*later})
    return Rewound(step, later, tuple(bins))


def rewind(store: GenerationStore, history: History, step: int) -> Rewound:
    """Make the run, its history too, end at ``step``. Later points lie in ``archive/`` then.

    All bytes of the history stay; what doesn't count any more is marked.

    Args:
        store: The run's generations.
        history: Its history, open.
        step: A generation of it, which is known to be whole.

    Raises:
        ForeignFileError: ``archive`` is a symbolic link; nothing was changed.
        StorageError: The file system refused. Call `finish_rewind` before anything else.
    """
    storage.require_no_link(store.archive)
    home = store.new_home(f"rewind_to_{step:06d}")
    plan = plan_rewind(store, step)
    if plan.set_aside or plan.bins:
        store.make_home(home)  # refused while nothing has begun, where it is refused
    mark: Mapping[str, Any] = bookmark_history(history)
    try:
        history.journal.append(REWIND_STARTED, step=step, home=home, **mark)
        return _carry_out(store, history, step, home)
    except StorageError as error:
        if not is_rewinding(store.run_dir):
            raise
        more = "The next start ends it first, and so does the same command."
        raise type(error)(
            f"Going back to step {step} has begun and can't be ended now: {error.message}",
            next_step=f"{error.next_step} {more}".strip(),
            **error.values,
        ) from error


def finish_rewind(store: GenerationStore, history: History) -> Rewound | None:
    """End a rewind that was cut off; None where none was. Later points would be resumed from.

    Raises:
        CorruptFileError: An unreadable line leaves open whether one was; nothing was moved.
        ForeignFileError: ``archive``, or its home there, is a symbolic link.
        StorageError: The file system refused.
    """
    path = history.journal.file.path
    events = _unfinished(path)
    if events is None:
        return None
    step = int(events[0]["step"])
    home = str(events[0].get("home") or f"rewind_to_{step:06d}")
    for place in (store.archive, store.archive / home):
        storage.require_no_link(place)
    # What was killed may have moved generations, but not durably: a history that is cut durably
    # before them would be that of another run after a power cut.
    settle(store.run_dir)
    if any(event["event"] == HISTORY_CUT and event["step"] == step for event in events):
        # All but the last line is done: what lies there now came after it.
        return _record(store, history, step, home)
    _require_known(store, step, events, path)
    return _carry_out(store, history, step, home)


def is_rewinding(run_dir: Path) -> bool:
    """Return whether a rewind of the run was cut off, or may have been."""
    return _unfinished(run_dir) is not None


def _unfinished(journal: str | Path) -> Sequence[Mapping[str, Any]] | None:
    """Return the journal from the start of a rewind on that nothing behind it proves to be over."""
    try:
        marks = read_journal(journal, naming=(REWIND_STARTED, REWOUND))
    except NotFoundError:
        return None
    words = [event["event"] for event in marks if event["event"] in {REWIND_STARTED, REWOUND}]
    if words[-1:] != [REWIND_STARTED]:
        return None
    events = read_journal(journal)  # rarely: all of it takes a long run seconds
    words = [event["event"] for event in events]
    start = len(words) - 1 - words[::-1].index(REWIND_STARTED)
    return None if _LATER & {*words[start:]} else events[start:]


def _require_known(
    store: GenerationStore, step: int, events: Sequence[Mapping[str, Any]], path: str
) -> None:
    """Return if nothing would move, or if no line is damaged that may have said that all has."""
    plan = plan_rewind(store, step)
    damaged = next((event["line"] for event in events if event["event"] == UNREADABLE), None)
    if damaged is None or not (plan.set_aside or plan.bins):
        return
    names = ", ".join(map(str, sorted({*plan.set_aside, *plan.bins})))
    raise CorruptFileError(
        f"Line {damaged} of {path} can't be read, so that nothing tells whether the rewind to step "
        f"{step} before it had ended. If not, later steps ({names}) have to go to archive/. "
        "Nothing was moved.",
        next_step=f'Write {{"event": "{REWOUND}"}} in place of that line where they are to stay; '
        "remove it where they are to go. Then do the same again.",
        path=path,
        line=damaged,
        step=step,
    )


def started_rewind(journal: Sequence[Mapping[str, Any]], home: str) -> Mapping[str, Any] | None:
    """Return the event of the rewind that has filled ``archive/HOME``, None where none has."""
    marks = (event for event in reversed(journal) if event["event"] == REWIND_STARTED)
    return next((mark for mark in marks if mark.get("home") == home and "num_losses" in mark), None)


def _carry_out(store: GenerationStore, history: History, step: int, home: str) -> Rewound:
    plan = plan_rewind(store, step)
    _archive_samples(store, history, step, home)
    for other in plan.set_aside:
        store.set_aside(other, home)
    for other in plan.bins:
        store.set_bin_aside(other, home)
    history.cut(step)
    return _record(store, history, step, home, plan.bins)


def _record(
    store: GenerationStore, history: History, step: int, home: str, bins: tuple[int, ...] = ()
) -> Rewound:
    # Not the plan's: a rewind that was cut off has moved some before.
    moved = tuple(other for where, other in store.archived() if where == home)
    history.journal.append(REWOUND, step=step, set_aside=list(moved), home=home)
    there = storage.exists(store.archive / home)
    return Rewound(step, moved, bins, home if there else None)


def _archive_samples(store: GenerationStore, history: History, step: int, home: str) -> None:
    """Have the samples that won't count any more beside the generations that they are of."""
    later = [sample for sample in history.samples.items() if sample["step"] > step]
    if not later:
        return
    path = store.make_home(home) / Path(history.samples.path).name
    data = ",\n".join(json.dumps(sample, allow_nan=False) for sample in later)
    storage.replace_durable(path, f"[\n{data}]".encode(), mode=0o400)
