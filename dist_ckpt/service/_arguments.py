"""What ``Checkpointer`` takes as a convenience, as the code below it wants it. Layer 6, pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dist_ckpt.errors import UsageError

__all__ = ["absolute", "names_in_order"]


def names_in_order(order: Sequence[str] | torch.nn.Module | None) -> tuple[str, ...] | None:
    """Return the names that ``order=`` gives, of a model or of a list; None for the model's own."""
    if isinstance(order, torch.nn.Module):
        return tuple(name for name, _ in order.named_parameters())
    if order is None:
        return None
    names = tuple(order)
    if isinstance(order, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"order={order!r} is no list of names.",
            next_step="Give the parameters' names, or the whole model.",
        )
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise UsageError(f"order= names {twice!r} twice.", next_step="Name each parameter once.")
    return names


def absolute(run_dir: str | os.PathLike[str]) -> Path:
    """Return the run directory whatever the script makes its working directory later."""
    path = os.path.abspath(run_dir) if os.fspath(run_dir) else ""
    if not os.path.basename(path):
        raise UsageError(
            f"run_dir={os.fspath(run_dir)!r} has no last component, which is the run's name.",
            next_step="Give a directory of the run's own, as runs/first.",
        )
    return Path(path)
