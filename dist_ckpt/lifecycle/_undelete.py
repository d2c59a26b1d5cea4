"""Bringing a generation back from ``archive/``. Layer 5, I/O; the run's lock is held."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name, step_name
from dist_ckpt.errors import DistCkptError, NotFoundError, UsageError
from dist_ckpt.generations import GenerationStore, SingleGeneration, StoredGenerations
from dist_ckpt.history import (
    LINEAGE_EVENTS,
    History,
    Lineage,
    read_journal,
    read_past,
    rejoin_history,
    trace_lineage,
)
from dist_ckpt.lifecycle._rewind import REWOUND, started_rewind
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.wording import dist_ckpt_command

__all__ = ["Archived", "find_archived", "find_brought_back", "list_archived", "undelete"]

UNDELETED: Final = "undeleted"
_STEP: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Archived:
    """A generation that was set aside.

    Attributes:
        home: Its directory in ``archive/``, which tells why: ``rewind_to_N``, ``faulty_N``, ….
        step: Finished updates.
    """

    home: str
    step: int

    def __str__(self) -> str:
        return f"{self.home}/{step_name(self.step)}"

    def store(self, archive: Path) -> SingleGeneration:
        """Return it, to be read."""
        return SingleGeneration(archive / self.home / step_name(self.step))


def list_archived(store: GenerationStore) -> list[Archived]:
    """Return the generations in ``archive/``, ascending by step."""
    return [Archived(home, step) for home, step in store.archived()]


def find_archived(store: GenerationStore, what: str) -> list[Archived]:
    """Return the generations that ``what`` names: a step, a home, ``HOME/step_N``, or a path.

    Raises:
        NotFoundError: None; the message lists those that there are.
        UsageError: A step that several homes have.
    """
    there = list_archived(store)
    found = _named(store, what, there)
    if len({one.step for one in found}) < len(found):
        raise UsageError(
            f"Step {found[0].step} lies in archive/ {len(found)} times.",
            next_step=f"Name one: {', '.join(map(str, found))}.",
            found=what,
        )
    if not found:
        raise NotFoundError(
            f"{store.archive} holds no generation {what!r}.",
            next_step=f"It holds: {', '.join(map(str, there))}."
            if there
            else "It holds none: nothing was set aside, or all is back.",
            path=str(store.archive),
            found=what,
        )
    return found


def find_brought_back(store: GenerationStore, history: History | None, what: str) -> list[Archived]:
    """Return what an earlier `undelete` of ``what`` has brought back; empty: nothing.

    Only where no attempt was made since. That call may have been killed at its end: what it didn't
    come to say, the journal says now; with ``history`` None nothing is said.
    """
    ids: dict[int, str] = {}  # of the newest generation of a step, as the journal goes on
    aside: dict[Archived, str | None] = {}  # what was set aside → its id
    told: set[Archived] = set()
    for event in read_journal(store.run_dir):
        word, step = event["event"], event["step"]
        if word == "attempt_started":
            aside = {one: id_ for one, id_ in aside.items() if one not in told}
        elif word in LINEAGE_EVENTS and step is not None and event.get("id"):
            ids[step] = event["id"]
        elif word == REWOUND:
            steps = event.get("set_aside")
            steps = [other for other in steps if type(other) is int] if type(steps) is list else []
            moved = [Archived(str(event.get("home")), other) for other in steps]
            aside |= {one: ids.get(one.step) for one in moved}
            told -= {*moved}
        elif word == UNDELETED:
            one = Archived(str(event.get("home")), step)
            aside[one] = event.get("id")
            told.add(one)
    present = _ids(store)
    named = [one for one in _named(store, what, aside) if one.step in present]
    found = [one for one in named if aside[one] is not None and aside[one] == present[one.step]]
    for one in found:
        if one not in told and history is not None:
            history.journal.append(UNDELETED, step=one.step, id=aside[one], home=one.home)
    return sorted(found, key=lambda one: one.step)


def _named(store: GenerationStore, what: str, among: Iterable[Archived]) -> list[Archived]:
    text = _below_archive(store, what)
    home, _, name = text.rpartition("/")
    step = int(name) if _STEP.fullmatch(name) else parse_step_name(name)
    if step is None:
        return [one for one in among if one.home == text]
    return [one for one in among if one.step == step and home in ("", one.home)]


def _below_archive(store: GenerationStore, what: str) -> str:
    text = what.rstrip("/")
    for prefix in (f"{store.archive}/", f"{store.archive.absolute()}/", "archive/"):
        text = text.removeprefix(prefix)
    return text


def undelete(
    store: GenerationStore,
    history: History | None,
    chosen: Sequence[Archived],
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Have archived generations back where they were, with the history that led to them.

    Nothing is replaced: a generation of the same step, and points of another branch, stand in the
    way. What comes back was read whole, every byte of it.

    Args:
        store: The run's generations.
        history: Its history, open; None looks whether it can be done, and changes nothing.
        chosen: What `find_archived` returned.
        progress: Called with the bytes read since the last call.

    Raises:
        UsageError: Something stands in its place.
        CorruptFileError, NotFoundError: It isn't whole; nothing was moved.
        ForeignFileError: ``archive``, or what is in it, is a symbolic link; nothing was moved.
    """
    for place in {store.archive, *(store.archive / one.home for one in chosen)}:
        storage.require_no_link(place)
    journal = _events(store)
    points = {one: _read_whole(store, one, progress) for one in chosen}
    _check_places(store, journal, points)
    if history is None:
        return
    for one in chosen:
        # The history first: were the generation there before it, a crash in between would leave a
        # run whose losses end before its newest point.
        if not any(other > one.step for other in store.steps()):
            _rejoin(store, history, journal, one)
        store.bring_back(one.home, one.step)
        history.journal.append(UNDELETED, step=one.step, id=points[one].id, home=one.home)


