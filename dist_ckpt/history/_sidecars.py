"""``NAME.state.json`` and ``NAME.policy.json``: what a policy learned, and its settings. Layer 4.

Both are replaced whole, never appended to. The state is for looking and comparing: what a resume
restores is the resume point's own copy. The settings are the user's, put there by a pivot.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.history._array_file import read_or_none
from dist_ckpt.history._json_array import strict_loads
from dist_ckpt.history._paths import history_path
from dist_ckpt.storage import replace_durable

__all__ = [
    "ABSENT",
    "encode_settings",
    "encode_state",
    "parse_settings",
    "read_policy",
    "read_state",
    "write_policy",
    "write_state",
]

_Path = str | os.PathLike[str]


class _Absent:
    """There is no file; a state may well be null."""


ABSENT: Final = _Absent()


def read_state(run_dir: _Path, name: str) -> Any:
    """Return the JSON value in ``NAME.state.json``, `ABSENT` where there is no such file.

    Raises:
        CorruptFileError: It isn't JSON.
    """
    path = history_path(run_dir, name, "state")
    data = read_or_none(path)
    if data is None:
        return ABSENT
    try:
        return strict_loads(data)
    except ValueError as error:
        raise CorruptFileError(
            f"{path}: this isn't JSON ({error}).",
            next_step="Move it to archive/ to start with a fresh policy, or mend it.",
            path=path,
        ) from error


def write_state(run_dir: _Path, name: str, state: bytes) -> None:
    """``NAME.state.json`` holds ``state``, one JSON document, durably."""
    replace_durable(history_path(run_dir, name, "state"), state)


def read_policy(run_dir: _Path, name: str) -> dict[str, Any] | None:
    """Return the settings in ``NAME.policy.json``, None where there is no such file.

    Raises:
        CorruptFileError: It isn't one JSON object.
    """
    path = history_path(run_dir, name, "policy")
    data = read_or_none(path)
    return None if data is None else parse_settings(data, path)


def parse_settings(data: bytes, path: _Path) -> dict[str, Any]:
    """Return the settings in the bytes of a policy file.

    Raises:
        CorruptFileError: It isn't one JSON object.
    """
    why = "it holds something else"
    try:
        value = strict_loads(data)
    except ValueError as error:
        value, why = None, str(error)
    if not isinstance(value, dict):
        raise CorruptFileError(
            f"{os.fspath(path)}: this isn't one JSON object ({why}).",
            next_step="Write the policy's settings as {…}, without NaN or comments.",
            path=os.fspath(path),
        )
    return value


def write_policy(run_dir: _Path, name: str, settings: dict[str, Any]) -> None:
    """``NAME.policy.json`` holds ``settings`` durably; readable, one key a line."""
    replace_durable(history_path(run_dir, name, "policy"), encode_settings(settings))


def encode_settings(settings: dict[str, Any]) -> bytes:
    """Return the bytes of a policy file."""
    return json.dumps(settings, allow_nan=False, indent=1).encode() + b"\n"


def encode_state(state: Any) -> bytes:
    """Return the bytes of a state file; ``state`` is what JSON can hold."""
    return json.dumps(state, allow_nan=False, indent=1).encode() + b"\n"
