"""Whether an attempt may begin as the settings want it to: what the run already has. Layer 6."""

from __future__ import annotations

import os

from dist_ckpt import announce
from dist_ckpt.comm import Comm
from dist_ckpt.errors import NotFoundError, NoUsableGenerationError, UsageError
from dist_ckpt.generations import VANISHED_EVENTS, tell_vanished
from dist_ckpt.resume import advise_import
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._settings import IMPORT_VARIABLE, Settings

__all__ = ["check_resume", "is_restart", "rewind_target"]

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def rewind_target(settings: Settings, *, again: bool) -> int | None:
    """Return the step to go back to; None where the run goes on from its newest."""
    if not isinstance(settings.resume, int):
        return None
    # A restart of the same launch or job has gone back already; again, it would lose its work.
    return None if again else settings.resume


def is_restart(attempt: Attempt) -> bool:
    """Return whether the same launch, or the same job of a scheduler, has begun before."""
    if any(os.environ.get(name, "0") not in {"", "0"} for name in _RESTART_COUNTS):
        return True
    # A node that joins makes torchrun start all again without counting it.
    launch = announce.launch_id()
    if launch is None or attempt.lock is None:
        return False
    events = attempt.events("attempt_started")
    begun = [event for event in events if event["event"] == "attempt_started"]
    return any(event.get("launch_id") == launch for event in begun[:-1])  # the last is this one


def check_resume(
    attempt: Attempt, comm: Comm, settings: Settings, rewind_to: int | None, *, again: bool
) -> None:
    """Return if the settings fit what the run has, on rank 0; elsewhere at once.

    Raises:
        UsageError: It has generations, and ``resume`` or an import wants none.
        NoUsableGenerationError: It had some.
        NotFoundError: There is none of that step to go back to.
    """
    if comm.rank != 0:
        return
    steps = attempt.store.steps()
    if settings.resume == "never" and steps and not again:
        raise UsageError(
            f"resume='never', but {attempt.store.run_dir} has generations up to step {steps[-1]}.",
            next_step="Use another run directory, or resume='auto'.",
            path=str(attempt.store.run_dir),
        )
    if steps and settings.import_path is not None and not again:
        raise UsageError(
            f"{settings.import_path} is to be imported, but {attempt.store.run_dir} has "
            f"generations up to step {steps[-1]}.",
            next_step="Import into a new run directory; or resume this one, without "
            f"{IMPORT_VARIABLE}.",
            path=str(attempt.store.run_dir),
        )
    if not steps and "fresh_start" not in settings.accepted:
        _refuse_to_begin_anew(attempt)
    if rewind_to is not None and rewind_to not in steps:
        raise NotFoundError(
            f"There is no generation of step {rewind_to} to go back to.",
            next_step=f"There are: {', '.join(map(str, steps)) or 'none'}.",
            step=rewind_to,
        )


def _refuse_to_begin_anew(attempt: Attempt) -> None:
    """Return if the run never had a generation: nothing is reset in silence (K11)."""
    store = attempt.store
    vanished = tell_vanished(store, attempt.events(*VANISHED_EVENTS))
    if vanished is None:
        return
    advice = advise_import(store)
    raise NoUsableGenerationError(
        vanished,
        next_step="Is the disk mounted? Move a good one back into checkpoints/, start in another "
        "directory, or begin at step 0 on purpose with accept=('fresh_start',)."
        + (f" {advice}" if advice else ""),
        path=str(store.run_dir),
        skipped={},
    )
