"""bytes ↔ one resume point, with every check that the bytes alone allow. Layer 1, pure."""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

from dist_ckpt.errors import CorruptFileError, DigestMismatchError, FormatVersionError
from dist_ckpt.resume_point._point import (
    FORMAT,
    INDEX_NAME,
    VERSION,
    Canonical,
    ResumePoint,
    shard_name,
    state_name,
)
from dist_ckpt.resume_point._strict_json import load_strict_json

__all__ = ["encode_resume_point", "parse_resume_point"]

#: No count, size or step is larger; arithmetic on what is read stays small.
_MAX_NUMBER = 2**63 - 1
_FILE_NAME = re.compile(r"rank_\d{5,10}\.(shard|state)")
_TAIL = re.compile(rb'"digest": "xxh3_128:([0-9a-f]{32})"\n}\n\Z')


def encode_resume_point(point: ResumePoint) -> bytes:
    """Return the bytes of ``resume_point.json``, its own digest included."""
    canonical = point.canonical
    body = {
        "format": FORMAT,
        "version": VERSION,
        "run": point.run,
        "step": point.step,
        "id": point.id,
        "parent": point.parent,
        "attempt": point.attempt,
        "time": point.time,
        "reasons": list(point.reasons),
        "world_size": point.world_size,
        "files": point.files,
        "index": point.index,
        "canonical": {
            "names": list(canonical.names),
            "num_params": canonical.num_params,
            "is_shard": canonical.is_shard,
            "refused": canonical.refused,
            "stateless": list(canonical.stateless),
        },
        "identity": point.identity,
        "shared": point.shared,
        "notes": point.notes,
    }
    text = json.dumps(body, allow_nan=False, indent=1)
    head = (text[: text.rindex("\n}")] + ',\n "digest": "xxh3_128:').encode()
    return head + _own_digest(head, b'"\n}\n').encode() + b'"\n}\n'


def parse_resume_point(data: bytes, *, path: object) -> ResumePoint:
    """Return what ``data`` says, after every check that the bytes alone allow.

    Args:
        data: The whole file.
        path: Where it came from, for messages.

    Raises:
        CorruptFileError: Not the format: structure, types, names, numbers.
        DigestMismatchError: The file's digest of itself doesn't match.
        FormatVersionError: A later format version.
    """
    body = load_strict_json(data, path=path)
    check = _Checker(body, path)
    if body.get("format") != FORMAT:
        raise CorruptFileError(
            f"{path} isn't a resume point: format is {body.get('format')!r}, not {FORMAT!r}.",
            next_step="Point at a generation that dist_ckpt wrote.",
            path=str(path),
        )
    tail = _TAIL.search(data)
    # The digest first: a flipped bit in the version's number is no later version.
    if tail is not None:
        _require_own_digest(data, tail, path)
    if body.get("version") != VERSION:
        raise FormatVersionError(
            f"{path} has format version {body.get('version')!r}; this dist_ckpt reads {VERSION}.",
            next_step="Use the dist_ckpt version that wrote it, or a newer one.",
            path=str(path),
            expected=VERSION,
            found=body.get("version"),
        )
    if tail is None:
        raise check.fault("it doesn't end with its own digest")
    return _build(check)


def _require_own_digest(data: bytes, tail: re.Match[bytes], path: object) -> None:
    found = _own_digest(data[: tail.start(1)], data[tail.end(1) :])
    if found.encode() != tail.group(1):
        raise DigestMismatchError(
            f"{path} was changed after it was written: its bytes have digest {found}, "
            f"it says {tail.group(1).decode()}.",
            next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
            path=str(path),
            expected=tail.group(1).decode(),
            found=found,
        )


def _build(check: _Checker) -> ResumePoint:
    canonical = _Checker(check.get("canonical", dict), check.path)
    files = check.get("files", dict)
    world_size = check.number("world_size", least=1)
    for name, record in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise check.fault(f"the file name {name!r} isn't one of a generation")
        _check_record(check, name, record, "whole")
    # Counted before the names are made: a number of ranks costs memory only where files are listed.
    if len(files) != 2 * world_size or set(files) != _names_of(world_size):
        found = f"{len(files)} files where {world_size} ranks wrote {2 * world_size}"
        raise check.fault(f"it lists {found}")
    index = check.get("index", dict)
    _check_record(check, INDEX_NAME, index, "digest")
    parent = check.body.get("parent")
    if parent is not None and not isinstance(parent, dict):
        raise check.fault("parent must be an object or null")
    refused = canonical.body.get("refused")
    return ResumePoint(
        run=check.get("run", str),
        step=check.number("step", least=0),
        id=check.get("id", str),
        parent=parent,
        attempt=check.number("attempt", least=0),
        time=check.seconds("time"),
        reasons=check.strings("reasons"),
        world_size=world_size,
        files=files,
        index=index,
        canonical=Canonical(
            names=canonical.strings("names"),
            num_params=canonical.number("num_params", least=0),
            is_shard=canonical.get("is_shard", bool),
            refused=None if refused is None else canonical.get("refused", str),
            stateless=canonical.strings("stateless"),
        ),
        identity=check.get("identity", dict),
        shared=check.body.get("shared"),
        notes=check.get("notes", dict),
    )


def _names_of(world_size: int) -> set[str]:
    return {name(rank) for rank in range(world_size) for name in (shard_name, state_name)}


class _Checker:
    """Reads typed fields of one JSON object, with an error that names file and field."""

    def __init__(self, body: dict[str, Any], path: object) -> None:
        self.body = body
        self.path = path

    def fault(self, what: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} isn't a whole resume point: {what}.",
            next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
            path=str(self.path),
        )

    def get(self, key: str, kind: Any) -> Any:
        value = self.body.get(key)
        # bool is an int to Python, but never where a number is meant here.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(f"{key!r} is missing or of the wrong type")
        return value

    def number(self, key: str, *, least: int) -> int:
        value: int = self.get(key, int)
        if not least <= value <= _MAX_NUMBER:
            raise self.fault(f"{key!r} is {value}, not from {least} to {_MAX_NUMBER}")
        return value

    def seconds(self, key: str) -> float:
        value = self.get(key, int | float)
        if abs(value) > _MAX_NUMBER:
            raise self.fault(f"{key!r} is {value}")
        return float(value)

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.fault(f"{key!r} must be a list of texts")
        return tuple(values)


def _check_record(check: _Checker, name: str, record: Any, digest_key: str) -> None:
    size = record.get("size_bytes") if isinstance(record, dict) else None
    digest = record.get(digest_key) if isinstance(record, dict) else None
    if type(size) is not int or not 0 <= size <= _MAX_NUMBER or not isinstance(digest, str):
        raise check.fault(f"the entry of {name!r} lacks its size or digest")


def _own_digest(before: bytes, after: bytes) -> str:
    digest = xxhash.xxh3_128(before)
    digest.update(after)
    return str(digest.hexdigest())