def _rejoin(
    store: GenerationStore, history: History, journal: list[dict[str, Any]], one: Archived
) -> None:
    mark = started_rewind(journal, one.home)
    if mark is not None:
        rejoin_history(history, read_past(store.run_dir, one.step, mark))


def _read_whole(
    store: GenerationStore, one: Archived, progress: Callable[[int], None] | None
) -> ResumePoint:
    single = one.store(store.archive)
    point = single.manifest(one.step)
    single.check_files(point)
    single.verify(point, progress=progress)
    return point


def _check_places(
    store: GenerationStore,
    journal: list[dict[str, Any]],
    points: Mapping[Archived, ResumePoint],
) -> None:
    present = _ids(store)
    lineage = _with_manifests(trace_lineage(journal), points.values())
    for one, point in points.items():
        if one.step in present:
            raise UsageError(
                f"A generation of step {one.step} stands in the place of {one}.",
                next_step=_way_out(store, one),
                step=one.step,
            )
        between = _other_branch(lineage, present, one.step, point.id)
        if between is not None:
            raise UsageError(
                f"Step {between} stands in the place of {one}: it is of another branch, and a run "
                "has one past.",
                next_step=_way_out(store, one),
                step=one.step,
            )
        present[one.step] = point.id


def _way_out(store: GenerationStore, one: Archived) -> str:
    command = dist_ckpt_command("fork", store.archive / str(one), "NEW")
    return (
        f"Fork it: `{command}`; or go back first, `dist-ckpt rewind`, to before what is in its way."
    )


def _other_branch(
    lineage: Lineage, present: Mapping[int, str | None], step: int, id_: str
) -> int | None:
    """Return the step of a neighbour that isn't of the same past, None where both are."""
    later = min((other for other in present if other > step), default=None)
    if later is not None:
        newer = present[later]
        return None if newer and lineage.is_past_of(id_, newer) else later
    before = max((other for other in present if other < step), default=None)
    older = None if before is None else present[before]
    return before if older and not lineage.is_past_of(older, id_) else None


def _with_manifests(lineage: Lineage, points: Sequence[ResumePoint] | Any) -> Lineage:
    """Return the lineage with what manifests say where the journal has nothing."""
    parents = dict(lineage.parents)
    for point in points:
        if parents.get(point.id) is None and point.parent is not None:
            parents[point.id] = str(point.parent["id"])
    return Lineage(parents, lineage.nonces)


def _ids(store: StoredGenerations) -> dict[int, str | None]:
    ids: dict[int, str | None] = {}
    for step in store.steps():
        try:
            ids[step] = store.manifest(step).id
        except DistCkptError:
            ids[step] = None
    return ids


def _events(store: GenerationStore) -> list[dict[str, Any]]:
    try:
        return read_journal(store.run_dir)
    except NotFoundError:
        return []
