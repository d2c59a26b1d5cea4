"""Seeing through ``ZeroRedundancyOptimizer``: each rank updates some of the parameters. Layer 3.

Its groups list every parameter on every rank, as a plain optimizer's do. State exists on the rank
that a parameter was given to, inside the optimizer that it wraps; before each step it copies the
values of its groups there.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from dist_ckpt.errors import UnsupportedValueError

__all__ = ["check_zero", "held_ids", "inner_of", "is_zero"]


def is_zero(optimizer: Any) -> bool:
    """Return whether each rank keeps the state of some parameters only."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def inner_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds state: the wrapped one, or ``optimizer`` itself."""
    found: Optimizer = optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]
    return found


def held_ids(optimizer: Optimizer) -> set[int]:
    """Return the ``id`` of each parameter whose state this rank keeps."""
    return {id(p) for group in inner_of(optimizer).param_groups for p in group["params"]}


def check_zero(label: str, optimizer: Any) -> None:
    """Return if what is wrapped is an optimizer that keeps its state as torch's do.

    Raises:
        UnsupportedValueError: It updates inside the backward pass.
    """
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UnsupportedValueError(
            f"{label} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose update is "
            "still under way at a step's end.",
            next_step="Build it with overlap_with_ddp=False.",
            path=label,
        )
