"""``--policy FILE`` and ``--dry-run`` of the commands that change a run's life. Layer 8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.history import parse_settings

__all__ = ["DryRunOption", "read_settings"]

_LIMIT_BYTES: Final = 1 << 22

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would be done, and change nothing.")
]


def read_settings(path: str | None) -> dict[str, Any] | None:
    """Return a policy's settings from the user's file; None where none is named.

    Raises:
        UsageError: It isn't one JSON object, as a run takes it.
    """
    if path is None:
        return None
    try:
        return parse_settings(storage.read_file(Path(path), limit_bytes=_LIMIT_BYTES), path)
    except CorruptFileError as error:
        # Nothing of the run is faulty.
        raise UsageError(error.message, next_step=error.next_step, path=path) from error
