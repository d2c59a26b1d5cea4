"""After the commit: read back, export, retire. Layer 6, on the background thread of every rank."""

from __future__ import annotations

import json

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError
from dist_ckpt.export import export_bin
from dist_ckpt.generations import plan_bins, plan_retention
from dist_ckpt.resume_point import shard_name, state_name
from dist_ckpt.service._job import Saves

__all__ = ["finish_generation", "tidy"]


def finish_generation(saves: Saves, step: int, id_: str) -> bool:
    """Read a committed generation back, export it, retire old ones; return whether it is verified.

    Every rank reads the files of the next rank (its own when alone) past the page cache. A
    generation that doesn't read back whole is set aside and the run goes on with the one before.
    """
    comm, store = saves.comm, saves.store
    error = None
    try:
        point = store.manifest(step)
        # Of a generation of more ranks than there are now, each reads several ranks' files.
        others = range((comm.rank + 1) % comm.world_size, point.world_size, comm.world_size)
        names = [name(other) for other in others for name in (shard_name, state_name)]
        store.verify(point, names=names)
        if comm.rank == 0:
            store.index(point)
    except (DistCkptError, OSError) as caught:
        error = str(caught)

    def conclude(reports: list[bytes]) -> bytes:
        errors = {
            str(rank): text
            for rank, text in enumerate(json.loads(report) for report in reports)
            if text is not None
        }
        if errors:
            where = store.set_aside(step, f"faulty_{step:06d}")
            saves.journal("faulty", step=step, errors=errors, moved_to=str(where.parent.name))
            saves.warn(f"step {step} didn't read back whole and was set aside: {errors}")
        else:
            store.mark_verified(step, "read back")
            saves.journal("verified", step=step)
        return json.dumps(not errors).encode()

    report = json.dumps(error).encode()
    verified: bool = json.loads(comm.exchange(f"verify {id_}", report, conclude))
    if verified and comm.rank == 0:
        tidy(saves, step)
    return verified


def tidy(saves: Saves, step: int) -> None:
    """Rank 0: export, and retire what retention lets go. Faults are said, not raised."""
    if saves.export != "never":
        _export(saves, step)
    try:
        _retire(saves)
    except (DistCkptError, OSError) as error:
        saves.journal("retire_failed", step=step, error=str(error))
        saves.warn(f"old generations could not be retired: {error}")


def _export(saves: Saves, step: int) -> None:
    store = saves.store
    try:
        point = store.manifest(step)
        if point.canonical.refused is not None:
            return
        if saves.export == "signal" and not any(r.startswith("SIG") for r in point.reasons):
            return
        how = export_bin(store, point, copy=saves.export_copy)
        if how != "there":
            saves.journal("exported", step=step, file=store.bin_path(step).name, how=how)
    except (DistCkptError, OSError) as error:
        saves.journal("export_failed", step=step, error=str(error))
        saves.warn(f"step {step} has no .bin yet, it is tried again at the next start: {error}")


def _retire(saves: Saves) -> None:
    store = saves.store
    verified = [step for step in store.steps() if store.verified_at(step) is not None]
    kept = plan_retention(verified, pinned=store.pins(), retention=saves.retention)
    for step in verified:
        if step not in kept:
            store.retire(step)
            saves.journal("retired", step=step)
    for step in plan_bins(kept, retention=saves.retention):
        if storage.exists(store.bin_path(step)):
            store.drop_bin(step)
            saves.journal("bin_retired", step=step)
