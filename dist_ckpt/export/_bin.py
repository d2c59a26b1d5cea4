"""The canonical ``step_N.bin``: made of a generation, read, written. Layer 5, not collective.

At world size one with float32 state the shard already is the file, so the export is another name of
it. In every other case it is put together from the shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from dist_ckpt import storage
from dist_ckpt.canonical import (
    HEADER_BYTES,
    CanonicalState,
    bin_size,
    encode_pieces,
    parse_header,
    parse_state,
)
from dist_ckpt.errors import DistCkptError, UsageError
from dist_ckpt.export._assemble import canonical_pieces
from dist_ckpt.export._put import put_whole
from dist_ckpt.export._sum import write_sum
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import ResumePoint, shard_name

#: Of a file that is being put together: what is on its way to the device and to its sum.
_BUFFERS = 4
_BUFFER_BYTES = 4 << 20

__all__ = [
    "export_bin",
    "read_bin",
    "read_header",
    "write_bin",
    "write_sum",
    "write_whole",
]


def read_bin(path: str | os.PathLike[str]) -> CanonicalState:
    """Return the step and the three arrays of a canonical file, memory-mapped and read-only.

    Args:
        path: A ``step_N.bin``; its name is not believed, its header is.

    Returns:
        ``weights``, ``m`` and ``v`` as float32 arrays of shape ``(n_params,)``.

    Raises:
        NotFoundError: No such file.
        CorruptFileError: The header or the length is wrong; found before anything is allocated.
    """
    return parse_state(storage.map_file(Path(path)), path=path)


def read_header(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return step and number of parameters of a canonical file; its length fits them.

    Nothing is mapped, so a page that the device can't read is an error and not the process's end.

    Raises:
        NotFoundError: No such file.
        CorruptFileError: The header or the length is wrong.
        StorageError: The system refused.
    """
    head, size = storage.read_head(Path(path), HEADER_BYTES)
    return parse_header(head, file_size=size, path=path)


def write_bin(
    path: str | os.PathLike[str], step: int, weights: np.ndarray, m: np.ndarray, v: np.ndarray
) -> None:
    """Have a whole, durable canonical file at ``path``; only a whole one replaces what is there.

    Args:
        path: Where to.
        step: Finished updates, 0 … 2³¹ - 1.
        weights: ``(n_params,)``, float32 or narrower floats, which are widened.
        m: First moments, the same shape.
        v: Second moments, the same shape.

    Raises:
        UsageError: Shapes differ, or a dtype that float32 can't hold.
        SettingError: A number doesn't fit the header.
    """
    state = CanonicalState(step, *(_as_float32(array) for array in (weights, m, v)))
    target = Path(path)
    write_whole(target, bin_size(state.num_params), encode_pieces(state))


def _as_float32(array: np.ndarray) -> np.ndarray:
    given = np.asarray(array)
    if not np.can_cast(given.dtype, np.float32, "safe"):
        raise UsageError(
            f"An array of dtype {given.dtype} doesn't fit into float32.",
            next_step="Convert it yourself, so that the loss of precision is your decision.",
        )
    return np.ascontiguousarray(given, dtype="<f4")


def write_whole(target: Path, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> str:
    """Have a whole file at ``target``, durable, name and all; return its sha256.

    What is there is replaced at once, and by something whole only.

    Args:
        target: Where to; its parent exists.
        size_bytes: Of all pieces together.
        pieces: In order; each is used up before the next is asked for.

    Raises:
        UsageError: The pieces are more or less than that.
        NoSpaceError, StorageError: The file system refused.
    """

    def write(beside: Path) -> str:
        storage.check_space(target.parent, size_bytes)
        at = 0
        with (
            closing(storage.Buffers(_BUFFERS, _BUFFERS * _BUFFER_BYTES)) as buffers,
            ThreadPoolExecutor(_BUFFERS - 2, "dist-ckpt-write") as pool,
            ThreadPoolExecutor(1, "dist-ckpt-sum") as hasher,
            storage.ForwardWriter(beside, size_bytes, buffers, pool, hasher=hasher) as writer,
        ):
            for piece in pieces:
                data = np.frombuffer(piece, np.uint8)
                writer.write(at, data)
                at += data.nbytes
            if at != size_bytes:
                raise UsageError(
                    f"{target} was to get {size_bytes:,} bytes, not {at:,}.",
                    next_step="Give the right size.",
                    path=str(target),
                    expected=size_bytes,
                    found=at,
                )
        return writer.sha256 or ""

    return put_whole(target, write)


def export_bin(store: StoredGenerations, point: ResumePoint, *, copy: bool = False) -> str:
    """Have ``step_N.bin`` of a generation; return how: link, reflink, copy, assembled, there.

    Its sum lies beside it once this returns, as ``sha256sum -c`` reads it. A file that is there and
    isn't this generation's is replaced; of one that was assembled, header, length and the presence
    of its sum are believed.

    Args:
        store: The run's generations.
        point: The checked resume point.
        copy: Make it a file of its own even where a link would do.

    Raises:
        UsageError: This generation can't have one; the message says why.
        CorruptFileError: The generation's bytes aren't what was written.
        StorageError: The file system refused.
    """
    target = store.bin_path(point.step)
    sum_path = target.with_name(f"{target.name}.sha256")
    shard = store.path(point.step) / shard_name(0)
    if storage.exists(target) and _is_ours(target, store, point, copy=copy):
        if not storage.exists(sum_path):
            write_sum(target)
        return "there"
    # The sum goes first, for good: while it is there, it is the one of the file beside it.
    if storage.exists(sum_path):
        storage.unlink(sum_path)
        storage.sync_dir(sum_path.parent)
    if point.canonical.is_shard:
        how: str = put_whole(target, lambda beside: storage.link_or_copy(shard, beside, copy=copy))
        write_sum(target)
    else:
        size = bin_size(point.canonical.num_params)
        write_sum(target, write_whole(target, size, canonical_pieces(store, point)))
        how = "assembled"
    return how


def _is_ours(path: Path, store: StoredGenerations, point: ResumePoint, *, copy: bool) -> bool:
    """Return whether ``path`` holds this generation's canonical file, as it is wanted."""
    canonical = point.canonical
    try:
        if read_header(path) != (point.step, canonical.num_params):
            return False
        if not canonical.is_shard:
            return storage.exists(path.with_name(f"{path.name}.sha256"))
        own, shard = (storage.lstat(p) for p in (path, store.path(point.step) / shard_name(0)))
        is_link = (own.st_dev, own.st_ino) == (shard.st_dev, shard.st_ino)
        if is_link or not copy:
            return is_link and not copy
        storage.verify_file(path, store.digests(point)[shard_name(0)])
    except DistCkptError:
        return False
    return True
