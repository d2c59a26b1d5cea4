"""Which resume points are a run's own, as its journal tells. Layer 4, reads only.

Retention asks at every save. After 50,000 saves the journal has 24 MB, whose parsing takes seconds:
so it is read once, and after that what was appended.
"""

from __future__ import annotations

import os

from dist_ckpt.history._array_file import LIMIT_BYTES
from dist_ckpt.history._journal import parse_journal
from dist_ckpt.history._lineage import LINEAGE_EVENTS, trace_lineage
from dist_ckpt.history._paths import history_path, run_name
from dist_ckpt.storage import lstat, read_file

__all__ = ["OwnPoints"]


class OwnPoints:
    """The ids of the resume points that a run saved, resumed from or was forked from. One thread.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = run_dir
        self._file: tuple[int, int] | None = None
        self._end = 0
        self._ids: set[str] = set()
        self._nonces: set[str] = set()

    def look(self) -> None:
        """Take in what the journal has got since the last look; another journal is read anew.

        What was known before stays known where it can't be read: a run that seems to own nothing
        would be told by its name alone.

        Raises:
            NotFoundError: There is none.
            StorageError: The system refused: that tells nothing of the run.
        """
        path = history_path(self._run_dir, run_name(self._run_dir), "journal")
        status = lstat(path)
        file = status.st_dev, status.st_ino
        goes_on = file == self._file and status.st_size >= self._end
        data = read_file(path, limit_bytes=LIMIT_BYTES, start=self._end if goes_on else 0)
        if not goes_on:
            self._forget()
        self._file = file
        whole = data.rfind(b"\n") + 1  # an append may be under way
        self._end += whole
        lineage = trace_lineage(parse_journal(data[:whole], naming=LINEAGE_EVENTS))
        self._ids.update(lineage.parents)
        self._nonces.update(lineage.nonces)

    @property
    def is_blank(self) -> bool:
        """Whether the journal tells of no resume point: it is new, or was lost."""
        return not self._ids

    def has(self, id_: str) -> bool:
        """Return whether the run saved this resume point, resumed from it or was forked from it."""
        return id_ in self._ids

    def has_attempt(self, nonce: object) -> bool:
        """Return whether an attempt of this very run has that nonce.

        Also of a save whose own line the journal lacks: the disk refused it, or the save failed
        when its generation had its name already.
        """
        return isinstance(nonce, str) and nonce in self._nonces

    def _forget(self) -> None:
        self._file, self._end = None, 0
        self._ids.clear()
        self._nonces.clear()
