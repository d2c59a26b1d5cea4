"""What a list of generations shows, read fast: thousands in half a second. Layer 6."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, NotFoundError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume_point import INDEX_NAME, VERIFIED_NAME

__all__ = ["Row", "list_rows"]

_VERIFIED_LIMIT_BYTES = 1 << 16
#: What a listing needs stands before this key; the rest may be a hundred times as long.
_REST = b',\n "index": '
_NEXT = b',\n "'
#: So many files' sizes are compared, the newest generations' first; the newest's always.
_MAX_SIZES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One generation in a list.

    Attributes:
        step: Finished updates.
        time: When it was committed (seconds since the epoch).
        reasons: Why it was written.
        world_size: Ranks that wrote it.
        num_bytes: Bytes of all ranks' files.
        verified_at: When it was read back whole; None: not yet.
        pinned: Why it is pinned; None: it isn't.
        proven: What a real resume from it has proven it by; None: none has.
        fault: Why it can't be used, as far as its manifest and its files' sizes tell.
        sizes_compared: Its files' sizes were; not of the oldest ones where there are too many.
    """

    step: int
    time: float | None
    reasons: tuple[str, ...]
    world_size: int | None
    num_bytes: int | None
    verified_at: float | None
    pinned: str | None
    proven: str | None = None
    fault: str | None = None
    sizes_compared: bool = False


class Head(NamedTuple):
    """What the beginning of a manifest says; ``sizes`` holds each file's, the index's too."""

    step: int
    time: float
    reasons: tuple[str, ...]
    world_size: int
    num_bytes: int
    sizes: Mapping[str, int]


def list_rows(store: StoredGenerations, proven: Mapping[int, str] | None = None) -> list[Row]:
    """Return a row for each generation, ascending by step; one retired meanwhile is left out.

    Manifests that were verified as they are now are read in part, others are checked whole. Files
    are only asked for their sizes: `verify` reads them.

    Args:
        store: The generations.
        proven: What `Run.proven` returns.

    Raises:
        CorruptFileError: The file of pins isn't whole.
    """
    pins, proven = store.pins(), proven or {}
    rows = []
    left = _MAX_SIZES
    for step in reversed(store.steps()):
        try:
            data = store.manifest_bytes(step)
            verified_at = _verified_at(store, step, data)
            head = _head(store, step, None if verified_at is None else data)
            is_compared = left == _MAX_SIZES or len(head.sizes) <= left
            left -= len(head.sizes)
            fault = _wrong_size(f"{store.path(step)}", head.sizes) if is_compared else None
        except DistCkptError as error:
            if not isinstance(error, NotFoundError) or storage.exists(store.path(step)):
                rows.append(_faulty(step, pins.get(step), str(error)))
            continue
        if fault is not None and not storage.exists(store.path(step)):
            continue
        pinned, proof = pins.get(step), proven.get(step)
        rows.append(Row(*head[:5], verified_at, pinned, proof, fault, is_compared))
    return rows[::-1]


def _head(store: StoredGenerations, step: int, whole: bytes | None) -> Head:
    """Return what a manifest says; from its beginning where the bytes are known to be whole."""
    head = None if whole is None else parse_head(whole)
    if head is not None and head.step == step:
        return head
    point = store.manifest(step)
    sizes = {name: int(record["size_bytes"]) for name, record in point.files.items()}
    sizes[INDEX_NAME] = int(point.index["size_bytes"])
    return Head(step, point.time, point.reasons, point.world_size, point.num_bytes, sizes)


def _wrong_size(directory: str, sizes: Mapping[str, int]) -> str | None:
    """Return which file is missing or has another size than was written; None where none has."""
    lstat = storage.get_ops().lstat  # `storage.lstat` would take three times as long
    for name, expected in sizes.items():
        path = f"{directory}/{name}"
        try:
            status = lstat(path)
        except FileNotFoundError:
            return f"{path} is missing."
        except OSError as error:
            return f"{path} can't be looked at: {error.strerror}."
        if not stat.S_ISREG(status.st_mode):
            return f"{path} isn't a file."
        if status.st_size != expected:
            return f"{path} has {status.st_size:,} bytes where {expected:,} were written."
    return None


def _faulty(step: int, pinned: str | None, fault: str) -> Row:
    return Row(step, None, (), None, None, None, pinned, fault=fault)


def _verified_at(store: StoredGenerations, step: int, manifest: bytes) -> float | None:
    # As StoredGenerations.verified_at, without reading the manifest a second time.
    try:
        path = f"{store.path(step)}/{VERIFIED_NAME}"
        data = storage.read_file(path, limit_bytes=_VERIFIED_LIMIT_BYTES)
        body = json.loads(data)
        if body["resume_point"] != storage.digest_bytes(manifest):
            return None
        return float(body["time"])
    except (DistCkptError, ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_head(data: bytes) -> Head | None:
    """Return what the beginning of a manifest says.

    None where it isn't laid out as `encode_resume_point` does: then it has to be read whole. Only
    for bytes that are known to be whole: nothing is checked against the rest of the file.
    """
    end = data.find(_REST)
    if end < 0:
        return None
    try:
        body: dict[str, Any] = json.loads(data[:end] + b"}")
        index = json.loads(data[end + len(_REST) : data.index(_NEXT, end + len(_REST))])
        sizes = {name: int(record["size_bytes"]) for name, record in body["files"].items()}
        num_bytes = sum(sizes.values())
        sizes[INDEX_NAME] = int(index["size_bytes"])
        reasons, world_size = tuple(map(str, body["reasons"])), int(body["world_size"])
        return Head(int(body["step"]), float(body["time"]), reasons, world_size, num_bytes, sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
