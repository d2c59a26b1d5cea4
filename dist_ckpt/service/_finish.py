"""After the commit: read back, export, retire. Layer 6, on the background thread of every rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from dist_ckpt import lifecycle
from dist_ckpt.errors import DistCkptError, StorageError
from dist_ckpt.export import export_bin
from dist_ckpt.generations import is_bad_bytes, plan_bins
from dist_ckpt.history import read_journal
from dist_ckpt.resume_point import shard_name, state_name
from dist_ckpt.service._job import Saves

__all__ = ["Finished", "catch_up", "export_verified", "finish_generation", "retire", "tidy"]


#: What became of a generation that was to be read back.
Finished = Literal["verified", "faulty", "left"]


class _GaveWayError(Exception):
    """A stop is short of time."""


def finish_generation(saves: Saves, step: int, id_: str) -> Finished:
    """Read a committed generation back, export it, retire old ones; return what became of it.

    Every rank reads the files of the next rank (its own when alone) past the page cache. A
    generation whose bytes aren't right is set aside, and the run goes on with the one before. One
    that couldn't be read for another reason or for lack of time, or whose mark can't be written, is
    left as it is: committed, and read back by the next start.
    """
    comm = saves.comm
    saves.where.text = f"rank {comm.rank} was in verifying step {step}"
    verdict: list[Any] = ["verified", ""]
    try:
        _read_back(saves, step)
    except _GaveWayError:
        verdict = ["left", "a stop left no time for it"]
    except Exception as error:  # noqa: BLE001 - told to every rank
        verdict = ["faulty" if is_bad_bytes(error) else "left", str(error) or repr(error)]

    def conclude(reports: list[bytes]) -> bytes:
        return json.dumps(_conclude(saves, step, [json.loads(data) for data in reports])).encode()

    report = json.dumps(verdict).encode()
    finished: Finished = json.loads(
        comm.exchange(f"verifying step {step} ({id_[:16]})", report, conclude)
    )
    if finished == "verified" and comm.rank == 0:
        tidy(saves, step)
    return finished


def _read_back(saves: Saves, step: int) -> None:
    def progress(_num_bytes: int) -> None:
        if saves.hurry.is_set():
            raise _GaveWayError

    progress(0)
    comm, store = saves.comm, saves.store
    point = store.manifest(step, from_device=True)
    # Of a generation of more ranks than there are now, each reads several ranks' files.
    others = range((comm.rank + 1) % comm.world_size, point.world_size, comm.world_size)
    names = [name(other) for other in others for name in (shard_name, state_name)]
    store.verify(point, names=names, progress=progress)
    if comm.rank == 0:
        store.index(point, from_device=True)


def _conclude(saves: Saves, step: int, verdicts: list[list[str]]) -> Finished:
    """Rank 0: mark the generation, set it aside, or leave it."""
    store = saves.store
    told = {str(rank): text for rank, (_, text) in enumerate(verdicts) if text}
    why = "; ".join(f"rank {rank}: {text}" for rank, text in told.items())
    kinds = {kind for kind, _ in verdicts}
    if "faulty" in kinds:
        where = store.set_aside(step, f"faulty_{step:06d}")
        saves.journal("faulty", step=step, errors=told, moved_to=where.parent.name)
        saves.warn(f"step {step} didn't read back whole and was set aside: {why}")
        return "faulty"
    if "left" not in kinds:
        try:
            store.mark_verified(step, "read back")
        except StorageError as error:  # of a generation that is there and whole
            why = f"it did read back whole, which can't be noted: {error}"
            told = {"0": why}
        else:
            saves.journal("verified", step=step)
            return "verified"
    saves.journal("verify_left", step=step, reasons=told)
    saves.warn(f"step {step} is committed; the next start reads it back: {why}")
    return "left"


def tidy(saves: Saves, step: int) -> None:
    """Rank 0: export, and retire what retention lets go. Faults are said, not raised."""
    if saves.hurry.is_set():
        return  # the next start makes up for it
    if saves.settings.export != "never":
        _export(saves, step)
    retire(saves)


def retire(saves: Saves) -> None:
    """Rank 0: remove what retention lets go. Faults are said, not raised."""
    try:
        _retire(saves)
    except (DistCkptError, OSError) as error:
        saves.journal("retire_failed", error=str(error))
        saves.warn(f"old generations could not be retired: {error}")


def export_verified(saves: Saves, step: int) -> None:
    """Rank 0: have the .bin of ``step`` where it should have one and was read back whole."""
    is_wanted = saves.settings.export != "never" and not saves.hurry.is_set()
    if is_wanted and saves.store.verified_at(step) is not None:
        _export(saves, step)


def catch_up(saves: Saves) -> None:
    """Rank 0, at a start: export every verified generation that lacks its .bin, then tidy."""
    store = saves.store
    saves.answered.update(_answered_late(saves))
    steps = [step for step in store.steps() if store.verified_at(step) is not None]
    gone = plan_bins(steps, retention=saves.settings.retention)
    for step in steps:
        if saves.settings.export != "never" and step not in gone and not saves.hurry.is_set():
            _export(saves, step)
    if steps:
        tidy(saves, steps[-1])


def _export(saves: Saves, step: int) -> None:
    store = saves.store
    try:
        point = store.manifest(step)
        if point.canonical.refused is not None:
            return
        if saves.settings.export == "signal" and not (
            step in saves.answered or _is_answer(point.reasons)
        ):
            return
        how = export_bin(store, point, copy=saves.settings.export_copy)
        if how != "there":
            saves.journal("exported", step=step, file=store.bin_path(step).name, how=how)
    except (DistCkptError, OSError) as error:
        saves.journal("export_failed", step=step, error=str(error))
        saves.warn(f"step {step} has no .bin yet, it is tried again at the next start: {error}")


def _is_answer(reasons: Iterable[str]) -> bool:
    return any(reason.startswith("SIG") for reason in reasons)


def _answered_late(saves: Saves) -> Iterator[int]:
    """Yield the steps that earlier attempts answered a signal with after they were saved."""
    if saves.settings.export != "signal":
        return
    for event in read_journal(saves.store.run_dir, naming=("already_saved",)):
        if event["event"] == "already_saved" and _is_answer(event.get("reasons") or ()):
            yield event["step"]


def _retire(saves: Saves) -> None:
    retention = saves.settings.retention
    if retention.keep_last is None and retention.keep_bins is None:
        return  # all are kept: nothing needs to be looked at
    lifecycle.retire(saves.store, lifecycle.judge(saves.store, retention, saves.own), saves.journal)
