"""Notices that a run directory in use is gone, and makes it again. Layer 6, rank 0.

Whoever trains holds all that is needed: the state in memory, the history in files that stay open,
and the right to the directory, as long as nobody else has taken it meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, LockedError, StorageError
from dist_ckpt.service._attempt import Attempt

__all__ = ["Keeper"]

#: While it can't be made again, this is said every so many seconds.
_SAY_AGAIN_SECS = 300.0


@dataclass
class Keeper:
    """Watches the names of an attempt's run directory.

    Attributes:
        attempt: Rank 0's.
        warn: Says it.
        newest: Returns the step of the newest generation that must be there, None where none must.
    """

    attempt: Attempt
    warn: Callable[[str], None]
    newest: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        """Remember on which file system the run lies."""
        self._device = storage.device_of(self._run_dir)
        self._is_suspicious = False
        self._said_at: float | None = None

    @property
    def _run_dir(self) -> Path:
        return self.attempt.store.run_dir

    def look(self) -> None:
        """Note whether anything is missing. Any thread."""
        self._is_suspicious = bool(self._look())

    def _look(self) -> list[str]:
        missing = []
        try:
            self.attempt.check_lock()
        except LockedError:
            missing.append("run.lock")
        missing += self.attempt.history.lost_names()
        newest = self.newest()
        if newest is not None and not self.attempt.store.has(newest):
            missing.append(self.attempt.store.path(newest).name)
        return missing

    def mend(self, *, look: bool = False) -> bool:
        """Make again what is missing; return whether the newest generation is among it.

        Main thread, between two appends to the history. Where it can't be made now it is said, from
        time to time again, and training goes on: the state is nowhere else.

        Args:
            look: Look also where nothing was noted.

        Raises:
            LockedError: Another job has the directory. This one can never save there again.
        """
        if not (look or self._is_suspicious):
            return False
        missing: list[str] = []
        try:
            missing = self._look()  # anew: what was noted may be mended
            if not missing:
                self._is_suspicious = False
                return False
            self._require_same_device()
            self._require_ours()
            self._make()
        except LockedError:
            raise
        except DistCkptError as error:
            self._say(f"{self._run_dir} lacks {', '.join(missing) or 'something'}: {error}")
            return False
        self._is_suspicious, self._said_at = False, None
        self.warn(f"{self._run_dir} lacked {', '.join(missing)}; it has been made again")
        self.attempt.journal("made_again", names=missing)
        newest = self.newest()
        return newest is not None and not self.attempt.store.has(newest)

    def _require_same_device(self) -> None:
        """An unmounted disk leaves an empty directory on another one, which isn't the run's."""
        there = self._run_dir
        while not storage.exists(there):
            there = there.parent
        if storage.device_of(there) != self._device:
            raise StorageError(
                f"{there} is on another file system than the run was.",
                next_step="Mount it again: nothing can be saved until then, training goes on.",
                path=str(there),
                operation="look at",
            )

    def _require_ours(self) -> None:
        """Another attempt that came meanwhile has left its name, whether it still runs or not."""
        found = self._attempt_there()
        if found is not None and found.get("nonce") != self.attempt.nonce:
            facts = {key: value for key, value in found.items() if key != "nonce"}
            raise LockedError(
                f"{self._run_dir} was taken over by attempt {found.get('attempt')} (process "
                f"{found.get('pid')} on {found.get('host')}) while this process trained.",
                next_step="This one can't save there any more and has ended. Look which of the two "
                "you want; the other one's generations are whole.",
                path=str(self._run_dir),
                holder=facts,
            )

    def _attempt_there(self) -> dict[str, Any] | None:
        path = self._run_dir / "run.json"
        if not storage.exists(path):
            return None
        try:
            found = json.loads(storage.read_file(path, limit_bytes=1 << 20))
        except ValueError:
            return None  # half of a copy: the lock tells
        return found if isinstance(found, dict) else None

    def _make(self) -> None:
        attempt = self.attempt
        attempt.store.create()
        try:
            attempt.check_lock()
        except LockedError:
            if attempt.lock is not None:
                attempt.lock.retake()
            self._require_ours()  # held now: nobody comes any more
        attempt.write_run_file()
        attempt.write_settings()
        attempt.history.revive()

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._said_at is None or now - self._said_at >= _SAY_AGAIN_SECS:
            self._said_at = now
            self.warn(text)
