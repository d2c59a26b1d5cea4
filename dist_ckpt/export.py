"""The canonical ``step_N.bin``: made from a generation, read, written. Layer 5, not collective.

At world size one with float32 state the shard already is the file, so the export is another name of
it. In every other case it is put together from the shards in one pass, without ever holding more
than one piece in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from dist_ckpt import storage
from dist_ckpt.canonical import (
    CanonicalState,
    bin_size,
    encode_header,
    encode_pieces,
    parse_state,
)
from dist_ckpt.errors import CorruptFileError, DistCkptError, UsageError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import ResumePoint, shard_name
from dist_ckpt.slices import Placement, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor, encode_name
from dist_ckpt.storage import FileDigest

__all__ = ["canonical_pieces", "export_bin", "read_bin", "write_bin", "write_sum"]

_PIECE_BYTES = storage.PIECE_BYTES


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
    _write_whole(target, bin_size(state.num_params), encode_pieces(state))


def _as_float32(array: np.ndarray) -> np.ndarray:
    given = np.asarray(array)
    if not np.can_cast(given.dtype, np.float32, "safe"):
        raise UsageError(
            f"An array of dtype {given.dtype} doesn't fit into float32.",
            next_step="Convert it yourself, so that the loss of precision is your decision.",
        )
    return np.ascontiguousarray(given, dtype="<f4")


def _write_whole(target: Path, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> str:
    """Have a whole file at ``target``, durable, name and all; return its sha256."""

    def write(beside: Path) -> str:
        with storage.StreamWriter(beside, size_bytes) as writer:
            for piece in pieces:
                writer.write(piece)
        return writer.sha256 or ""

    return _put(target, write)


def _put(target: Path, make: Callable[[Path], str]) -> str:
    """Have what ``make`` makes beside ``target`` under that name, durable; return its answer.

    What is at ``target`` is replaced at once, and by something whole only.
    """
    beside = target.with_name(f".tmp-{target.name}")
    storage.unlink(beside, missing_ok=True)
    try:
        answer = make(beside)
        storage.rename(beside, target)
    except BaseException:
        storage.unlink(beside, missing_ok=True)
        raise
    storage.sync_dir(target.parent)
    return answer


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
    # The sum goes first: while it is there, it is the one of the file beside it.
    storage.unlink(sum_path, missing_ok=True)
    if point.canonical.is_shard:
        how = _put(target, lambda beside: storage.link_or_copy(shard, beside, copy=copy))
        write_sum(target)
    else:
        size = bin_size(point.canonical.num_params)
        write_sum(target, _write_whole(target, size, canonical_pieces(store, point)))
        how = "assembled"
    return how


def _is_ours(path: Path, store: StoredGenerations, point: ResumePoint, *, copy: bool) -> bool:
    """Return whether ``path`` holds this generation's canonical file, as it is wanted."""
    canonical = point.canonical
    try:
        state = read_bin(path)
        if (state.step, state.num_params) != (point.step, canonical.num_params):
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


def write_sum(path: Path, digest: str | None = None) -> str:
    """Have ``FILE.sha256`` beside a file; return the sum, computed where it isn't given."""
    found = digest or storage.sha256_file(path)
    text = f"{found}  {path.name}\n".encode()
    storage.replace_durable(path.with_name(f"{path.name}.sha256"), text)
    return found


