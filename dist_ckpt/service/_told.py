"""What went wrong on a rank, as all ranks are told. Layer 6, pure."""

from __future__ import annotations

from typing import TypeAlias

from dist_ckpt.errors import DistCkptError, MismatchError

__all__ = ["Told", "during", "named_after", "told"]

#: What happened, and what to do about it.
Told: TypeAlias = tuple[str, str]


def told(error: Exception) -> Told:
    """Return what went wrong on a rank as all ranks are told: what happened, and what to do."""
    if isinstance(error, DistCkptError):
        return error.message, error.next_step
    return f"{type(error).__name__}: {error}", ""


def during(phase: str, error: Exception) -> Told:
    """Return the same, with the phase in which it happened."""
    what, hint = told(error)
    return f"{phase}: {what}", hint


def named_after(phase: str, error: MismatchError) -> MismatchError:
    """Return what every rank has found alike, with the phase: as ``phase``, and in its words."""
    values = {**error.values, "phase": phase}
    return MismatchError(
        f"{phase.capitalize()}: {error.message}", next_step=error.next_step, **values
    )
