"""An output directory that is complete or absent. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class OutputError(Exception):
    """The output directory can't be made."""


def check_absent(output: Path) -> None:
    """Return if nothing is at ``output``.

    Raises:
        OutputError: Something is: a proof is never written over another.
    """
    if os.path.lexists(output):
        raise OutputError(f"{output} exists; choose a directory that doesn't exist yet")


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """Yield a folder to fill; ``output`` is that folder once the block ends, durable and whole.

    After an exception there is neither. A process that is killed leaves at most a folder beside it
    whose name begins with a dot.

    Raises:
        OutputError: Something is at ``output`` by then, or the system refuses.
    """
    check_absent(output)
    folder = output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            yield folder
            for path in sorted(folder.rglob("*"), reverse=True):
                _sync(path)
            _sync(folder)
            check_absent(output)
            folder.rename(output)
            _sync(output.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{output} can't be made: {error}") from error


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Have ``body`` in ``path``, as JSON that any reader takes."""
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
