"""One save, from the arena to a committed generation, on the background thread. Layer 6.

    prepare (space, directory) → every rank writes and syncs its two files → rank 0 commits
      → told to all; what follows is in `_finish`

Reports and outcomes go through the store, never through a collective: the training thread has
those.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from dist_ckpt import storage
from dist_ckpt.comm import Comm
from dist_ckpt.errors import DistCkptError, NoSpaceError, SaveFailedError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import OwnPoints
from dist_ckpt.layout import Layout
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._provenance import Provenance
from dist_ckpt.service._settings import Settings
from dist_ckpt.service._told import Told, during
from dist_ckpt.staging import Writable
from dist_ckpt.storage import sha256_file

__all__ = ["Job", "Outcome", "Saves", "Where", "run_job"]

#: What reading back costs beside writing (facts.md); only used to tell whether the deadline leaves
#: time for it.
_VERIFY_SHARE = 0.8
_UNTOUCHED = "Earlier generations are untouched; the next save tries again."


@dataclass(frozen=True)
class Job:
    """One save, staged.

    Attributes:
        step: Finished updates.
        id: Name of this save, the same on every rank.
        reasons: Why it is made.
        staged: The bytes; None where staging failed on this rank.
        layout: Who writes what; None where a rank's capture failed.
        fault: Why staging failed on this rank.
        index: Bytes of ``.snapshot_metadata``.
        deadline: time.monotonic() by which a stop must be over; None for no hurry.
        point: Makes the resume point of ``files`` (name → digest as JSON) and ``notes``; rank 0.
        blocked_secs: How long training waited for it.
        policy: What ``NAME.state.json`` is to hold; rank 0, None without a policy.
    """

    step: int
    id: str
    reasons: tuple[str, ...]
    staged: Writable | None
    layout: Layout | None
    fault: Told | None
    index: bytes
    deadline: float | None
    point: Callable[[Mapping[str, Any], Mapping[str, Any]], ResumePoint]
    blocked_secs: float = 0.0
    policy: bytes | None = None


@dataclass
class Where:
    """What the save in flight is doing, for the error of somebody who waited too long for it."""

    text: str = "it was about to begin"


@dataclass(frozen=True)
class Saves:
    """What every job needs; the same for the whole attempt."""

    comm: Comm
    store: GenerationStore
    journal: Callable[..., None]
    mark_history: Callable[[int], Mapping[str, Any] | None]
    sync_history: Callable[[], None]
    keep_policy: Callable[[bytes], None]
    check_lock: Callable[[], None]
    settings: Settings
    provenance: Provenance
    #: What retention has read of the journal. Rank 0, the background thread.
    own: OwnPoints
    say: Callable[[str], None]
    warn: Callable[[str], None]
    #: Set while a stop is short of time: reading back, export and retirement give way.
    hurry: threading.Event = field(default_factory=threading.Event)
    #: Steps that answered a signal after they had been saved for another reason. Rank 0.
    answered: set[int] = field(default_factory=set)
    #: Told each committed step, on every rank.
    committed: Callable[[int], None] = lambda _step: None
    where: Where = field(default_factory=Where)


@dataclass(frozen=True)
class Outcome:
    """What every rank knows of a committed job.

    Attributes:
        finish: The deadline leaves time to read back and export.
        content: Digest of weights and optimizer state of all ranks, to notice a save that repeats
            its parent.
    """

    finish: bool
    content: str | None


def run_job(saves: Saves, job: Job) -> Outcome:
    """Have a committed generation, or nothing at all.

    Args:
        saves: The attempt's frame.
        job: What to save.

    Raises:
        SaveFailedError: A rank failed; it is named, nothing of the save is left, earlier
            generations are untouched.
        JobError: The ranks lost each other.
    """
    comm = saves.comm
    started = time.monotonic()
    temporary: Path | None = None
    awaited = "the other ranks" if comm.rank == 0 else "rank 0"
    try:
        saves.where.text = f"rank {comm.rank} was waiting for {awaited} in staging step {job.step}"
        prepared = json.loads(
            comm.exchange(
                f"staging step {job.step} ({job.id[:8]})",
                _first_report(saves, job),
                lambda all_: _prepare(saves, job, all_),
            )
        )
        _raise_errors(job, prepared)
        temporary = saves.store.directory / prepared["directory"]
        saves.where.text = f"rank {comm.rank} was writing step {job.step}"
        report = _write(saves, job, temporary)
        phase = f"writing and committing step {job.step}"
        saves.where.text = f"rank {comm.rank} was waiting for {awaited} in {phase}"
        decided = json.loads(
            comm.exchange(
                f"{phase} ({job.id[:8]})",
                report,
                lambda all_: _commit(saves, job, Path(temporary or ""), all_, started),
            )
        )
        _raise_errors(job, decided)
    except BaseException:
        if comm.rank == 0 and temporary is not None:
            with contextlib.suppress(DistCkptError, OSError):  # the first error is the one to tell
                saves.store.abort(temporary)
        raise
    return Outcome(finish=decided["finish"], content=decided["content"])


def _first_report(saves: Saves, job: Job) -> bytes:
    fault = job.fault
    if job.staged is not None and fault is None:
        try:
            job.staged.wait(saves.settings.timeout_secs)
        except Exception as error:  # noqa: BLE001 - told to every rank
            fault = during("staging", error)
    num_bytes = job.staged.num_bytes if job.staged else 0
    return json.dumps({"error": fault, "num_bytes": num_bytes}).encode()


def _prepare(saves: Saves, job: Job, reports: list[bytes]) -> bytes:
    """Rank 0: have space and a directory, or say why not."""
    parsed = [json.loads(report) for report in reports]
    errors = {str(r): p["error"] for r, p in enumerate(parsed) if p["error"] is not None}
    directory = ""
    low_bytes = 0
    if not errors:
        need = sum(p["num_bytes"] for p in parsed) + len(job.index) + (1 << 20)
        need += _export_bytes(saves, job)
        try:
            saves.check_lock()
            storage.check_space(saves.store.run_dir, need, saves.settings.reserve_bytes)
            directory = saves.store.prepare(job.step, job.id[:8]).name
        except Exception as error:  # noqa: BLE001 - told to every rank
            errors["0"] = during("preparing", error)
            low_bytes = need if isinstance(error, NoSpaceError) else 0
    answer = {"errors": errors, "directory": directory, "low_bytes": low_bytes}
    return json.dumps(answer).encode()


def _export_bytes(saves: Saves, job: Job) -> int:
    """Return what ``step_N.bin`` will take beside the shards."""
    if job.layout is None or job.deadline is not None:
        return 0  # a stop saves what it can: the next start makes the .bin
    canonical = job.layout.canonical
    exports = saves.settings.export != "never" and canonical.refused is None
    if exports and (saves.settings.export_copy or not canonical.is_shard):
        return 8 + 12 * canonical.num_params
    return 0


def _write(saves: Saves, job: Job, directory: Path) -> bytes:
    """Write and sync this rank's files; return its report: digests, or what went wrong."""
    if job.staged is None:
        fault = job.fault or ("nothing was staged", "")
        return json.dumps({"error": fault, "files": {}}).encode()
    try:
        written = job.staged.write(directory, saves.comm.rank)
        storage.sync_dir(directory)
        files = {name: digest.to_json() for name, digest in written.files.items()}
        if saves.provenance.is_signed:
            for name, record in files.items():
                record["sha256"] = sha256_file(directory / name)
    except Exception as error:  # noqa: BLE001 - told to every rank
        low_bytes = job.staged.num_bytes if isinstance(error, NoSpaceError) else 0
        return json.dumps(
            {"error": during("writing", error), "files": {}, "low_bytes": low_bytes}
        ).encode()
    return json.dumps({"error": None, "files": files, "content": written.content}).encode()


