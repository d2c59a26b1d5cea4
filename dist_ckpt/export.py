"""The canonical ``step_N.bin``: made from a generation, read, written. Layer 5, not collective.

At world size one with float32 state the shard already is the file, so the export is another name of
it. In every other case it is put together from the shards in one pass, without ever holding more
than one piece in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume_point import ResumePoint, shard_name
from dist_ckpt.slices import Placement, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor, encode_name

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
    beside = target.with_name(f".tmp-{target.name}")
    storage.unlink(beside, missing_ok=True)
    with storage.StreamWriter(beside, size_bytes) as writer:
        for piece in pieces:
            writer.write(piece)
    storage.rename(beside, target)
    storage.sync_dir(target.parent)
    return writer.sha256 or ""


def export_bin(store: GenerationStore, point: ResumePoint, *, copy: bool = False) -> str:
    """Have ``step_N.bin`` of a generation; return how: link, reflink, copy, assembled, there.

    Its sum lies beside it once this returns, as ``sha256sum -c`` reads it.

    Args:
        store: The run's generations.
        point: The checked resume point.
        copy: Make it a file of its own even where a link would do.

    Raises:
        UsageError: This generation can't have one; the message says why.
    """
    target = store.bin_path(point.step)
    sum_path = target.with_name(f"{target.name}.sha256")
    digest = None
    if storage.exists(target) and _is_whole(target, point):
        how = "there"
        if storage.exists(sum_path):
            return how
    else:
        storage.unlink(target, missing_ok=True)
        storage.unlink(sum_path, missing_ok=True)
        if point.canonical.is_shard:
            how = storage.link_or_copy(store.path(point.step) / shard_name(0), target, copy=copy)
            storage.sync_dir(store.run_dir)
        else:
            size = bin_size(point.canonical.num_params)
            digest = _write_whole(target, size, canonical_pieces(store, point))
            how = "assembled"
    write_sum(target, digest)
    return how


def _is_whole(path: Path, point: ResumePoint) -> bool:
    try:
        state = read_bin(path)
    except CorruptFileError:
        return False
    return (state.step, state.num_params) == (point.step, point.canonical.num_params)


def write_sum(path: Path, digest: str | None = None) -> str:
    """Have ``FILE.sha256`` beside a file; return the sum, computed where it isn't given."""
    found = digest or storage.sha256_file(path)
    text = f"{found}  {path.name}\n".encode()
    storage.replace_durable(path.with_name(f"{path.name}.sha256"), text)
    return found


def canonical_pieces(store: GenerationStore, point: ResumePoint) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the canonical file in order, each piece at most 16 MiB.

    Raises:
        UsageError: This generation can't have one; the message says why.
    """
    canonical = point.canonical
    if canonical.refused is not None:
        raise UsageError(
            f"Step {point.step} has no canonical file: {canonical.refused}.",
            next_step="Its sharded generation is whole; resume from that.",
            step=point.step,
        )
    index = store.index(point)
    directory = store.path(point.step)
    stateless = set(canonical.stateless)
    yield encode_header(point.step, canonical.num_params)
    for prefix, suffix in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq")):
        for name in canonical.names:
            if suffix and name in stateless:
                yield from _zeros(index[f"model/{encode_name(name)}"])
            else:
                tensor = index[f"{prefix}/{encode_name(name)}{suffix}"]
                yield from _float32(directory, tensor)


def _zeros(weight: IndexedTensor) -> Iterator[bytes]:
    left = 4 * sum(place.box.numel for place in weight.placements)
    while left > 0:
        num_bytes = min(left, _PIECE_BYTES)
        yield bytes(num_bytes)
        left -= num_bytes


def _float32(directory: Path, tensor: IndexedTensor) -> Iterator[memoryview]:
    """Yield a tensor's elements as float32, row-major over the global tensor."""
    for place in _in_order(tensor):
        element_bytes = dtype_size(tensor.dtype)
        count = _PIECE_BYTES // 4
        for start in range(0, place.box.numel, count):
            num = min(count, place.box.numel - start)
            raw = np.empty(num * element_bytes, np.uint8)
            offset = place.byte_range.start + start * element_bytes
            segment = storage.Segment(offset, raw.data, raw.size)
            storage.read_segments(directory / place.location, [segment], None, threads=1)
            yield _widen(raw, tensor.dtype).data.cast("B")


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


def _widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return raw.view("<f4")
    if dtype == "float16":
        return raw.view("<f2").astype("<f4")
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of the float32 with the same value.
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    raise UsageError(
        f"{dtype} values don't fit into float32.", next_step="Keep the sharded generation."
    )