def canonical_pieces(store: StoredGenerations, point: ResumePoint) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the canonical file in order, each piece at most 32 MiB.

    Every piece of a shard is compared with its digest as it is read. What was yielded is only valid
    until the next is asked for.

    Raises:
        UsageError: This generation can't have one; the message says why.
        CorruptFileError: The generation's bytes aren't what was written, or contradict each other.
    """
    canonical = point.canonical
    if canonical.refused is not None:
        raise UsageError(
            f"Step {point.step} has no canonical file: {canonical.refused}.",
            next_step="Its sharded generation is whole; resume from that.",
            step=point.step,
        )
    index = store.index(point)
    files = _Pieces(store.path(point.step), store.digests(point))
    stateless = set(canonical.stateless)
    yield encode_header(point.step, canonical.num_params)
    for prefix, suffix in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq")):
        for name in canonical.names:
            is_zero = bool(suffix) and name in stateless
            kind, end = ("model", "") if is_zero else (prefix, suffix)
            tensor = index.get(f"{kind}/{encode_name(name)}{end}")
            if tensor is None:
                raise _contradiction(
                    store, point, f"{name!r} has no {end or 'weight'} in the index"
                )
            yield from _zeros(tensor) if is_zero else _float32(files, tensor)


def _contradiction(store: StoredGenerations, point: ResumePoint, what: str) -> CorruptFileError:
    path = store.path(point.step)
    return CorruptFileError(
        f"{path} contradicts itself: {what}.",
        next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        path=str(path),
    )


class _Pieces:
    """A generation's files, one digested piece at a time: canonical order goes along the files."""

    def __init__(self, directory: Path, digests: Mapping[str, FileDigest]) -> None:
        self._directory = directory
        self._digests = digests
        self._buffer = np.empty(_PIECE_BYTES, np.uint8)
        self._holds: tuple[str, int] | None = None

    def read(self, place: Placement) -> Iterator[np.ndarray]:
        """Yield the bytes of a place in order, as views that the next step overwrites."""
        start, stop = place.byte_range.start, place.byte_range.stop
        while start < stop:
            first = start - start % _PIECE_BYTES
            piece = self._piece(place.location, start // _PIECE_BYTES)
            yield piece[start - first : min(stop - first, _PIECE_BYTES)]
            start = first + _PIECE_BYTES

    def _piece(self, name: str, number: int) -> np.ndarray:
        digest = self._digests[name]
        start, stop = digest.piece_range(number)
        piece = self._buffer[: stop - start]
        if self._holds != (name, number):
            self._holds = None
            segment = storage.Segment(start, piece.data, piece.nbytes)
            storage.read_segments(self._directory / name, [segment], digest, threads=1)
            self._holds = (name, number)
        return piece


def _zeros(weight: IndexedTensor) -> Iterator[bytes]:
    left = 4 * math.prod(weight.shape)
    while left > 0:
        num_bytes = min(left, _PIECE_BYTES)
        yield bytes(num_bytes)
        left -= num_bytes


def _float32(files: _Pieces, tensor: IndexedTensor) -> Iterator[memoryview]:
    """Yield a tensor's elements as float32, row-major over the global tensor."""
    for place in _in_order(tensor):
        for raw in files.read(place):
            yield _widen(raw, tensor).data.cast("B")


def _in_order(tensor: IndexedTensor) -> list[Placement]:
    """Return the parts sorted along dim 0; parts cut along another dim are a later format's."""
    places = [place for place in tensor.placements if place.box.numel]
    for place in places:
        if place.box.sizes[1:] != tensor.shape[1:]:
            raise UsageError(
                f"{tensor.key} is cut along a dim other than the first.",
                next_step="Reshard the generation to one rank, then export.",
            )
    return sorted(places, key=lambda place: place.box.offsets)


def _widen(raw: np.ndarray, tensor: IndexedTensor) -> np.ndarray:
    """Return the bytes of little-endian float32 with the values in ``raw``."""
    if tensor.dtype == "float32":
        return raw
    if raw.nbytes % dtype_size(tensor.dtype):
        raise CorruptFileError(
            f"{tensor.key} doesn't begin at a multiple of its elements' size.",
            next_step="Use another generation.",
        )
    if tensor.dtype == "float16":
        return raw.view("<f2").astype("<f4").view(np.uint8)
    if tensor.dtype == "bfloat16":
        # A bfloat16 is the upper half of the float32 with the same value.
        return (raw.view("<u2").astype("<u4") << 16).view(np.uint8)
    raise UsageError(
        f"{tensor.dtype} values don't fit into float32.", next_step="Keep the sharded generation."
    )
