"""Counts and commands as people read them. Layer 1, pure."""

from __future__ import annotations

import shlex
from os import PathLike

__all__ = ["counted", "dist_ckpt_command"]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 rank``, ``2,000 ranks``; ``plural`` where an s alone doesn't make it."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def dist_ckpt_command(*words: str | PathLike[str]) -> str:
    """Return a call of the command line that a shell takes as it is meant, whatever is in a path.

    Words in capitals stand for what the reader puts there.
    """
    return shlex.join(["dist-ckpt", *map(str, words)])
