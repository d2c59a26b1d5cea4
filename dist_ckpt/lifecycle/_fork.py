"""Branching off: a new run that begins where another one was at some step. Layer 5, I/O.

The new run is made beside its place under another name and gets its own by one rename, so that it
is there whole or not at all. The files of a generation never change, so both runs may share them;
what grows, the history, is a copy of each.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import (
    ABSENT,
    FORKED,
    LOSS_NOT_FINITE,
    Journal,
    carry_kinds,
    encode_state,
    history_path,
    read_journal,
    read_policy,
    read_state,
    run_name,
    write_past,
    write_policy,
    write_state,
)
from dist_ckpt.lifecycle._hold import hold_or_watch
from dist_ckpt.lifecycle._new_run import check_target, taken, workshop
from dist_ckpt.lifecycle._origin import Origin, past_of, pivot_due
from dist_ckpt.lifecycle._pivot import Pivot
from dist_ckpt.provenance import SIGNATURE_NAME
from dist_ckpt.resume_point import (
    INDEX_NAME,
    RESUME_POINT_NAME,
    VERIFIED_NAME,
    ResumePoint,
    shard_name,
)

__all__ = ["Forked", "check_fork", "fork"]


@dataclass(frozen=True, slots=True)
class Forked:
    """A run that was branched off.

    Attributes:
        path: Its directory.
        step: Where it begins.
        id: Of the resume point.
        how: ``"reflink"``, ``"link"``, ``"copy"`` → how many files came so.
        num_losses: Losses that were carried over.
        pivot: Id of the parent's pivot that the branch follows: its policy starts fresh.
        was_there: An earlier call has made it, and nothing has happened in it since.
    """

    path: Path
    step: int
    id: str
    how: Mapping[str, int]
    num_losses: int
    pivot: str | None = None
    was_there: bool = False


def fork(
    origin: Origin,
    target: Path,
    *,
    policy: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Forked:
    """Have a run in ``target`` that goes on from the origin's step, durable.

    Files of the generation are shared where the file system can. A call that was cut off can be
    made again. The origin's run needn't be writable: its lock can't be held then, so all that came
    over is read back.

    Args:
        origin: Where to branch off; nothing in it is changed.
        target: The new run directory, whose last component is the run's name; must not exist.
        policy: Settings of the branch's policy: it starts fresh with them. None: what the parent
            had at that step, and its policy's state; or, where the parent has pivoted at its newest
            generation and saved nothing since, what the parent would go on with itself.
        progress: Called with the bytes read since the last call, of a generation that nobody has
            read back yet.

    Raises:
        LockedError: A job trains in the origin's run; or, where that may only be read, one came
            meanwhile.
        UsageError: The target is there already, or inside the origin's run.
        CorruptFileError, NotFoundError: The origin isn't whole.
        StorageError: The file system refused; nothing of the fork is left.
    """
    target = Path(os.path.abspath(target))
    with _holding(origin) as require_same:
        point = origin.store.manifest(origin.step)
        if storage.exists(target):
            found = _found(target, point)
            # That call may have been killed when all but its name was durable.
            storage.sync_names(target)
            return found
        check_target(origin.run_dir, target)
        origin.store.check_files(point)
        if origin.store.verified_at(origin.step) is None:
            origin.store.verify(point, progress=progress)
        with workshop(target) as beside:
            how = _share_generation(origin, point, GenerationStore(beside))
            pivot = pivot_due(origin, point) if policy is None else None
            num_losses = _write_history(
                origin,
                point,
                beside,
                name=target.name,
                facts={
                    "how": dict(how),
                    "policy": policy is not None or pivot is not None,
                    "pivot": None if pivot is None else pivot.id,
                },
            )
            if policy is not None:
                write_policy(beside, target.name, dict(policy))
            else:
                _carry_policy(origin, point, beside, target.name, pivot)
            if require_same is not None:
                # Nobody was kept out while the files came over: what counts is what they are now.
                GenerationStore(beside).verify(point, progress=progress)
                require_same()
            for directory in (beside / "checkpoints", beside):
                storage.sync_dir(directory)
            storage.rename_durable(beside, target)
    id_ = None if pivot is None else pivot.id
    return Forked(target, point.step, point.id, dict(how), num_losses, id_)


def check_fork(origin: Origin, target: Path) -> None:
    """Return if `fork` would find nothing in its way; the same errors, but for the lock's."""
    target = Path(os.path.abspath(target))
    point = origin.store.manifest(origin.step)
    if storage.exists(target):
        _found(target, point)
        return
    check_target(origin.run_dir, target)
    origin.store.check_files(point)


