"""``pins.json``: which generations somebody wants to keep, and why. Pure: layer 4.

An object of resume point's id → ``{"step": n, "reason": "…"}``: a pin means one generation, not
whatever has its number after a rewind. Written by hand it may also be step → reason. ``digest``
is that of all the rest: with one other bit an id would be a pin of a generation that isn't here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dist_ckpt.errors import CorruptFileError, DigestMismatchError
from dist_ckpt.resume_point import load_strict_json
from dist_ckpt.storage import digest_bytes

__all__ = ["PINS_LIMIT_BYTES", "PINS_NAME", "Pins", "encode_pins", "parse_pins"]

PINS_NAME: Final = "pins.json"
PINS_LIMIT_BYTES: Final = 1 << 24
_DIGEST: Final = "digest"
_MEND: Final = (
    'Write it anew as {"STEP": "REASON", …} with every step that is to be kept; where it is right '
    f'as it stands, it is enough to take "{_DIGEST}" out of it. Until then nothing is retired.'
)
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Pins:
    """What is pinned.

    Attributes:
        by_id: Id of a resume point → its step and the reason.
        by_step: Step → reason, for what was written by hand.
    """

    by_id: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    by_step: Mapping[int, str] = field(default_factory=dict)

    def with_pin(self, step: int, id_: str, reason: str) -> Pins:
        """Return the pins with one more, in the place of an earlier one of this generation."""
        return Pins({**self.by_id, id_: (step, reason)}, self._without_step(step))

    def without(self, step: int, id_: str | None) -> Pins:
        """Return the pins without those of one generation; all of the step where no id is given."""
        by_id = {
            key: value
            for key, value in self.by_id.items()
            if (value[0] != step if id_ is None else key != id_)
        }
        return Pins(by_id, self._without_step(step))

    def _without_step(self, step: int) -> dict[int, str]:
        return {key: value for key, value in self.by_step.items() if key != step}


def encode_pins(pins: Pins) -> bytes:
    """Return the bytes of ``pins.json``, their own digest first."""
    by_id = {id_: {"step": step, "reason": why} for id_, (step, why) in pins.by_id.items()}
    by_step = {str(step): reason for step, reason in pins.by_step.items()}
    body: dict[str, Any] = {**by_step, **by_id}
    body = {_DIGEST: _digest_of(body), **body}
    return json.dumps(body, allow_nan=False, indent=1).encode() + b"\n"


def _digest_of(body: Mapping[str, Any]) -> str:
    return digest_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def parse_pins(data: bytes, *, path: Path) -> Pins:
    """Return the pins in the bytes of ``pins.json``.

    Raises:
        CorruptFileError: They can't be understood, or aren't what was written: nobody may guess
            what was pinned.
    """
    try:
        body = load_strict_json(data, path=path)
    except CorruptFileError as error:
        raise CorruptFileError(error.message, next_step=_MEND, path=str(path)) from error
    if _DIGEST in body:  # by hand it is written without
        expected = body.pop(_DIGEST)
        if expected != (found := _digest_of(body)):
            raise DigestMismatchError(
                f"{path} was changed since it was written: its digest is {found}, not {expected}.",
                next_step=_MEND,
                path=str(path),
                expected=expected,
                found=found,
            )
    by_id: dict[str, tuple[int, str]] = {}
    by_step: dict[int, str] = {}
    for key, value in body.items():
        if _ID.fullmatch(key) and isinstance(value, dict) and _is_step(value.get("step")):
            by_id[key] = (value["step"], str(value.get("reason", "")))
        elif key.isascii() and key.isdigit() and len(key) < 20:
            by_step[int(key)] = str(value)
        else:
            raise CorruptFileError(
                f"{path} pins {key!r}, which is neither a generation's id nor a step number.",
                next_step=_MEND,
                path=str(path),
                found=key,
            )
    return Pins(by_id, by_step)


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0
