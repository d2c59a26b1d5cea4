"""A canonical file compared with its sum and its generation. Layer 6, reads only; any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    DistCkptError,
    ForeignFileError,
)
from dist_ckpt.export import canonical_pieces, read_header, read_sum
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.provenance import TrustedKeys
from dist_ckpt.resume_point import ResumePoint, shard_name
from dist_ckpt.runs._findings import Depth, Finding

__all__ = ["Origin", "check_bin", "find_origin"]

#: Where the generation of a .bin lies, and its resume point.
Origin = tuple[StoredGenerations, ResumePoint]


def find_origin(path: Path, trusted: TrustedKeys | None = None) -> Origin | None:
    """Return the generation that a .bin in a run directory was made from, None without one.

    Where keys are trusted: one that they have signed, all of it.
    """
    store = StoredGenerations(path.parent)
    store.trusted = trusted
    try:
        point = store.manifest(read_header(path)[0])
        if trusted is not None:
            store.check_sums(point)
        return store, point
    except DistCkptError:
        return None


def check_bin(
    path: Path,
    depth: Depth,
    *,
    origin: Origin | None = None,
    progress: Callable[[int], None] | None = None,
) -> Finding:
    """Return what a check found: header, length, its sum, and its generation's bytes.

    Args:
        path: The file.
        depth: How much is read; a sum needs all bytes, so a sample leaves it out.
        origin: Its generation, None where there is none to compare with.
        progress: Told the bytes read since the last call.
    """
    finding = Finding("bin", str(path), None)
    try:
        header = read_header(path)
        finding.step = header[0]
        _check_header(finding, path, header, origin)
        wanted = read_sum(path)
        if wanted is None:
            finding.notes.append("no .sha256 beside it")
        if depth.is_whole:
            _check_bytes(finding, path, wanted, origin)
            if progress is not None:
                progress(storage.file_size(path))
        else:
            finding.notes.append("header and length only")
    except ForeignFileError as error:
        finding.refuse(error, path)
    except DistCkptError as error:
        finding.add(error, path)
    finding.drop_if_gone(gone=not storage.exists(path))
    return finding


def _check_header(
    finding: Finding, path: Path, found: tuple[int, int], origin: Origin | None
) -> None:
    step, num_params = found
    if origin is not None:
        _require_same("step", path, origin[1].step, step)
        _require_same("a number of parameters of", path, origin[1].canonical.num_params, num_params)
    elif parse_step_name(path.name) not in (None, step):
        finding.notes.append(f"its header says step {step}, which counts, whatever its name is")


def _require_same(what: str, path: Path, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptFileError(
            f"{path} has {what} {found}; its generation has {expected}.",
            path=str(path),
            expected=expected,
            found=found,
        )


def _check_bytes(finding: Finding, path: Path, wanted: str | None, origin: Origin | None) -> None:
    is_signed = origin is not None and origin[0].trusted is not None
    if origin is not None and (
        origin[1].canonical.refused is not None or (_is_shard(path, origin) and not is_signed)
    ):
        origin = None  # a shard's own bytes are compared as the shard's
        if wanted is None:
            return
    if wanted is None and origin is None:
        finding.notes.append("header and length only: nothing to compare its bytes with")
        return
    found = storage.sha256_file(path)
    finding.num_bytes += storage.file_size(path)
    if wanted is not None:
        finding.num_digests += 1
        _require_sum(path, f"its sum in {path.name}.sha256", wanted, found)
    if origin is not None:
        finding.num_digests += 1
        sum_ = hashlib.sha256()
        for piece in canonical_pieces(*origin):
            sum_.update(piece)
        _require_sum(path, "that of its generation's bytes", sum_.hexdigest(), found)


def _require_sum(path: Path, what: str, expected: str, found: str) -> None:
    if expected != found:
        raise DigestMismatchError(
            f"{path} has SHA-256 {found}, {what} is {expected}.",
            path=str(path),
            expected=expected,
            found=found,
        )


def _is_shard(path: Path, origin: Origin) -> bool:
    store, point = origin
    if not point.canonical.is_shard:
        return False
    try:
        shard = storage.lstat(store.path(point.step) / shard_name(0))
    except DistCkptError:
        return False
    own = storage.lstat(path)
    return (own.st_dev, own.st_ino) == (shard.st_dev, shard.st_ino)
