"""What the job tells its supervisor goes through the launcher. Layer 7; main thread.

systemd listens to the main process of a unit alone (``NotifyAccess=main``), and that is the
launcher. So the workers get a socket of the launcher's, and it passes their words on under its own
pid. It listens itself, too: while a stopping job says that bytes move, it isn't killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dist_ckpt.notify import NOTIFY_SOCKET_ENV, NotifyReceiver, send

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Notices"]

_SOCKET_NAME = "notify"
# What may be said in the name of the launcher; MAINPID and descriptors aren't among it.
_PASSED_ON = ("READY", "STATUS", "WATCHDOG", "STOPPING", "EXTEND_TIMEOUT_USEC")
_WAIT_SECS = 1.0


class Notices:
    """The launcher's socket for its workers; made in the launch's directory.

    Attributes:
        extended_until: time.monotonic() until which a stop may take in any case, since bytes move.
        stopping: The launcher was asked to end. Ranks end at other times too, to be started again:
            then systemd mustn't hear STOPPING, after which it kills what doesn't end.
    """

    def __init__(self, directory: Path) -> None:
        self._supervisor = os.environ.get(NOTIFY_SOCKET_ENV, "")
        self._receiver: NotifyReceiver | None = None
        with contextlib.suppress(OSError):  # nobody is told anything then; the job goes on
            self._receiver = NotifyReceiver(directory / _SOCKET_NAME)
        self.extended_until = 0.0
        self.stopping = False

    @property
    def environ(self) -> dict[str, str]:
        """What workers need to be heard."""
        # WATCHDOG_PID is the launcher's: who looks at it, as sd_watchdog_enabled(3) does, is told
        # that nothing is expected of a worker.
        path = "" if self._receiver is None else str(self._receiver.path)
        return {NOTIFY_SOCKET_ENV: path}

    def fileno(self) -> int | None:
        """Return the descriptor to wait for; None without a socket."""
        return None if self._receiver is None else self._receiver.fileno()

    def pass_on(self) -> None:
        """The supervisor has what the workers said since the last call."""
        for message in self._receiver.take() if self._receiver is not None else ():
            self._extend(message.get("EXTEND_TIMEOUT_USEC", ""))
            told = {name: message[name] for name in _PASSED_ON if name in message}
            if not self.stopping:
                told.pop("STOPPING", None)
            if told and self._supervisor:
                wait_secs = _WAIT_SECS if "READY" in told else 0.0
                send(told, to=self._supervisor, wait_secs=wait_secs)

    def close(self) -> None:
        """The socket is gone."""
        if self._receiver is not None:
            self._receiver.close()

    def _extend(self, microseconds: str) -> None:
        if microseconds.isascii() and microseconds.isdigit() and len(microseconds) < 16:
            until = time.monotonic() + int(microseconds) / 1e6
            self.extended_until = max(self.extended_until, until)
