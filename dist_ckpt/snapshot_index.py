"""bytes ↔ ``.snapshot_metadata``, torchsnapshot's manifest: where every tensor lies. Layer 1, pure.

Each tensor is a sharded entry whose shards point at byte ranges of a generation's files, so that
``torchsnapshot.Snapshot(path).restore({"model": model})`` works at any world size. The text is
written here rather than by torchsnapshot's own classes: those take seconds for 100,000 tensors, and
importing them would import torch where only looking is wanted. A test holds these bytes against
torchsnapshot's own reader and writer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.resume_point import load_strict_json
from dist_ckpt.slices import Box, ByteRange, Placement, dtype_size

__all__ = ["IndexedTensor", "decode_name", "encode_index", "encode_name", "parse_index"]

#: The torchsnapshot release whose format this is; frozen since 2023.
TORCHSNAPSHOT_VERSION = "0.1.0"

#: Of torch's own tensors; so that arithmetic on what is read stays small.
_MAX_NUMBER = 2**63 - 1
_MAX_DIMS = 64
_LOCATION = re.compile(r"rank_\d{5,10}\.(shard|state)")


def encode_name(name: str) -> str:
    """Return ``name`` as one component of a key: ``%`` and ``/`` are escaped, nothing else."""
    return name.replace("%", "%25").replace("/", "%2F")


def decode_name(component: str) -> str:
    """Return the name that :func:`encode_name` was given."""
    return unquote(component)


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """One global tensor and the places of all its parts.

    Attributes:
        key: ``model/<name>`` or ``optimizer/<name>/<state path>``, components escaped.
        dtype: torch's name without the ``torch.`` prefix.
        shape: Global shape.
        placements: Parts that together cover the tensor, none twice.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def encode_index(tensors: Sequence[IndexedTensor], aliases: Mapping[str, str]) -> bytes:
    """Return the bytes of ``.snapshot_metadata``.

    Args:
        tensors: In the order that listings shall show.
        aliases: Further keys (tied parameters' other names) → the key in ``tensors`` with the same
            bytes.
    """
    by_key = {tensor.key: tensor for tensor in tensors}
    entries = {_flat(tensor.key): _entry(tensor) for tensor in tensors}
    entries.update({_flat(alias): _entry(by_key[key]) for alias, key in aliases.items()})
    manifest: dict[str, Any] = {f"0/{path}": entry for path, entry in _containers(entries)}
    manifest.update({f"0/{key}": entry for key, entry in entries.items()})
    body = {"version": TORCHSNAPSHOT_VERSION, "world_size": 1, "manifest": manifest}
    return json.dumps(body, allow_nan=False).encode()


def _flat(key: str) -> str:
    """Return the key of two components that stands in the file.

    Where every key has two, torchsnapshot leaves out what wasn't asked for; one longer key
    anywhere, and it fails on all moments when only the model is to be restored.
    """
    group, _, rest = key.partition("/")
    return f"{group}/{encode_name(rest)}" if "/" in rest else key


def _deep(key: str) -> str:
    """Return the key that :func:`_flat` was given."""
    group, _, rest = key.partition("/")
    return key if group == "model" else f"{group}/{decode_name(rest)}"


def _containers(keys: Iterable[str]) -> Iterable[tuple[str, Any]]:
    children: dict[str, dict[str, None]] = {}
    for key in keys:
        parts = key.split("/")
        for depth in range(1, len(parts)):
            children.setdefault("/".join(parts[:depth]), {})[decode_name(parts[depth])] = None
    for path, names in children.items():
        yield path, {"type": "dict", "keys": list(names)}


def _entry(tensor: IndexedTensor) -> dict[str, Any]:
    dtype = f"torch.{tensor.dtype}"
    return {
        "type": "ShardedTensor",
        "shards": [
            {
                "offsets": list(place.box.offsets),
                "sizes": list(place.box.sizes),
                "tensor": {
                    "type": "Tensor",
                    "location": place.location,
                    "serializer": "buffer_protocol",
                    "dtype": dtype,
                    "shape": list(place.box.sizes),
                    "replicated": False,
                    "byte_range": [place.byte_range.start, place.byte_range.stop],
                },
            }
            for place in tensor.placements
        ],
    }


