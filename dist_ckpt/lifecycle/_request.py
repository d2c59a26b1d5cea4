"""``RUN/request.json``: a pivot that was asked for and isn't done yet. Layer 5, I/O by storage.

A signal carries no payload, so that what is wanted is written first: when, and then what. The file
is also the memory of a pivot under way: it goes when the journal has the pivot, not before.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, NotFoundError
from dist_ckpt.history import strict_loads

__all__ = [
    "REQUEST_FILE",
    "Begun",
    "PivotRequest",
    "begin_request",
    "new_request",
    "read_request",
    "remove_request",
    "write_request",
]

REQUEST_FILE: Final = "request.json"
_LIMIT_BYTES: Final = 1 << 24
_ARCHIVE: Final = re.compile(r"pivot_[0-9]{1,20}(-[0-9]{1,10})?")
_MAX_STEP: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Begun:
    """What was decided before the first file moved, so that going on later does the same.

    Attributes:
        step: The resume point that the run goes on from; 0 without one.
        archive: Name of the directory in ``archive/``.
        before: The settings until now, None without.
    """

    step: int
    archive: str
    before: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PivotRequest:
    """One pivot that is wanted.

    Attributes:
        id: Random name of this pivot.
        policy: The new settings; None leaves those that there are.
        time: When it was asked for; for people.
        begun: Set once it is being carried out.
    """

    id: str
    policy: Mapping[str, Any] | None
    time: float
    begun: Begun | None = None

    def wants(self, policy: Mapping[str, Any] | None) -> bool:
        """Return whether this is the pivot to these settings."""
        return self.policy == policy


def new_request(policy: Mapping[str, Any] | None) -> PivotRequest:
    """Return a request with a name of its own; nothing is written."""
    return PivotRequest(secrets.token_hex(16), policy, time.time())


def begin_request(run_dir: Path, request: PivotRequest, begun: Begun) -> None:
    """The request says durably what is about to be done."""
    write_request(run_dir, replace(request, begun=begun))


def write_request(run_dir: Path, request: PivotRequest) -> None:
    """``RUN/request.json`` asks for the pivot, durably."""
    begun = request.begun
    body = {
        "when": "boundary",
        "then": "pivot",
        "id": request.id,
        "time": request.time,
        "policy": request.policy,
        "begun": None
        if begun is None
        else {"step": begun.step, "archive": begun.archive, "before": begun.before},
    }
    storage.replace_durable(
        run_dir / REQUEST_FILE, json.dumps(body, allow_nan=False, indent=1).encode() + b"\n"
    )


def read_request(run_dir: Path) -> PivotRequest | None:
    """Return what is asked for, None where nothing is.

    Raises:
        CorruptFileError: The file isn't such a request.
    """
    path = run_dir / REQUEST_FILE
    try:
        data = storage.read_file(path, limit_bytes=_LIMIT_BYTES)
    except NotFoundError:
        return None
    try:
        return _parse(strict_loads(data))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CorruptFileError(
            f"{path} isn't a request that this version knows ({error}).",
            next_step="Move it away; `dist-ckpt pivot` writes a new one.",
            path=str(path),
        ) from error


def _parse(body: Any) -> PivotRequest:
    if (body["when"], body["then"]) != ("boundary", "pivot"):
        raise ValueError(f"when {body['when']!r}, then {body['then']!r}")
    begun = body["begun"]
    if begun is not None:
        archive = begun["archive"]
        if type(archive) is not str or not _ARCHIVE.fullmatch(archive):
            raise ValueError(f"archive {archive!r}")
        if type(begun["step"]) is not int or not 0 <= begun["step"] <= _MAX_STEP:
            raise ValueError(f"step {begun['step']!r}")
        begun = Begun(begun["step"], archive, _settings(begun["before"]))
    if type(body["id"]) is not str or not body["id"]:
        raise ValueError(f"id {body['id']!r}")
    return PivotRequest(body["id"], _settings(body["policy"]), float(body["time"]), begun)


def _settings(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"settings {value!r}")
    return value


def remove_request(run_dir: Path) -> None:
    """Nothing is asked for any more, durably."""
    storage.unlink(run_dir / REQUEST_FILE, missing_ok=True)
    storage.sync_dir(run_dir)
