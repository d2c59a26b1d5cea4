"""What retention keeps of a run and why; retiring the rest. Layer 5, I/O; the lock is held.

Only the run's own line counts and goes: a generation that is of another run, or of another branch,
would make a newer one of this run look old. What isn't known to be its own is left alone. The
journal knows what it was told; for a save whose line it lacks, the manifest names the attempt, but
such a generation never stands for the newest: it goes only once a later one is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dist_ckpt import storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.generations import (
    GenerationStore,
    Known,
    Retention,
    StoredGenerations,
    plan_bins,
    plan_retention,
)
from dist_ckpt.history import OwnPoints, run_name

__all__ = ["Verdict", "judge", "retire"]

Reason = Literal["pinned", "keep_last", "keep_every", "unverified", "other_line", "old"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one generation.

    Attributes:
        step: Finished updates.
        keep: It stays.
        reason: In a word.
        why: In a sentence without a full stop.
        bin: What becomes of its ``step_N.bin``: ``"keep"``, ``"drop"``; None where there is none.
        num_bytes: Bytes of its ranks' files; None where its manifest can't be read.
    """

    step: int
    keep: bool
    reason: Reason
    why: str
    bin: Literal["keep", "drop"] | None
    num_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def judge(
    store: StoredGenerations, retention: Retention, own: OwnPoints | None = None
) -> list[Verdict]:
    """Return a verdict on each generation of a run, ascending; writes nothing.

    Args:
        store: The run's generations.
        retention: The settings.
        own: What was read of the run's journal before, by who asks again and again.

    Raises:
        CorruptFileError: ``pins.json`` can't be understood.
        StorageError: The journal can't be read now: what is the run's own isn't known.
    """
    points = {step: store.known.of(step) for step in store.steps()}
    store.known.forget(set(points))
    steps = list(points)
    pins = store.pins()
    kinds = _kinds(store, points, own or OwnPoints(store.run_dir))
    counted = [step for step in steps if step not in kinds]
    kept = plan_retention(counted, pinned=pins, retention=retention)
    bins_gone = plan_bins(kept, retention=retention)
    verdicts = []
    for step in steps:
        reason: Reason = kinds.get(step) or kept.get(step) or "old"  # type: ignore[assignment]
        keep = step in kinds or step in kept
        drops = not keep or step in bins_gone
        has_bin = storage.exists(store.bin_path(step))
        verdicts.append(
            Verdict(
                step=step,
                keep=keep,
                reason=reason,
                why=_why(reason, retention, pins.get(step)),
                bin=None if not has_bin else "drop" if drops else "keep",
                num_bytes=None if (point := points[step]) is None else point.num_bytes,
            )
        )
    return verdicts


def retire(
    store: GenerationStore, verdicts: Sequence[Verdict], journal: Callable[..., None]
) -> tuple[list[int], list[int]]:
    """Have removed what the verdicts let go, but what was pinned meanwhile; return what went.

    Returns:
        Steps of generations, and of .bin files whose generation stays.

    Raises:
        StorageError: The file system refused; what went before is gone, call it again.
    """
    gone: list[int] = []
    bins: list[int] = []
    for verdict in verdicts:
        if not verdict.keep:
            if store.retire(verdict.step):
                journal("retired", step=verdict.step)
                gone.append(verdict.step)
        elif verdict.bin == "drop":
            store.drop_bin(verdict.step)
            journal("bin_retired", step=verdict.step)
            bins.append(verdict.step)
    return gone, bins


def _kinds(
    store: StoredGenerations, points: Mapping[int, Known | None], own: OwnPoints
) -> dict[int, Reason]:
    """Return step → why it doesn't count; a step that isn't there does."""
    try:
        own.look()
        name = run_name(store.run_dir)
    except NotFoundError:  # nothing else means that it was lost
        name = store.run_dir.name
    kinds: dict[int, Reason] = {}
    is_superseded = False  # by a later one that is surely the run's own
    for step, point in sorted(points.items(), reverse=True):
        if point is None or not point.is_verified:
            kinds[step] = "unverified"
        # A journal that was lost tells nothing; the manifest still names the run.
        elif own.has(point.id) or (own.is_blank and point.run == name):
            is_superseded = True
        elif not (is_superseded and own.has_attempt(point.nonce)):
            kinds[step] = "other_line"
    return kinds


def _why(reason: Reason, retention: Retention, pin: str | None) -> str:
    newest = f"the newest {retention.keep_last}"
    every = retention.keep_every
    not_every = "" if every is None else f", no multiple of {every}"
    return {
        "pinned": f"pinned: {pin}" if pin else "pinned",
        "keep_last": "all are kept" if retention.keep_last is None else f"among {newest}",
        "keep_every": f"a multiple of {every}",
        "unverified": "not verified yet, so it doesn't count",
        "other_line": "of another run or branch, so it doesn't count",
        "old": f"not among {newest}{not_every}, not pinned",
    }[reason]