def parse_index(
    data: bytes, *, path: object, file_sizes: Mapping[str, int]
) -> dict[str, IndexedTensor]:
    """Return key → tensor, every number checked against the files' sizes.

    Args:
        data: The whole file.
        path: Where it came from, for messages.
        file_sizes: name → bytes of the generation's files; no other place is believed.

    Raises:
        CorruptFileError: Structure, dtype, box, place or coverage is wrong.
    """
    body = load_strict_json(data, path=path)
    manifest = body.get("manifest")
    if not isinstance(manifest, dict):
        raise _fault(path, "it has no manifest")
    tensors: dict[str, IndexedTensor] = {}
    for full_key, entry in manifest.items():
        rank, _, key = full_key.partition("/")
        if rank != "0" or not isinstance(entry, dict):
            raise _fault(path, f"the entry {full_key!r} isn't one of ours")
        if entry.get("type") == "ShardedTensor":
            key = _deep(key)
            tensors[key] = _parse_tensor(key, entry, path, file_sizes)
        elif entry.get("type") != "dict":
            raise _fault(path, f"the entry {full_key!r} has type {entry.get('type')!r}")
    return tensors


def _parse_tensor(
    key: str, entry: dict[str, Any], path: object, file_sizes: Mapping[str, int]
) -> IndexedTensor:
    try:
        shards = entry["shards"]
        dtypes = {shard["tensor"]["dtype"] for shard in shards}
        (dtype,) = dtypes
        dtype = dtype.removeprefix("torch.")
        places = tuple(_parse_place(shard, dtype_size(dtype)) for shard in shards)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _fault(path, f"the entry {key!r} is malformed ({error!r})") from error
    num_dims = {len(place.box.offsets) for place in places}
    if len(num_dims) != 1:
        raise _fault(path, f"the parts of {key!r} differ in their number of dims")
    for place in places:
        size = file_sizes.get(place.location)
        if size is None or not _LOCATION.fullmatch(place.location):
            raise _fault(path, f"{key!r} lies in {place.location!r}, which isn't one of its files")
        if place.byte_range.stop > size:
            raise _fault(
                path,
                f"{key!r} ends at byte {place.byte_range.stop} of {place.location}, "
                f"which has {size}",
            )
    shape = tuple(
        max(place.box.offsets[dim] + place.box.sizes[dim] for place in places)
        for dim in range(num_dims.pop())
    )
    covered = sum(place.box.numel for place in places)
    if covered != math.prod(shape):
        raise _fault(path, f"the parts of {key!r} hold {covered} of {math.prod(shape)} elements")
    return IndexedTensor(key, dtype, shape, places)


def _parse_place(shard: dict[str, Any], element_bytes: int) -> Placement:
    offsets, sizes = shard["offsets"], shard["sizes"]
    start, stop = shard["tensor"]["byte_range"]
    numbers = [*offsets, *sizes, start, stop]
    if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) > _MAX_NUMBER:
        raise ValueError(
            f"offsets, sizes and byte ranges are whole numbers from 0 to {_MAX_NUMBER}"
        )
    if len(offsets) != len(sizes) or len(sizes) > _MAX_DIMS:
        raise ValueError(f"offsets and sizes differ in length, or are more than {_MAX_DIMS}")
    box = Box(tuple(offsets), tuple(sizes))
    if stop - start != box.numel * element_bytes:
        raise ValueError(f"{stop - start} bytes for {box.numel} elements of {element_bytes}")
    return Placement(str(shard["tensor"]["location"]), box, ByteRange(start, stop))


def _fault(path: object, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{path} isn't a whole index: {what}.",
        next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        path=str(path),
    )
