"""The start of an attempt: which resume point, is it this run's, what is set aside. Layer 6."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt import identity, lifecycle
from dist_ckpt.capture import Captured, Structure
from dist_ckpt.comm import Comm
from dist_ckpt.history import History
from dist_ckpt.resume import Imported, Resumed, import_bin, restore_newest
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._admission import check_resume, is_restart, rewind_target
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._policy import KeptPolicy, begin_policy, settle_policy
from dist_ckpt.service._replicas import check_replicas
from dist_ckpt.service._settings import Settings
from dist_ckpt.service._telling import look_for_losses, report_start, say_unknown, tell_words
from dist_ckpt.service._voice import Voice
from dist_ckpt.service._whole import look_around
from dist_ckpt.wording import counted

__all__ = ["Start", "start_run"]


@dataclass(frozen=True)
class Start:
    """Where an attempt begins.

    Attributes:
        resumed: The resume point, None at a fresh start.
        identity: What this attempt's resume points say of structure, configuration, data, code and
            versions.
        parent: ``{"step", "id", "content"}`` of the resume point.
        unverified: Steps of generations that were never read back as a whole.
        imported: What was taken from a .bin instead of a resume point.
    """

    resumed: Resumed | None
    identity: Mapping[str, Any]
    parent: Mapping[str, Any] | None
    unverified: tuple[int, ...]
    imported: Imported | None = None


def start_run(
    attempt: Attempt,
    comm: Comm,
    captured: Captured,
    settings: Settings,
    *,
    voice: Voice,
    data: Any,
    policy: KeptPolicy,
    generators: Mapping[str, Any],
) -> Start:
    """Restore the newest usable generation, or the one asked for; journal what was found."""
    # Any rank's word: agents of several nodes count their restarts apart.
    mine = comm.together("settings", lambda: is_restart(attempt))
    again = bool(comm.agree([int(mine)], phase="settings")[0])
    rewind_to = rewind_target(settings, again=again)
    whole = look_around(comm, captured)
    found = comm.together(
        "looking at the data", lambda: _describe(comm, whole.structure, settings, data)
    )
    for note in found.notes:
        voice.say(note)
        attempt.journal("note", text=note)
    admitted: list[Any] = []

    def admit(point: ResumePoint) -> None:
        say_unknown(settings, voice, [point.identity, found.facts], captured, point)
        admitted[:] = identity.check(
            point.identity, found.facts, accept=settings.accepted, strict=settings.strict
        )

    comm.together("an unfinished rewind", lambda: _finish_rewind(attempt, comm, voice))
    comm.together("settings", lambda: check_resume(attempt, comm, settings, rewind_to, again=again))
    begin_policy(attempt, comm, policy)
    resumed = restore_newest(
        attempt.store,
        comm,
        captured,
        admit=admit,
        accept=settings.accepted,
        omit=settings.omitted,
        generators=generators,
        only=rewind_to,
        chosen=policy.choose,
        elsewhere=whole.elsewhere,
    )
    imported = _begin(settings, comm, captured) if resumed is None else None
    facts = found.facts
    if resumed is not None:
        facts = identity.carry_on(resumed.point.identity, facts)
    facts = json.loads(comm.broadcast(json.dumps(facts).encode() if comm.rank == 0 else None))

    def settle() -> list[int]:
        """Rank 0: leave the run directory as this attempt goes on from it."""
        if comm.rank != 0:
            return []
        comparable = report_start(attempt, resumed, imported, admitted, comm=comm, voice=voice)
        if resumed is not None:
            tell_words(attempt, resumed, settings)
            look_for_losses(attempt, resumed.point, voice)
        if rewind_to is not None:
            _rewind(attempt, rewind_to, voice)
        if resumed is not None:
            settle_policy(attempt, policy, resumed.step, voice)
        begin = resumed or imported
        attempt.history.begin(begin.step if begin else None, comparable=comparable)
        store = attempt.store
        return [step for step in store.steps() if store.verified_at(step) is None]

    unverified = comm.together("setting aside and journalling", settle)
    told = comm.broadcast(json.dumps(unverified).encode() if comm.rank == 0 else None)
    return Start(resumed, facts, _parent(resumed), tuple(json.loads(told)), imported)


def _begin(settings: Settings, comm: Comm, captured: Captured) -> Imported | None:
    """Where no generation is: take a .bin, or see that the ranks begin alike. Collective."""
    if settings.import_path is not None:
        return import_bin(settings.import_path, comm, captured)
    check_replicas(comm, captured, accept=settings.accepted)
    return None


@dataclass(frozen=True)
class _Found:
    facts: Mapping[str, Any]
    notes: tuple[str, ...]


def _describe(comm: Comm, structure: Structure, settings: Settings, data: Any) -> _Found:
    if comm.rank != 0:
        return _Found({}, ())
    described = identity.describe(
        structure=structure,
        config=settings.config,
        config_ignore=settings.config_ignore,
        data=data,
        data_id=settings.data_id,
    )
    return _Found(described.facts, tuple(described.notes))


def _finish_rewind(attempt: Attempt, comm: Comm, voice: Voice) -> None:
    """Rank 0: end a rewind that a crash cut off, or later points would be resumed from."""
    if comm.rank == 0 and isinstance(attempt.history, History):
        _say_rewound(lifecycle.finish_rewind(attempt.store, attempt.history), voice)


def _rewind(attempt: Attempt, step: int, voice: Voice) -> None:
    """Set later generations aside and make the history end at ``step``."""
    if isinstance(attempt.history, History):  # rank 0's
        _say_rewound(lifecycle.rewind(attempt.store, attempt.history, step), voice)


def _say_rewound(rewound: lifecycle.Rewound | None, voice: Voice) -> None:
    if rewound is not None:
        later = counted(len(rewound.set_aside), "later generation")
        voice.say(f"went back to step {rewound.step}; now in archive/: {later}")


def _parent(resumed: Resumed | None) -> Mapping[str, Any] | None:
    if resumed is None:
        return None
    point = resumed.point
    return {"step": point.step, "id": point.id, "content": point.notes.get("content")}
