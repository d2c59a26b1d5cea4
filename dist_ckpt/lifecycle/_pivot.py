"""A pivot: the run goes on from where it is with another policy, or a fresh one. Layer 5.

    request.json says what begins → samples, state and the old settings to archive/pivot_N/
      → the new settings → the history ends at N → the journal has the pivot → request.json goes

Each step is durable before the next, and does nothing where it is done already: whoever finds the
request, this command run again or the next start of the training, goes on with it. Losses,
generations and their files stay where they are; that a resume point is of before the pivot, so that
its copy of the policy doesn't count, is known by the pivot's id, which every later one carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.history import (
    History,
    encode_settings,
    history_path,
    read_journal,
    read_policy,
    write_policy,
)
from dist_ckpt.lifecycle._hold import end_rewind
from dist_ckpt.lifecycle._request import (
    Begun,
    PivotRequest,
    begin_request,
    read_request,
    remove_request,
)

__all__ = [
    "Pivot",
    "carry_out_pivot",
    "finish_pivot",
    "last_pivot",
    "pivots_of",
    "saved_since",
]


@dataclass(frozen=True, slots=True)
class Pivot:
    """A pivot that is in the journal.

    Attributes:
        id: Its name; resume points made after it carry it.
        step: The run goes on from here.
        archive: Where what was set aside lies, relative to the run directory; None for a pivot by
            hand.
        archived: Names of the files there.
        policy: The settings since then, None where there are none.
        previous: The settings before.
    """

    id: str
    step: int
    archive: str | None
    archived: tuple[str, ...]
    policy: Mapping[str, Any] | None
    previous: Mapping[str, Any] | None


def finish_pivot(run_dir: Path, name: str, attempt: int) -> Pivot | None:
    """No pivot is left undone; return the one that was carried out now. Under the run's lock."""
    request = read_request(run_dir)
    return None if request is None else carry_out_pivot(run_dir, name, attempt, request)


def carry_out_pivot(run_dir: Path, name: str, attempt: int, request: PivotRequest) -> Pivot:
    """The run goes on from its newest generation with the wanted settings and a fresh policy.

    The caller holds the run's lock, so nobody trains. Killed at any instant it can be called again.

    Args:
        run_dir: The run directory.
        name: The run's name.
        attempt: Number of the attempt that it is journalled under.
        request: What is wanted, as it stands in ``request.json``.

    Raises:
        ForeignFileError: ``archive``, or the directory in it, is a symbolic link.
        StorageError: The file system refused; what is missing can be done by calling it again.
        CorruptFileError: The old settings aren't JSON.
    """
    done = next((pivot for pivot in _journalled(run_dir) if pivot.id == request.id), None)
    if done is not None:
        # Whoever wrote it may have been killed before it was durable; without the request nobody
        # would write it again.
        storage.sync_file(history_path(run_dir, name, "journal"))
        remove_request(run_dir)
        return done
    begun = request.begun
    if begun is None:
        end_rewind(run_dir)  # or the newest step would be one that the run has left
        begun = Begun(_newest_step(run_dir), _free_home(run_dir), read_policy(run_dir, name))
        begin_request(run_dir, request, begun)
    else:
        storage.sync_dir(run_dir)  # it is to be found again before anything has moved
    home = run_dir / "archive" / begun.archive
    archived = _archive(run_dir, name, home, begun.before)
    if request.policy is not None:
        write_policy(run_dir, name, dict(request.policy))
    pivot = Pivot(
        id=request.id,
        step=begun.step,
        archive=f"archive/{begun.archive}",
        archived=archived,
        policy=begun.before if request.policy is None else request.policy,
        previous=begun.before,
    )
    with History(run_dir, name, attempt) as history:
        last = history.loss.last_step
        if last is not None and last > pivot.step:
            history.cut(pivot.step)  # what a crash left behind it is no part of what follows
        history.journal.append(
            "pivot",
            step=pivot.step,
            id=pivot.id,
            by="request",
            archive=pivot.archive,
            archived=pivot.archived,
            policy=pivot.policy,
            previous=pivot.previous,
        )
    remove_request(run_dir)
    return pivot


def pivots_of(journal: Iterable[Mapping[str, Any]]) -> list[Pivot]:
    """Return the pivots that a journal tells of, in its order."""
    return [
        Pivot(
            id=str(event.get("id")),
            step=int(event.get("step") or 0),
            archive=event.get("archive"),
            archived=tuple(event.get("archived") or ()),
            policy=event.get("policy"),
            previous=event.get("previous"),
        )
        for event in journal
        if event.get("event") == "pivot"
    ]


def last_pivot(journal: Iterable[Mapping[str, Any]]) -> Pivot | None:
    """Return the newest pivot that a journal tells of."""
    pivots = pivots_of(journal)
    return pivots[-1] if pivots else None


def saved_since(journal: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the saves that came after the newest pivot that a journal tells of.

    The policy of each had followed it. One that notes another pivot was saved after a still newer
    one, whose line is damaged: pivots are never undone.
    """
    words = [event.get("event") for event in journal]
    start = len(words) - words[::-1].index("pivot") if "pivot" in words else 0
    return [event for event in journal[start:] if event.get("event") == "saved"]


def _journalled(run_dir: Path) -> Sequence[Pivot]:
    try:
        return pivots_of(read_journal(run_dir, naming=("pivot",)))
    except NotFoundError:
        return ()


def _newest_step(run_dir: Path) -> int:
    steps = StoredGenerations(run_dir).steps()
    return steps[-1] if steps else 0


def _free_home(run_dir: Path) -> str:
    label = f"pivot_{_newest_step(run_dir):06d}"
    home, number = label, 1
    while storage.exists(run_dir / "archive" / home):
        number += 1
        home = f"{label}-{number}"
    return home


def _archive(
    run_dir: Path, name: str, home: Path, before: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """Have samples, state and the old settings in ``home``; return the names there."""
    for directory in (home.parent, home):
        storage.make_dir(directory, exist_ok=True, follow=False)
        storage.sync_dir(directory.parent)
    for what in ("samples", "state"):
        source = Path(history_path(run_dir, name, what))
        if storage.exists(source) and not storage.exists(home / source.name):
            storage.rename_durable(source, home / source.name)
    for directory in (home, run_dir):  # also what a call moved that was killed before it synced
        storage.sync_dir(directory)
    if before is not None:
        # A copy: until the new ones stand there, the run isn't without settings.
        base = Path(history_path(run_dir, name, "policy")).name
        storage.replace_durable(home / base, encode_settings(dict(before)))
    return tuple(item for item in storage.list_names(home) if not item.startswith("."))
