"""Whether a run can be pivoted now, and what would be done. Layer 6, reads only; no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt import announce, storage
from dist_ckpt.errors import CorruptFileError, NotFoundError, NotRunningError, UsageError
from dist_ckpt.history import encode_settings, history_path, parse_settings
from dist_ckpt.runs._liveness import Liveness, State, look_alive
from dist_ckpt.runs._run import Run

__all__ = [
    "PivotPlan",
    "agent_lives",
    "check_pivot",
    "nothing_to_go_on_from",
    "plan_pivot",
    "require_here",
]


@dataclass(frozen=True, slots=True)
class PivotPlan:
    """What a pivot would do now.

    Attributes:
        step: The resume point that it would go on from, if the run stood still.
        is_live: The run trains; it would go to its next boundary first.
        restarts: The launcher would start it again.
        moved: Names of the files that would go to ``archive/``.
    """

    step: int
    is_live: bool
    restarts: bool
    moved: tuple[str, ...]


def plan_pivot(run: Run, settings: Mapping[str, Any] | None) -> PivotPlan:
    """Return what `pivot_run` would do now; nothing is changed.

    Raises:
        NotFoundError: The run has no generation to go on from.
        NotRunningError: It runs on another host.
        UsageError: Settings are given that the next start would refuse: they aren't one JSON
            object, or the run has no policy that could heed them.
    """
    step = check_pivot(run, settings)
    liveness = look_alive(run.store.run_dir, run.journal())
    require_here(run, liveness)
    paths = [history_path(run.store.run_dir, run.name, what) for what in ("samples", "state")]
    moved = tuple(os.path.basename(path) for path in paths if storage.exists(path))
    is_live = liveness.state is State.RUNNING
    return PivotPlan(step, is_live, is_live and agent_lives(liveness.facts), moved)


def check_pivot(run: Run, settings: Mapping[str, Any] | None) -> int:
    """Return the newest generation's step if the run can be pivoted; 0 where it is yet to come.

    Settings are checked as far as that goes without the program: its policy alone knows what they
    mean.
    """
    if settings is not None:
        _require_json(settings)
    latest = run.latest()
    if latest is None:
        if look_alive(run.store.run_dir, run.journal()).state is State.RUNNING:
            return 0
        raise nothing_to_go_on_from(run)
    shared = latest.manifest.shared
    parts = shared.get("parts", {}) if isinstance(shared, dict) else {}
    if settings is not None and "policy" not in parts:
        raise UsageError(
            f"{run.path} keeps no policy that could heed these settings.",
            next_step="Give Checkpointer a policy, or pivot without --policy.",
            path=str(run.path),
        )
    if settings is not None and latest.manifest.notes.get("takes_settings") is False:
        raise UsageError(
            f"{run.path} keeps a policy that takes no settings: the next start would refuse them.",
            next_step="Pivot without --policy; or give the policy configure(settings), train to "
            "the next checkpoint, and pivot then.",
            path=str(run.path),
        )
    return latest.step


def _require_json(settings: Mapping[str, Any]) -> None:
    """Return if a file can hold the settings."""
    try:
        parse_settings(encode_settings(dict(settings)), "settings")
    except (ValueError, TypeError, RecursionError, CorruptFileError) as error:
        raise UsageError(
            f"The settings aren't one JSON object: {error}.",
            next_step="Give a dict of text to numbers, text, lists and dicts, without NaN.",
        ) from error


def nothing_to_go_on_from(run: Run) -> NotFoundError:
    return NotFoundError(
        f"{run.path} has no generation to go on from.",
        next_step="Pivot once it has saved something; `dist-ckpt ls` shows what there is.",
        path=str(run.path),
    )


def require_here(run: Run, liveness: Liveness) -> None:
    """Return if the run isn't on another host, where it could be neither asked nor judged."""
    host = liveness.facts.get("host")
    is_away = liveness.is_locked and host not in {None, socket.gethostname()}
    if liveness.state is State.UNKNOWN or is_away:
        reasons = "; ".join(found.text for found in liveness.evidence)
        raise NotRunningError(
            f"{run.path} is another host's: {reasons}.",
            next_step=f"Pivot on {host}.",
            path=str(run.path),
        )


def agent_lives(facts: Mapping[str, Any]) -> bool:
    """Return whether torchrun's agent, below our launcher, could start the run again."""
    pid, start_time = facts.get("agent_pid"), facts.get("agent_start_time")
    here = facts.get("host") == socket.gethostname()
    known = type(pid) is int and type(start_time) is int
    return here and known and announce.process_alive(int(pid or 0), int(start_time or 0))
