"""The tail of a rank's ``.state`` file: tagged JSON behind the tensors, then its length. Pure.

    tensors at multiples of 64 bytes │ JSON, UTF-8 │ length of the JSON, uint64 little-endian

The JSON holds what only this rank has (RNG, its part of the data's and the user's state) and says
at which offset each of this rank's own tensors lies; docs/format.md has every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt.errors import CorruptFileError, FormatVersionError
from dist_ckpt.resume_point import load_strict_json
from dist_ckpt.slices import ByteRange, dtype_size

__all__ = ["TAIL_BYTES", "OwnTensor", "StateTail", "encode_tail", "parse_tail", "tail_start"]

FORMAT = "dist_ckpt.state"
VERSION = 1
#: The length behind the JSON.
TAIL_BYTES = 8
#: Of torch's own tensors; so that arithmetic on what is read stays small.
_MAX_NUMBER = 2**63 - 1
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A tensor of this rank alone: a buffer, or one inside the user's state."""

    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_range(self) -> ByteRange:
        """Its bytes in the file."""
        num_bytes = dtype_size(self.dtype)
        for size in self.shape:
            num_bytes *= size
        return ByteRange(self.start, self.start + num_bytes)


@dataclass(frozen=True, slots=True)
class StateTail:
    """What the JSON of a ``.state`` file says.

    Attributes:
        rank: Who wrote it.
        step: Of which step; must equal the resume point's.
        id: Of which save; must equal the resume point's.
        buffers: key → place of this rank's own buffers.
        values: Tagged JSON of this rank's values; refers to ``tensors`` by number.
        shared: Tagged JSON of the values meant to be the same on every rank, as this rank had them.
        tensors: Tensors inside ``values``, by number.
    """

    rank: int
    step: int
    id: str
    buffers: Mapping[str, OwnTensor]
    values: Any
    shared: Any
    tensors: tuple[OwnTensor, ...]


def encode_tail(tail: StateTail) -> bytes:
    """Return the JSON and its length, as they stand at the end of the file."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "rank": tail.rank,
        "step": tail.step,
        "id": tail.id,
        "buffers": {key: [t.start, t.dtype, list(t.shape)] for key, t in tail.buffers.items()},
        "tensors": [[t.start, t.dtype, list(t.shape)] for t in tail.tensors],
        "values": tail.values,
        "shared": tail.shared,
    }
    text = json.dumps(body, allow_nan=False).encode()
    return text + len(text).to_bytes(TAIL_BYTES, "little")


def tail_start(last: bytes, *, file_size: int, path: object) -> int:
    """Return where the JSON starts, from the file's last 8 bytes."""
    num_bytes = int.from_bytes(last, "little")
    if len(last) != TAIL_BYTES or num_bytes > file_size - TAIL_BYTES:
        raise _fault(path, f"it says that {num_bytes} of its {file_size} bytes are JSON")
    return file_size - TAIL_BYTES - num_bytes


def parse_tail(data: bytes, *, limit: int, path: object) -> StateTail:
    """Return what the JSON says.

    Args:
        data: The JSON alone.
        limit: Where the JSON starts in the file; no tensor may reach behind it.
        path: For messages.

    Raises:
        CorruptFileError: Not the format.
        FormatVersionError: A later version of it.
    """
    body = load_strict_json(data, path=path)
    if body.get("format") != FORMAT:
        raise _fault(path, f"its format is {body.get('format')!r}")
    if body.get("version") != VERSION:
        raise FormatVersionError(
            f"{path} has format version {body.get('version')!r}; this dist_ckpt reads {VERSION}.",
            next_step="Use the dist_ckpt version that wrote it, or a newer one.",
            path=str(path),
            expected=VERSION,
            found=body.get("version"),
        )
    try:
        tail = StateTail(
            rank=_whole(body["rank"]),
            step=_whole(body["step"]),
            id=str(body["id"]),
            buffers={key: _own(row) for key, row in body["buffers"].items()},
            values=body["values"],
            shared=body["shared"],
            tensors=tuple(_own(row) for row in body["tensors"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _fault(path, f"its JSON is malformed ({error!r})") from error
    for own in (*tail.buffers.values(), *tail.tensors):
        if own.byte_range.stop > limit:
            raise _fault(path, f"a tensor ends at byte {own.byte_range.stop}, behind {limit}")
    # Each has bytes of its own, so that whoever makes room for them needs no more than the file.
    if sum(own.byte_range.num_bytes for own in tail.tensors) > limit:
        raise _fault(path, f"its tensors overlap within {limit} bytes")
    return tail


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{value!r} isn't a whole number from 0 to {_MAX_NUMBER}")
    return value


def _own(row: Any) -> OwnTensor:
    start, dtype, shape = row
    dtype_size(dtype)
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dims")
    return OwnTensor(_whole(start), dtype, tuple(_whole(size) for size in shape))


def _fault(path: object, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{path} isn't a whole state file: {what}.",
        next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        path=str(path),
    )
