"""The whole of it: plan, write, commit, load for trial, give the name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.generations import GenerationStore
from dist_ckpt.lifecycle import check_target, find_origin, taken
from dist_ckpt.reshard._prepare import Prepared
from dist_ckpt.reshard._run import carry_history, carry_policy, new_run
from dist_ckpt.reshard._write import machinery, try_loading, write_files
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.storage import FileDigest

__all__ = ["DEFAULT_MEMORY_BYTES", "Resharded", "reshard"]

DEFAULT_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Resharded:
    """A new run directory with one generation, read back and found whole.

    Attributes:
        path: The run directory.
        point: Its resume point.
        chunk_bytes: In what pieces it was moved.
        notes: What isn't as it was on the old ranks.
        secs: How long it took, reading back included.
    """

    path: Path
    point: ResumePoint
    chunk_bytes: int
    notes: tuple[str, ...]
    secs: float


def reshard(
    job: Prepared,
    out: str | os.PathLike[str],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int], None] = lambda _num_bytes: None,
) -> Resharded:
    """Have a new run directory whose one generation is ``job``'s, for its number of ranks.

    It appears whole, durable and read back, or not at all. The source is read only, and every byte
    of it is compared with its digest. Memory is bounded but for the manifests and the
    values that aren't tensors.

    Args:
        job: What `prepare` returned.
        out: The new run directory; must not exist.
        memory_bytes: What all buffers may take together.
        progress: Told bytes since the last call; ``2 * job.num_bytes`` in all, or nearly.

    Raises:
        UsageError: Something is at ``out``, no run can be made there, or too little memory for that
            many ranks.
        CorruptFileError: Bytes of the source aren't what was written; the message names the file.
        NoSpaceError: No room, found out before anything is written.
        StorageError: The system refused.
    """
    began = time.monotonic()
    target = Path(os.path.abspath(out))
    point, store = job.point, job.store
    origin = find_origin(store, point.step)
    if storage.exists(target):
        raise taken(target)
    check_target(origin.run_dir or job.directory, target)
    storage.check_space(target.parent, job.num_bytes + len(job.new_index) + (1 << 20))
    with machinery(point.world_size, job.world_size, memory_bytes) as parts:
        with new_run(target) as temporary:
            new = GenerationStore(temporary)
            prepared = new.prepare(point.step, job.id[:8])
            files, contained = write_files(job, prepared, parts, progress)
            new_point = _point(job, target.name, files)
            new.commit(prepared, new_point, job.new_index)
            try_loading(job, new, new_point, contained, parts=parts, progress=progress)
            new.mark_verified(point.step, "resharded and loaded for trial")
            facts = {**_origin(job), "id": job.id, "world_size": job.world_size}
            carry_history(origin, temporary, target.name, facts=facts)
            carry_policy(origin, temporary, target.name, point)
        chunk_bytes = parts.buffers.chunk_bytes
    return Resharded(target, new_point, chunk_bytes, _notes(job), time.monotonic() - began)


def _origin(job: Prepared) -> dict[str, Any]:
    """Return what the new run says of where it comes from."""
    point = job.point
    return {
        "source": str(job.directory),
        "source_run": point.run,
        "source_id": point.id,
        "source_world_size": point.world_size,
    }


def _point(job: Prepared, run: str, files: Mapping[str, FileDigest]) -> ResumePoint:
    point = job.point
    return ResumePoint(
        run=run,
        step=point.step,
        id=job.id,
        parent={"step": point.step, "id": point.id},
        attempt=0,
        time=time.time(),
        reasons=("reshard",),
        world_size=job.world_size,
        files={name: digest.to_json() for name, digest in files.items()},
        index={
            "size_bytes": len(job.new_index),
            "digest": storage.digest_bytes(job.new_index),
        },
        canonical=job.plan.layout.canonical,
        identity=point.identity,
        shared=point.shared,
        notes={"resharded": _origin(job), "policy": point.notes.get("policy")},
    )


def _notes(job: Prepared) -> tuple[str, ...]:
    old, new = job.point.world_size, job.world_size
    if old == new:
        return ()
    notes = ["buffers and the user's state are rank 0's on every rank"]
    if new > old:
        which = f"rank {old}" if new == old + 1 else f"ranks {old} to {new - 1}"
        notes.append(f"{which}: random state derived from rank 0's, the step and the rank")
    else:
        which = f"rank {new}" if old == new + 1 else f"ranks {new} to {old - 1}"
        notes.append(f"{which}: random state left behind")
    return tuple(notes)
