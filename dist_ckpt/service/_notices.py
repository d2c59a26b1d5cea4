"""What the supervisor is told of a run: systemd, or our launcher. Layer 6.

One rank of each host speaks (its ``LOCAL_RANK`` 0), since each host has a supervisor of its own;
that bytes move, every rank says for itself. Without a supervisor nothing happens here.
"""

from __future__ import annotations

import os
import threading
import time

from dist_ckpt import notify, storage

__all__ = ["EXTEND_SECS", "Notices"]

#: How long a supervisor is to wait for the next sign that bytes move.
EXTEND_SECS = 30.0

_LOOK_SECS = 1.0  # between looks whether bytes moved
_ALIVE_SECS = 1.0  # between signs of life: steps may be far more frequent
_WAIT_SECS = 1.0  # for a full queue, where the word must not be lost


class Notices:
    """Tells the supervisor; never fails, and never holds training up."""

    def __init__(self) -> None:
        self._heard = notify.is_heard()
        self._speaks = self._heard and os.environ.get("LOCAL_RANK", "0") in {"", "0"}
        self._alive_time = 0.0
        self._watch: threading.Thread | None = None
        self._over = threading.Event()

    def starting(self) -> None:
        """It is up, and about to look for a resume point."""
        self._tell(STATUS="looking for a resume point", WATCHDOG=1)

    def ready(self, step: int | None) -> None:
        """Everything is restored and was checked as it was read; None: a fresh start."""
        status = "training from step 0" if step is None else f"resumed from step {step}, verified"
        self._tell(READY=1, STATUS=status, WATCHDOG=1, wait=True)

    def alive(self) -> None:
        """A boundary was reached; told once a second at most."""
        now = time.monotonic()
        if self._speaks and now >= self._alive_time + _ALIVE_SECS:
            self._alive_time = now
            self._tell(WATCHDOG=1)

    def committed(self, step: int) -> None:
        """A generation is committed. Any thread."""
        self._tell(STATUS=f"last committed: step {step}")

    def stopping(self, step: int) -> None:
        """The process is about to end; from now on it is told while bytes move, until `close`."""
        if not self._heard or self._watch is not None:
            return
        self._tell(STOPPING=1, STATUS=f"stopping: writing step {step}", wait=True)
        self._watch = threading.Thread(target=self._look, name="dist_ckpt-notices", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Nothing is told any more."""
        self._over.set()

    def _look(self) -> None:
        """Say so while bytes move: that mustn't be killed, nor a disk that hangs be waited for."""
        looked = time.monotonic()
        while not self._over.wait(_LOOK_SECS):
            moved = storage.last_moved()
            if moved > looked:
                notify.send({"EXTEND_TIMEOUT_USEC": int(EXTEND_SECS * 1e6)})
            looked = max(looked, moved)

    def _tell(self, *, wait: bool = False, **fields: str | int) -> None:
        if self._speaks:
            notify.send(fields, wait_secs=_WAIT_SECS if wait else 0.0)