def _commit(
    saves: Saves,
    job: Job,
    temporary: Path,
    reports: list[bytes],
    started: float,
) -> bytes:
    """Rank 0: the decision over all ranks' reports; makes the generation or says why not."""
    parsed = [json.loads(report) for report in reports]
    errors = {str(r): p["error"] for r, p in enumerate(parsed) if p["error"] is not None}
    finish: bool = True
    contents: str | None = None
    saves.where.text = f"rank 0 was committing step {job.step}"
    if not errors:
        files = {name: record for p in parsed for name, record in p["files"].items()}
        try:
            contents = _content_of([p["content"] for p in parsed])
            point = job.point(files, {"content": contents})
            saves.sync_history()
            if job.policy is not None:
                # Before the commit: that it's missing beside a generation has a meaning.
                saves.keep_policy(job.policy)
            saves.check_lock()
            if saves.provenance.is_signed:
                sha256 = hashlib.sha256(job.index).hexdigest()
                point = replace(point, index={**point.index, "sha256": sha256})
            saves.store.commit(temporary, point, job.index, sign=saves.provenance.sign)
        except Exception as error:  # noqa: BLE001 - told to every rank
            errors["0"] = during("committing", error)
        else:
            took = time.monotonic() - started
            finish = _leaves_time(job, took)
            saves.journal(
                "saved",
                step=job.step,
                id=job.id,
                reasons=list(job.reasons),
                bytes=point.num_bytes,
                blocked_secs=round(job.blocked_secs, 6),
                durable_secs=round(took, 6),
            )
            saves.say(f"step {job.step} saved ({', '.join(job.reasons)})")
            _say_stale(saves, job, point, contents)
    answer = {
        "errors": errors,
        "finish": finish,
        "content": contents,
        "low_bytes": sum(p.get("low_bytes", 0) for p in parsed),
    }
    return json.dumps(answer).encode()


def _content_of(contents: list[str | None]) -> str | None:
    """Return one digest of all ranks' content, None where a rank has none."""
    known = [content for content in contents if content is not None]
    if len(known) < len(contents):
        return None
    return str(xxhash.xxh3_128("".join(known).encode()).hexdigest())


def _say_stale(saves: Saves, job: Job, point: ResumePoint, content: str | None) -> None:
    """Case 42: a step moved, but not one bit of weights and optimizer state did."""
    parent = point.parent
    if content is None or parent is None or parent["step"] == job.step:
        return
    if point.notes.get("parent_content") == content:
        saves.journal("stale", step=job.step, parent=parent["step"])
        saves.warn(
            f"step {job.step}: weights and optimizer state are bit-identical to step "
            f"{parent['step']}. Is the optimizer stepping?"
        )


def _leaves_time(job: Job, took: float) -> bool:
    return job.deadline is None or time.monotonic() + took * _VERIFY_SHARE < job.deadline


def _raise_errors(job: Job, outcome: Mapping[str, Any]) -> None:
    errors: Mapping[str, Told] = outcome["errors"]
    if not errors:
        return
    text = "; ".join(f"rank {rank}: {what.removesuffix('.')}" for rank, (what, _) in errors.items())
    hints = dict.fromkeys(hint for _, hint in errors.values() if hint)
    raise SaveFailedError(
        f"Step {job.step} was not saved. {text}.",
        next_step=" ".join(
            [*hints, "Earlier generations are untouched; the next save tries again."]
        ),
        step=job.step,
        cause={rank: what for rank, (what, _) in errors.items()},
        low_bytes=outcome["low_bytes"],
    )
