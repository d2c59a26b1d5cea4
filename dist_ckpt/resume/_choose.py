"""Choose the newest usable generation and restore it on all ranks. Layer 5, collective.

A generation whose bytes aren't right is skipped, on all ranks or on none; a generation that doesn't
fit the live objects is an error, since an older one wouldn't fit either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.errors import NotFoundError, NoUsableGenerationError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume._bins import advise_import
from dist_ckpt.resume._restore import Elsewhere, Restore, Resumed, Skipped, UnusableError
from dist_ckpt.resume_point import ResumePoint

__all__ = ["restore_newest"]


def restore_newest(
    store: StoredGenerations,
    comm: Comm,
    captured: Captured,
    *,
    admit: Callable[[ResumePoint], None],
    accept: Collection[str] = (),
    omit: Collection[str] = (),
    generators: Mapping[str, Any] | None = None,
    only: int | None = None,
    chosen: Callable[[ResumePoint], None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Resumed | None:
    """Restore all but random state from the newest usable generation; None where none exists.

    Args:
        store: The run's generations.
        comm: The job's ranks; every rank calls this.
        captured: The live objects.
        admit: Raises where the resume point's identity isn't admitted; rank 0 alone calls it.
        accept: Parts that may be missing on one side ("scaler", "extra.ema", …).
        omit: Parts to leave out, for proofs ("rng", "data", "optimizer", "scheduler", "scaler").
        generators: The user's generators, for ranks that the saved job didn't have.
        only: This step and no other.
        chosen: Told the admitted resume point on every rank, before anything of it is loaded.
        elsewhere: What other ranks have and this one hasn't.

    Raises:
        NoUsableGenerationError: Generations exist, but each has a fault.
        MismatchError, IdentityError: It isn't this run's model, data or configuration.
        FormatVersionError: A later version of this package wrote the newest.
        RankFailedError: Another rank failed.
    """
    steps: list[int] = json.loads(comm.broadcast(_own_steps(store, comm)))
    if only is not None:
        if only not in steps:
            raise NotFoundError(
                f"There is no generation of step {only}.",
                next_step=f"There are: {', '.join(map(str, steps)) or 'none'}.",
                step=only,
            )
        steps = [only]
    skipped: list[Skipped] = []
    for step in reversed(steps):
        attempt = Restore(
            store,
            comm,
            captured,
            step,
            accept=accept,
            omit=omit,
            elsewhere=elsewhere or Elsewhere(),
        )
        began = time.monotonic()
        try:
            resumed = attempt.run(admit, generators or {}, chosen or (lambda _point: None))
        except UnusableError as fault:
            skipped.append(Skipped(step, fault.id, str(fault)))
            continue
        secs = time.monotonic() - began
        return replace(resumed, skipped=tuple(skipped), secs=secs)
    if skipped:
        none = f"None of the {len(skipped)} generations in {store.directory} can be used"
        if len(skipped) == 1:
            none = f"The only generation in {store.directory} can't be used"
        raise NoUsableGenerationError(
            f"{none}: " + "; ".join(f"step {fault.step}: {fault.reason}" for fault in skipped),
            next_step=_way_out(store),
            path=str(store.directory),
            skipped={fault.step: fault.reason for fault in skipped},
        )
    return None


def _own_steps(store: StoredGenerations, comm: Comm) -> bytes | None:
    return json.dumps(store.steps()).encode() if comm.rank == 0 else None


def _way_out(store: StoredGenerations) -> str:
    otherwise = "Restore a copy of the run directory, or start a new run in another directory."
    return advise_import(store) or otherwise
