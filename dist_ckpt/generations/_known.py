"""What retention asks of each generation, read once: its files never change. Layer 4, reads only.

At each save all that are kept are looked at, by thousands at the end of a long run: one costs three
looks at a status instead of two files read and parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, NotFoundError
from dist_ckpt.resume_point import RESUME_POINT_NAME, VERIFIED_NAME, ResumePoint

__all__ = ["Known", "KnownGenerations"]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one generation.

    Attributes:
        id: Of the resume point.
        run: Name of the run that saved it.
        nonce: Of the attempt that saved it.
        num_bytes: Bytes of its ranks' files.
        is_verified: It was read back whole.
    """

    id: str
    run: str
    nonce: Any
    num_bytes: int
    is_verified: bool


class KnownGenerations:
    """Remembers `Known` by the files' status; another file of that name is read anew. Any thread.

    Args:
        path: Step → directory of the generation.
        manifest: Step → its checked resume point.
        verified_at: Step → when it was read back whole, None where it wasn't; an error where that
            can't be read now, so that no passing one is remembered.
    """

    def __init__(
        self,
        path: Callable[[int], Path],
        manifest: Callable[[int], ResumePoint],
        verified_at: Callable[[int], float | None],
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._verified_at = verified_at
        self._known: dict[int, tuple[Any, Known]] = {}

    def of(self, step: int) -> Known | None:
        """Return what is known of a generation, None where its files can't be read."""
        try:
            status = self._status(step)
            if (found := self._known.get(step)) is not None and found[0] == status:
                return found[1]
            point = self._manifest(step)
            is_verified = self._verified_at(step) is not None
        except DistCkptError:
            self._known.pop(step, None)
            return None
        nonce = point.notes.get("nonce")
        known = Known(point.id, point.run, nonce, point.num_bytes, is_verified)
        self._known[step] = status, known
        return known

    def forget(self, steps: set[int]) -> None:
        """Let go of what isn't among these any more."""
        for step in self._known.keys() - steps:
            del self._known[step]

    def _status(self, step: int) -> tuple[Any, ...]:
        directory = str(self._path(step))
        home = storage.lstat(directory)  # a link to another place is no generation
        files: list[Any] = [(home.st_dev, home.st_ino, home.st_mode)]
        for name in (RESUME_POINT_NAME, VERIFIED_NAME):
            try:
                file = storage.lstat(f"{directory}/{name}")
            except NotFoundError:
                files.append(None)
            else:
                files.append((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns))
        return tuple(files)
