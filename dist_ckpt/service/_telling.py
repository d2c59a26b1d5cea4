"""What the start of an attempt says, journals and sets aside. Layer 6, rank 0 but where it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_ckpt import identity
from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.resume import Imported, Resumed
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._importing import report_import
from dist_ckpt.service._settings import Settings
from dist_ckpt.service._voice import Voice

__all__ = ["look_for_losses", "report_start", "say_unknown", "tell_words"]


def tell_words(attempt: Attempt, resumed: Resumed, settings: Settings) -> None:
    """Journal what was accepted or left out by name."""
    words: dict[str, Any] = {"accept": sorted(settings.accepted), "omit": sorted(settings.omitted)}
    if any(words.values()):
        attempt.journal("restored_with", step=resumed.step, **words)


def say_unknown(
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


def report_start(
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
    _say_mended(attempt, voice)
    if imported is not None:
        report_import(attempt, imported, voice)
        return True
    if attempt.pivot is not None:
        archive = attempt.pivot.archive
        voice.say(f"pivot at step {attempt.pivot.step}; samples and state of before: {archive}")
    if resumed is None:
        journal("fresh_start", step=0, replays_until=attempt.history.replays_until(0))
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
    accepted += resumed.accepted
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
        replays_until=attempt.history.replays_until(resumed.step),
    )
    voice.say(f"resumed from step {resumed.step}")
    for note in resumed.notes:
        voice.say(note)
    # Whoever accepted another optimizer has been told what became of it.
    if any(difference.part == "config" for difference in admitted) and not resumed.accepted:
        voice.say("optimizer and scheduler hold what was saved, whatever config says now")
    return not admitted and resumed.is_comparable


def _say_mended(attempt: Attempt, voice: Voice) -> None:
    for name in attempt.removed:
        voice.say(f"removed {name}, left by an interrupted save")
    for text in attempt.history.damage:
        voice.warn(text)


def look_for_losses(attempt: Attempt, point: ResumePoint, voice: Voice) -> None:
    """A loss file that lacks what had been logged is no fault of the state, but is said aloud."""
    saved_here = any(
        event["event"] == "saved" and event.get("id") == point.id
        for event in attempt.events(point.id)
    )
    if not saved_here:
        return  # brought here from another run, whose losses stayed there
    gap = attempt.history.gap(point.step, point.notes.get("history"))
    if gap is not None:
        voice.warn(
            f"{gap}. Training goes on and logs from here; what was cut off by a crash lies in "
            "archive/, the rest must come from a copy of the file"
        )
