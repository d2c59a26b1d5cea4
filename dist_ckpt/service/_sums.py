"""Whether this job's first step sums in another order than its later ones. Layer 6."""

from __future__ import annotations

from typing import Any

from dist_ckpt.rehearsal import will_reorder_sums
from dist_ckpt.service._strays import listed

__all__ = ["likely_cause", "reorders_sums"]

_CAUSE = (
    "{num_ranks} ranks of DistributedDataParallel without dist_ckpt.rehearse(). The first update "
    "after a resume sums gradients in other buckets than it did before, so later losses may differ "
    "in their last bits. The first replayed loss is the same, so the state was restored."
)


def reorders_sums(models: Any) -> bool:
    """Return whether a DDP among the models puts gradients into other buckets after a backward."""
    return any(will_reorder_sums(module) for model in listed(models) for module in model.modules())


def likely_cause(models: Any, num_ranks: int) -> str | None:
    """Return what would explain a loss that differs after the first step of a resume, if anything.

    Two values have one sum in either order, so two ranks have no such excuse.
    """
    if num_ranks > 2 and reorders_sums(models):
        return _CAUSE.format(num_ranks=num_ranks)
    return None
