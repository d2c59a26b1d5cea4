"""What people see on stderr: rank 0 speaks, through the logger ``dist_ckpt``. Layer 6."""

from __future__ import annotations

import contextlib
import logging
import sys

from dist_ckpt.errors import tidy

__all__ = ["Voice"]

_LOGGER = logging.getLogger("dist_ckpt")


class Voice:
    """Says what happened, on rank 0 only.

    A program that has set logging up gets records of the logger ``dist_ckpt``; any other gets lines
    on stderr, so that a failed save is seen without any set-up.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._on = rank == 0

    def say(self, text: str) -> None:
        """Tell that something went as it should."""
        self._log(logging.INFO, text)

    def warn(self, text: str) -> None:
        """Tell that something needs attention."""
        self._log(logging.WARNING, text)

    def _log(self, level: int, text: str) -> None:
        if not self._on:
            return
        text = tidy(text)
        # Nobody may be listening any more (a closed terminal, a pipe whose reader ended, a full
        # disk under a log). A notice must never cost a save or end training; the journal has it.
        with contextlib.suppress(OSError, ValueError):
            if _LOGGER.hasHandlers():
                _LOGGER.log(level, "%s: %s", self._name, text)
            elif sys.stderr is not None:
                mark = "WARNING: " if level >= logging.WARNING else ""
                sys.stderr.write(f"[dist-ckpt {self._name}] {mark}{text}\n")
                sys.stderr.flush()
