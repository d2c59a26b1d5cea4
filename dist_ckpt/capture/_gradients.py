"""Which parameters had a gradient at a boundary, and zeros in their place. Layer 3, no collective.

No gradient counts at a boundary, but that there is one does: an optimizer passes over a parameter
whose gradient is None, and updates one whose gradient is zero (its moments decay, its weight too).
What the gradients held isn't looked at, which on a GPU would wait for it: where they don't count,
the next body either sets them to zero, or to None.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dist_ckpt.capture._optim import OptimizerStates
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.tree import JSON

__all__ = ["encode_gradients", "restore_gradients"]


def encode_gradients(view: ModelView, states: OptimizerStates) -> dict[str, JSON]:
    """Return the names of the parameters that have a gradient, or of all others if those are fewer.

    ``{"of": [name]}`` or ``{"all_but": [name]}``; ``{}`` where none has one. Sparse gradients don't
    count: their optimizers don't take dense zeros.
    """
    having: list[str] = []
    lacking: list[str] = []
    for name in states.owners:
        gradient = view.parameters[name].grad
        is_there = gradient is not None and gradient.layout is torch.strided
        (having if is_there else lacking).append(name)
    if not having:
        return {}
    return {"of": having} if len(having) <= len(lacking) else {"all_but": lacking}


def restore_gradients(saved: Mapping[str, JSON], view: ModelView, states: OptimizerStates) -> None:
    """Each parameter that had a gradient and has none has one of zeros, and no other is touched."""
    if not saved:
        return
    named = {view.kept_name(name) for name in saved.get("of", saved.get("all_but", ()))}
    for name in states.owners:
        parameter: nn.Parameter = view.parameters[name]
        if (name in named) == ("of" in saved) and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
