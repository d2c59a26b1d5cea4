"""What launcher and agent share: names of variables and of a file, and how to speak. Layer 7."""

from __future__ import annotations

import contextlib
import signal
import sys

__all__ = ["LAUNCHER_PID_ENV", "RESULT_NAME", "SHUTDOWN_ENV", "UNMET_STATUS", "say", "signal_name"]

LAUNCHER_PID_ENV = "DIST_CKPT_LAUNCHER_PID"
RESULT_NAME = "result.json"
SHUTDOWN_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
#: The nodes didn't meet (EX_UNAVAILABLE): no failure of the training, so supervisors may try again.
UNMET_STATUS = 69


def say(text: str) -> None:
    """A person who looks at stderr knows; a closed terminal or pipe keeps nothing from going on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"dist-ckpt run: {text}\n")
        sys.stderr.flush()


def signal_name(signum: int) -> str:
    """Return a signal's name, ``signal N`` for one without."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
