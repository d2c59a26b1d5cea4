"""A quiet end for programs that used gloo. Layer 2.

A plain DDP program on gloo aborts at exit now and then ("terminate called without an active
exception", status -6): a thread of gloo or of a store comes back from native code while the
interpreter is being torn down. A short wait before that lets them finish. Without it a clean stop
looks like a crash to whoever started the job.
"""

from __future__ import annotations

import atexit
import time

__all__ = ["EXIT_WAIT_SECS", "install_exit_guard"]

EXIT_WAIT_SECS = 0.1

_installed: list[bool] = []


def install_exit_guard() -> None:
    """The interpreter waits `EXIT_WAIT_SECS` before it is torn down; installed once a process."""
    if not _installed:
        _installed.append(True)
        atexit.register(time.sleep, EXIT_WAIT_SECS)
