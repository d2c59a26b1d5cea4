"""A generation written as files for others: canonical .bin, safetensors. Layer 6.

Each file gets its name only when it is whole and durable, and its ``.sha256`` beside it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt import storage
from dist_ckpt.canonical import bin_size
from dist_ckpt.errors import UsageError
from dist_ckpt.export import canonical_pieces, put_whole, write_sum, write_whole
from dist_ckpt.layout import plan_runs
from dist_ckpt.runs._generation import Generation
from dist_ckpt.runs._places import EXPORT_KEY
from dist_ckpt.slices import Box, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor, decode_name

__all__ = ["FORMATS", "Written", "write_export"]

FORMATS = ("bin", "safetensors")
#: What safetensors has no name for.
_NOT_IN_SAFETENSORS = ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written.

    Attributes:
        path: Where.
        format: ``"bin"`` or ``"safetensors"``.
        num_bytes: Its size.
        sha256: Also in ``FILE.sha256``.
        note: What it is good for, and what not.
    """

    path: str
    format: str
    num_bytes: int
    sha256: str
    note: str


def write_export(
    generation: Generation, path: Path, kind: str, *, weights_only: bool = False
) -> Written:
    """Have a whole, durable file at ``path``; one that is there is replaced.

    Only what is read is checked, and not all of it: verify the generation before.

    Args:
        generation: What to export.
        path: Where to; its parent exists.
        kind: ``"bin"`` (weights and moments) or ``"safetensors"``.
        weights_only: Parameters and buffers without optimizer state; safetensors only.

    Raises:
        UsageError: The generation, or this installation, can't; the message says why.
        StorageError: The file system refused.
    """
    point = generation.manifest
    if kind == "bin":
        if weights_only:
            raise UsageError(
                "A .bin holds weights and both moments; there is none of weights only.",
                next_step="Use --format safetensors --weights-only.",
            )
        size = bin_size(point.canonical.num_params)
        sha256 = write_whole(path, size, canonical_pieces(generation.store, point))
        note = "weights and Adam moments; a resume also needs data, random state and schedule"
        return Written(str(path), kind, size, write_sum(path, sha256), note)
    note = _note(weights_only=weights_only)

    def write(beside: Path) -> str:
        _write_safetensors(generation, beside, note, weights_only=weights_only)
        return storage.sha256_file(beside)

    digest = put_whole(path, write)
    return Written(str(path), kind, storage.file_size(path), write_sum(path, digest), note)


def _note(*, weights_only: bool) -> str:
    # Case 20: whoever finds the file later must not take it for a resume point.
    if weights_only:
        return "weights for inference; can't be resumed"
    return "weights and optimizer tensors; can't be resumed: no data, random state or schedule"


def _write_safetensors(
    generation: Generation, path: Path, note: str, *, weights_only: bool
) -> None:
    library = _library()
    tensors, ties = _chosen(generation.tensors, weights_only=weights_only)
    sizes = {name: dtype_size(t.dtype) * int(np.prod(t.shape)) for name, t in tensors.items()}
    storage.check_space(path.parent, sum(sizes.values()) + (1 << 20))
    metadata = {**ties, "format": "pt", EXPORT_KEY: note}
    metadata |= {"step": str(generation.step), "run": generation.manifest.run}
    source = _Source(generation.path)
    specs, alive = {}, []
    for name, tensor in tensors.items():
        data = source.bytes_of(tensor)
        alive.append(data)
        specs[name] = _spec(library, tensor, data)
    # Made here, so that nobody else can read it, and synced here: the library does neither.
    file = storage.AppendFile(path, mode=0o600)
    try:
        library.serialize_file(specs, str(path), metadata)
        file.sync()
    finally:
        file.close()


def _library() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        raise UsageError(
            "Writing safetensors needs the safetensors package, which isn't installed.",
            next_step="Install it (pip install safetensors), or use --format bin.",
        ) from None


def _spec(library: Any, tensor: IndexedTensor, data: Any) -> Any:
    shape = list(tensor.shape)
    if not hasattr(library, "TensorSpec"):  # before 0.8 it took copies only
        return {"dtype": tensor.dtype, "shape": shape, "data": data.tobytes()}
    return library.TensorSpec(
        dtype=tensor.dtype, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes
    )


def _chosen(
    index: Mapping[str, IndexedTensor], *, weights_only: bool
) -> tuple[dict[str, IndexedTensor], dict[str, str]]:
    """Return name → tensor, tied ones once, and other name → kept name of the ties."""
    chosen: dict[str, IndexedTensor] = {}
    ties: dict[str, str] = {}
    kept: dict[Any, str] = {}
    for key, tensor in index.items():
        kind, _, rest = key.partition("/")
        if weights_only and kind != "model":
            continue
        name = decode_name(rest) if kind == "model" else key
        if tensor.dtype in _NOT_IN_SAFETENSORS:
            raise UsageError(
                f"{name} is {tensor.dtype}, which safetensors doesn't know.",
                next_step="Export another format.",
                tensor=name,
            )
        place = (tensor.dtype, tensor.placements)
        if kind == "model" and place in kept and any(p.box.numel for p in tensor.placements):
            ties[name] = kept[place]
            continue
        kept[place] = name
        chosen[name] = tensor
    return chosen, ties


class _Source:
    """Bytes of tensors, mapped where they lie in one piece and put together where they don't."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}

    def bytes_of(self, tensor: IndexedTensor) -> Any:
        if len(tensor.placements) == 1:
            place = tensor.placements[0]
            return self._map(place.location)[place.byte_range.start : place.byte_range.stop]
        element_bytes = dtype_size(tensor.dtype)
        whole = Box.whole(tensor.shape)
        fresh = np.empty(whole.numel * element_bytes, np.uint8)
        for place in tensor.placements:
            raw = self._map(place.location)[place.byte_range.start : place.byte_range.stop]
            for run in plan_runs(place.box, whole):
                start, count = run.source * element_bytes, run.count * element_bytes
                at = run.target * element_bytes
                fresh[at : at + count] = raw[start : start + count]
        return fresh

    def _map(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = storage.map_file(self._directory / name)
        return self._files[name]
