"""``dist-ckpt``: parse, call, print, exit status. Layer 8.

Looking commands import no torch. ``run`` is handed to the launcher before anything else is
imported, since a signal that comes meanwhile would kill it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command has been carried out and its answer printed; returns the exit status.

    Args:
        argv: The arguments without the program's name; None takes the process's own.

    Returns:
        0: done and in order. 1: the check ran and found a fault. 2: it could not be done. 130:
        interrupted. 141: the reader of stdout went away. Of ``run``: as the launcher says.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            from dist_ckpt.launcher import main as run  # noqa: PLC0415 - before all other imports

            return run(arguments[1:])
        from dist_ckpt.cli._main import carry_out  # noqa: PLC0415 - as above

        return carry_out(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
