"""Every byte of a run compared with its digests, each fault named. Layer 6, reads only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    DistCkptError,
    ForeignFileError,
    NotFoundError,
    SignatureError,
)
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import RESUME_POINT_NAME, ResumePoint, state_name
from dist_ckpt.runs._check_bin import Origin, check_bin
from dist_ckpt.runs._findings import Depth, Finding
from dist_ckpt.runs._places import holds_format
from dist_ckpt.runs._run import Run
from dist_ckpt.storage import FileDigest

__all__ = ["check_generation", "check_run", "planned_bytes"]

_Progress = Callable[[int], None]


def check_run(
    run: Run, depth: Depth, *, progress: _Progress | None = None, only: int | None = None
) -> list[Finding]:
    """Return a finding for each generation and .bin of a run, ascending by step.

    Another one, of the kind ``"run"``, where all generations that the journal tells of are gone.

    Args:
        run: The run.
        depth: How much is read.
        progress: Told the bytes read since the last call; may be called on several threads, one at
            a time.
        only: This step alone.
    """
    store = run.store
    steps = store.steps() if only is None else [only]
    findings = []
    for step in steps:
        findings.append(check_generation(store, step, depth, progress=progress))
        if storage.exists(store.bin_path(step)):
            origin = _origin(store, step)
            path = store.bin_path(step)
            findings.append(check_bin(path, depth, origin=origin, progress=progress))
    if only is None and not run.is_single:
        orphans = _orphan_bins(store, steps)
        found = [check_bin(path, depth, progress=progress) for path in orphans]
        for path, finding in zip(orphans, found, strict=True) if store.trusted is not None else ():
            finding.add(
                SignatureError(f"{path} has no generation here whose signature vouches for it."),
                path,
            )
        findings += found
        findings += _vanished(run)
    return findings


def _vanished(run: Run) -> list[Finding]:
    """Return a finding where the generations that the journal tells of are gone, all of them."""
    told = run.vanished()
    if told is None:
        return []
    finding = Finding("run", str(run.store.directory), None)
    finding.add(NotFoundError(told, path=str(run.store.directory)), run.store.directory)
    return [finding]


def _origin(store: StoredGenerations, step: int) -> Origin | None:
    try:
        return store, store.manifest(step)
    except DistCkptError:
        return None  # the generation's own finding says why


def _orphan_bins(store: StoredGenerations, steps: Collection[int]) -> list[Path]:
    """Return the .bin files of a run whose generation isn't there, ascending by step."""
    found = {
        parse_step_name(name): store.run_dir / name
        for name in storage.list_names(store.run_dir)
        if name.endswith(".bin")
    }
    present = sorted(step for step in found if step is not None and step not in steps)
    return [found[step] for step in present]


def check_generation(
    store: StoredGenerations, step: int, depth: Depth, *, progress: _Progress | None = None
) -> Finding:
    """Return what a check of one generation found: the faults of all files, not the first alone."""
    directory = store.path(step)
    finding = Finding("generation", str(directory), step)
    try:
        if not storage.is_dir(directory) or not holds_format(directory):
            finding.refuse(
                ForeignFileError(f"{directory} holds no file of a generation."), directory
            )
            finding.drop_if_gone(gone=not storage.exists(directory))
            return finding
        point = store.manifest(step, from_device=True)
        digests = store.digests(point)
    except DistCkptError as error:
        finding.add(error, directory / RESUME_POINT_NAME)
        finding.drop_if_gone(gone=not storage.exists(directory))
        return finding
    finding.num_digests += 1
    try:
        store.index(point, from_device=True)
        finding.num_digests += 1
    except DistCkptError as error:
        finding.add(error, directory)
    for name, digest in digests.items():
        _check_file(finding, directory / name, digest, depth, progress)
    if finding.is_whole:
        try:
            store.check_header(point)
        except DistCkptError as error:
            finding.add(error, directory)
    if depth.is_whole and finding.is_whole and store.trusted is not None:
        _check_signed(finding, store, point)
    if depth.is_whole and finding.is_whole:
        _check_values(finding, store, point)
    finding.drop_if_gone(gone=not storage.exists(directory))
    return finding


def _check_signed(finding: Finding, store: StoredGenerations, point: ResumePoint) -> None:
    for name in point.files:
        try:
            store.check_sums(point, [name])
            finding.num_digests += 1
        except DistCkptError as error:
            finding.add(error, store.path(point.step) / name)


def _check_values(finding: Finding, store: StoredGenerations, point: ResumePoint) -> None:
    """Look for files of another rank or save that the resume point vouches for all the same."""
    # Here, since it imports torch, which looking does without.
    from dist_ckpt.resume import Reader, check_values  # noqa: PLC0415

    reader = Reader(store, point)
    for rank in range(point.world_size):
        try:
            check_values(reader, point, rank)
        except DistCkptError as error:
            finding.add(error, store.path(point.step) / state_name(rank))


def _check_file(
    finding: Finding, path: Path, digest: FileDigest, depth: Depth, progress: _Progress | None
) -> None:
    try:
        size = storage.file_size(path)
        if size != digest.size_bytes:
            raise CorruptFileError(
                f"{path} has {size:,} bytes where {digest.size_bytes:,} were written.",
                path=str(path),
                expected=digest.size_bytes,
                found=size,
            )
        pieces = [] if depth.quick else depth.pieces(digest)
        finding.num_bytes += storage.verify_file(path, digest, pieces=pieces, progress=progress)
        finding.num_digests += len(digest.pieces if pieces is None else pieces)
    except DigestMismatchError:
        _name_pieces(finding, path, digest, pieces)
    except DistCkptError as error:
        finding.add(error, path)


def _name_pieces(
    finding: Finding, path: Path, digest: FileDigest, pieces: list[int] | None
) -> None:
    """Name every bad piece: whoever wants to mend a file needs to know how much of it is lost."""
    for piece in range(len(digest.pieces)) if pieces is None else pieces:
        try:
            finding.num_bytes += storage.verify_file(path, digest, pieces=[piece])
        except DistCkptError as error:
            finding.add(error, path)
        finding.num_digests += 1


def planned_bytes(store: StoredGenerations, steps: Collection[int], depth: Depth) -> int:
    """Return about how many bytes a check will read, for a progress bar; faults are passed over."""
    if depth.quick:
        return 0
    total = 0.0
    for step in steps:
        try:
            total += store.manifest(step).num_bytes * (depth.fraction or 1)
            if depth.is_whole:
                total += storage.file_size(store.bin_path(step))
        except DistCkptError:
            continue
    return int(total)