@contextlib.contextmanager
def _holding(origin: Origin) -> Iterator[Callable[[], None] | None]:
    if origin.run_dir is None:
        yield None
        return
    with hold_or_watch(origin.run_dir, "fork") as require_same:
        yield require_same


def _found(target: Path, point: ResumePoint) -> Forked:
    """Return the fork that an earlier call has made, untouched since.

    Raises:
        UsageError: It isn't, so nothing may be put there.
    """
    with contextlib.suppress(DistCkptError, KeyError, ValueError):
        event, *others = read_journal(target)
        untouched = all(other["event"] == LOSS_NOT_FINITE for other in others)  # see `carry_kinds`
        if untouched and event["event"] == FORKED and event["id"] == point.id:
            how, count, pivot = event["how"], event["num_losses"], event.get("pivot")
            return Forked(target, point.step, point.id, how, count, pivot, was_there=True)
    raise taken(target)


def _share_generation(origin: Origin, point: ResumePoint, store: GenerationStore) -> Counter[str]:
    """Have the generation's files, and its .bin, in the new run; return how they came."""
    source, target = origin.store.path(point.step), store.path(point.step)
    storage.make_dir(store.directory)
    storage.make_dir(target)
    names = [*point.files, INDEX_NAME, RESUME_POINT_NAME]
    if origin.store.verified_at(point.step) is not None:
        names.append(VERIFIED_NAME)
    if storage.exists(source / SIGNATURE_NAME):
        names.append(SIGNATURE_NAME)
    how: Counter[str] = Counter(storage.share_file(source / name, target / name) for name in names)
    storage.sync_dir(target)
    bin_path = _bin_of(origin)
    sum_path = bin_path.with_name(f"{bin_path.name}.sha256")
    if storage.exists(bin_path) and storage.exists(sum_path):
        new_bin = store.bin_path(point.step)
        if point.canonical.is_shard:  # the same bytes, so one file of the new run
            storage.link_or_copy(target / shard_name(0), new_bin)
        else:
            how[storage.share_file(bin_path, new_bin)] += 1
        data = storage.read_file(sum_path, limit_bytes=1 << 16)
        storage.write_durable(new_bin.with_name(sum_path.name), data, mode=0o600)
    return how


def _bin_of(origin: Origin) -> Path:
    """Return where the generation's .bin lies or would lie: beside it in archive/."""
    name = origin.store.bin_path(origin.step).name
    if origin.run_dir is not None and origin.home is None:
        return origin.run_dir / name
    return Path(os.path.abspath(origin.store.path(origin.step))).parent / name


def _write_history(
    origin: Origin, point: ResumePoint, directory: Path, *, name: str, facts: Mapping[str, Any]
) -> int:
    """Have the history up to the fork, its lineage first; return how many losses it has."""
    past = past_of(origin)
    write_past(directory, name, past)
    journal = Journal.open(history_path(directory, name, "journal"), 0)
    try:
        journal.append(
            FORKED,
            step=point.step,
            sync=False,
            id=point.id,
            run=point.run if origin.run_dir is None else run_name(origin.run_dir),
            path=str(origin.run_dir or origin.store.path(point.step)),
            digest=storage.digest_bytes(origin.store.manifest_bytes(point.step)),
            num_losses=len(past.loss),
            **facts,
        )
        carry_kinds(journal, past)
        journal.sync()
    finally:
        journal.close()
    return len(past.loss)


def _carry_policy(
    origin: Origin, point: ResumePoint, directory: Path, name: str, pivot: Pivot | None
) -> None:
    """Have the settings that the policy goes on with, and its state where a file has it.

    The state lies in the generation too; the parent's file is of its newest one.
    """
    if origin.run_dir is None:
        return
    parent = run_name(origin.run_dir)
    if pivot is None and "policy" in point.notes:  # those that the point was made under
        settings = point.notes["policy"]
    else:
        settings = read_policy(origin.run_dir, parent)
    if settings is not None:
        write_policy(directory, name, dict(settings))
    if pivot is None and origin.is_newest:
        state = read_state(origin.run_dir, parent)
        if state is not ABSENT:
            write_state(directory, name, encode_state(state))
