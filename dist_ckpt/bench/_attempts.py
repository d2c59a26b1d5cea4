"""One case, whatever becomes of its ranks: who took them down is left out, the rest measured.

Layer 7; imports no torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_ckpt.bench._answer import BenchAnswer, read_answer
from dist_ckpt.bench._plan import Case, Options, encode_order
from dist_ckpt.bench._ranks import TIME_IS_UP, run_ranks

__all__ = ["LIMITS", "measure", "remove_tree"]

#: Above a case's own time: imports, the rounds that are due to everybody, a slow peer's last.
_GRACE_SECS = 90.0
#: A turn that takes longer has no end: a save, or two loads.
TURN_SECS = 60.0
#: For ours and the limits, which a busy machine mustn't cost the case.
_OWN_TURN_SECS = 180.0
#: What is left once everything is measured.
_END_SECS = 20.0
_OURS = "dist_ckpt"
#: How the limits are called where a contender is named.
LIMITS = "the limits"
_MOST_ATTEMPTS = 6


def measure(case: Case, options: Options, folder: Path) -> dict[str, Any]:
    """Return what was measured; only where that is nothing, an error.

    A contender without an end, or in whose turn a rank ended, takes no part in the next attempt;
    what was measured of it before stays, with the reason.
    """
    found: dict[str, Any] = {}
    lost: dict[str, str] = {}
    ends = time.monotonic() + case.secs
    for _ in range(_MOST_ATTEMPTS):
        secs = max(ends - time.monotonic(), case.secs / 2)
        without = Options(repeats=options.repeats, against=options.against, without=tuple(lost))
        why, answer = _attempt(replace(case, secs=secs), without, folder)
        if answer is not None:
            found = _join(found, answer.found)
        if not why:
            break
        if answer is None or answer.is_all or not answer.on_turn or why == TIME_IS_UP:
            # Nobody in particular is to blame; what there is stays.
            found.setdefault("notes", []).append(f"The ranks' end: {why}")
            break
        lost |= _blame(answer, why)
        _tell_lost(found, lost)
        if answer.on_turn == LIMITS:
            break  # without them there is no measure
    if not {"contenders", "figures", "rows"} & found.keys():
        return {"error": next(iter(lost.values()), why)}
    return found


def _attempt(case: Case, options: Options, folder: Path) -> tuple[str, BenchAnswer | None]:
    told = folder / "answer.json"

    def news() -> object:
        try:
            status = told.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def patience() -> float:
        answer = read_answer(told)
        if answer is not None and answer.is_all:
            return _END_SECS
        is_own = answer is None or answer.on_turn in ("", LIMITS, _OURS)
        return _OWN_TURN_SECS if is_own else TURN_SECS

    words = [encode_order(case, options, folder), str(told)]
    folder.mkdir()
    try:
        why = run_ranks(
            words,
            case.world_size,
            folder / "log",
            secs=case.secs + _GRACE_SECS,
            news=news,
            patience=patience,
        )
        return why, read_answer(told)
    finally:
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Nothing is left of it, though directories in it can't be written."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _join(before: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what two attempts have measured; the second counts where both have something.

    What was noted stays noted: who took its ranks down before it was measured stands there alone.
    """
    if "contenders" not in before or "contenders" not in found:
        return found
    notes = list(dict.fromkeys([*before.get("notes", ()), *found.get("notes", ())]))
    contenders = dict(before["contenders"])
    for name, entrant in found["contenders"].items():
        if entrant["samples"] or not contenders.get(name, {}).get("samples"):
            contenders[name] = entrant
    limits = found["limits"] or before["limits"]
    return {**found, "limits": limits, "contenders": contenders, "notes": notes}


def _blame(answer: BenchAnswer, why: str) -> dict[str, str]:
    """Return who takes no further part, and why: who was on turn, and its siblings yet to come."""
    name = answer.on_turn
    lost = {name: why}
    family = name.split(maxsplit=1)[0]
    for other, entrant in answer.found.get("contenders", {}).items():
        if other != name and other.split()[0] == family and not entrant["correct"]:
            lost[other] = f"left out, as {name} {why}"
    return lost


def _tell_lost(found: dict[str, Any], lost: Mapping[str, str]) -> None:
    for name, why in lost.items():
        if name in found.get("contenders", {}):
            found["contenders"][name]["error"] = why
        elif (note := f"{name}: {why}") not in found.get("notes", ()):
            found.setdefault("notes", []).append(note)
