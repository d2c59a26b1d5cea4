"""The start of an attempt: which resume point, is it this run's, what is set aside. Layer 6."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt import announce, identity, lifecycle, storage
from dist_ckpt.capture import Captured, Structure
from dist_ckpt.comm import Comm
from dist_ckpt.errors import NotFoundError, NoUsableGenerationError, UsageError
from dist_ckpt.history import History, read_journal
from dist_ckpt.resume import Imported, Resumed, advise_import, import_bin, restore_newest
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._importing import report_import
from dist_ckpt.service._policy import KeptPolicy, begin_policy, settle_policy
from dist_ckpt.service._replicas import check_replicas
from dist_ckpt.service._settings import IMPORT_VARIABLE, Settings
from dist_ckpt.service._voice import Voice
from dist_ckpt.service._whole import look_around

__all__ = ["Start", "start_run"]

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


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
    again = bool(comm.agree([int(_is_restart(attempt))], phase="settings")[0])
    rewind_to = _rewind_to(settings, again=again)
    whole = look_around(comm, captured)
    found = comm.together(
        "looking at the data", lambda: _describe(comm, whole.structure, settings, data)
    )
    for note in found.notes:
        voice.say(note)
        attempt.journal("note", text=note)
    admitted: list[Any] = []

    def admit(point: ResumePoint) -> None:
        _say_unknown(settings, voice, [point.identity, found.facts], captured, point)
        admitted[:] = identity.check(
            point.identity, found.facts, accept=settings.accepted, strict=settings.strict
        )

    comm.together("an unfinished rewind", lambda: _finish_rewind(attempt, comm, voice))
    comm.together(
        "settings", lambda: _check_settings(attempt, comm, settings, rewind_to, again=again)
    )
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
        comparable = _report(attempt, resumed, imported, admitted, comm=comm, voice=voice)
        if resumed is not None:
            _tell_words(attempt, resumed, settings)
            _look_for_losses(attempt, resumed.point, voice)
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


def _tell_words(attempt: Attempt, resumed: Resumed, settings: Settings) -> None:
    words = {"accept": sorted(settings.accepted), "omit": sorted(settings.omitted)}
    if any(words.values()):
        attempt.journal("restored_with", step=resumed.step, **words)


def _say_unknown(
    settings: Settings,
    voice: Voice,
    identities: list[Mapping[str, Any]],
    captured: Captured,
    point: ResumePoint,
) -> None:
    """A word with a slip of the pen accepts nothing; it mustn't do so in silence."""
    if not settings.accepted:
        return
    saved = point.shared.get("parts", {}) if isinstance(point.shared, dict) else {}
    parts = {*captured.shared_values()["parts"], *saved}
    for word, nearest in identity.unknown_words(settings.accepted, identities, parts).items():
        hint = "" if nearest is None else f" Was {nearest!r} meant?"
        voice.warn(f"accept={word!r} names nothing that could differ here.{hint}")


def _rewind_to(settings: Settings, *, again: bool) -> int | None:
    if not isinstance(settings.resume, int):
        return None
    # A restart of the same launch or job has gone back already; again, it would lose its work.
    return None if again else settings.resume


def _is_restart(attempt: Attempt) -> bool:
    """Whether the same launch, or the same job of a scheduler, has begun before."""
    if any(os.environ.get(name, "0") not in {"", "0"} for name in _RESTART_COUNTS):
        return True
    # A node that joins makes torchrun start all again without counting it.
    launch = announce.launch_id()
    if launch is None or attempt.lock is None:
        return False
    events = read_journal(attempt.store.run_dir)
    begun = [event for event in events if event["event"] == "attempt_started"]
    return any(event.get("launch_id") == launch for event in begun[:-1])  # the last is this one


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


def _check_settings(
    attempt: Attempt, comm: Comm, settings: Settings, rewind_to: int | None, *, again: bool
) -> None:
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
    archived = sorted(storage.list_names(store.archive)) if storage.exists(store.archive) else []
    aside = [name for name in archived if name.startswith("faulty_")]
    events = read_journal(store.run_dir)
    saved = [event["step"] for event in events if event["event"] == "saved"]
    if not aside and not saved:
        return
    had = f"the journal tells of step {saved[-1]}" if saved else "it had some"
    where = f"; set aside in archive/: {', '.join(aside)}" if aside else ""
    advice = advise_import(store)
    raise NoUsableGenerationError(
        f"{store.run_dir} has no generation, though {had}{where}.",
        next_step="Is the disk mounted? Move a good one back into checkpoints/, start in another "
        "directory, or begin at step 0 on purpose with accept=('fresh_start',)."
        + (f" {advice}" if advice else ""),
        path=str(store.run_dir),
        skipped={},
    )


def _report(
    attempt: Attempt,
    resumed: Resumed | None,
    imported: Imported | None,
    admitted: list[Any],
    *,
    comm: Comm,
    voice: Voice,
) -> bool:
    """Rank 0: say, journal and set aside; return whether replayed losses must be bit-equal."""
    journal, store = attempt.journal, attempt.store
    for name in attempt.removed:
        voice.say(f"removed {name}, left by an interrupted save")
    if imported is not None:
        report_import(attempt, imported, voice)
        return True
    if attempt.pivot is not None:
        archive = attempt.pivot.archive
        voice.say(f"pivot at step {attempt.pivot.step}; samples and state of before: {archive}")
    if resumed is None:
        journal("fresh_start", step=0)
        voice.say("starts at step 0")
        return True
    for fault in resumed.skipped:
        where = store.set_aside(fault.step, f"faulty_{fault.step:06d}")
        journal(
            "skipped", step=fault.step, id=fault.id, reason=fault.reason, moved_to=where.parent.name
        )
        voice.warn(
            f"step {fault.step} can't be used and was moved to archive/{where.parent.name}: "
            f"{fault.reason}"
        )
    accepted = [str(difference) for difference in admitted if not difference.warning]
    changed = [str(difference) for difference in admitted if difference.warning]
    for text in accepted:
        voice.warn(f"accepted: {text}")
    for text in changed:
        voice.warn(f"not as saved: {text}")
    journal(
        "resumed",
        step=resumed.step,
        id=resumed.point.id,
        world_size=comm.world_size,
        restore_secs=round(resumed.secs, 6),
        saved_world_size=resumed.point.world_size,
        accepted=accepted,
        changed=changed,
        notes=list(resumed.notes),
    )
    voice.say(f"resumed from step {resumed.step}")
    for note in resumed.notes:
        voice.say(note)
    return not admitted and resumed.is_comparable


def _look_for_losses(attempt: Attempt, point: ResumePoint, voice: Voice) -> None:
    """A loss file that lacks what had been logged is no fault of the state, but is said aloud."""
    saved_here = any(
        event["event"] == "saved" and event.get("id") == point.id
        for event in read_journal(attempt.store.run_dir)
    )
    if not saved_here:
        return  # brought here from another run, whose losses stayed there
    gap = attempt.history.gap(point.step, point.notes.get("history"))
    if gap is not None:
        voice.warn(
            f"{gap}. Training goes on and logs from here; what was cut off by a crash lies in "
            "archive/, the rest must come from a copy of the file"
        )


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
        count = len(rewound.set_aside)
        voice.say(f"went back to step {rewound.step}; {count} later generations are in archive/")


def _parent(resumed: Resumed | None) -> Mapping[str, Any] | None:
    if resumed is None:
        return None
    point = resumed.point
    return {"step": point.step, "id": point.id, "content": point.notes.get("content")}
