"""One generation wherever it lies, to be read. Layer 4."""

from __future__ import annotations

import os
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.generations._stored import MANIFEST_LIMIT_BYTES, StoredGenerations
from dist_ckpt.resume_point import RESUME_POINT_NAME, parse_resume_point

__all__ = ["SingleGeneration"]


class SingleGeneration(StoredGenerations):
    """One generation wherever it lies: in a run, in archive/, copied elsewhere under any name.

    Args:
        directory: The generation's own directory.

    Raises:
        CorruptFileError, NotFoundError: Neither its name nor its manifest tells its step.
    """

    def __init__(self, directory: Path) -> None:
        # Made absolute, since "." has a parent only then.
        home = Path(os.path.abspath(directory))
        in_run = home.parent.name == "checkpoints"
        super().__init__(home.parent.parent if in_run else home.parent)
        self._only = directory
        self._step = parse_step_name(home.name)
        if self._step is None:
            path = directory / RESUME_POINT_NAME
            data = storage.read_file(path, limit_bytes=MANIFEST_LIMIT_BYTES)
            self._step = parse_resume_point(data, path=path).step

    def steps(self) -> list[int]:
        """Return the one step."""
        return [] if self._step is None else [self._step]

    def _require_own(self, path: Path) -> None:
        """A link is fine where somebody has named it."""

    def path(self, step: int) -> Path:  # noqa: ARG002 - there is one
        """Return the directory."""
        return self._only
