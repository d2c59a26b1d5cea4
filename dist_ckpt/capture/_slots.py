"""Persistent buffers that a program leaves None until it has something to keep. Layer 3.

They were saved and have no tensor yet that a restore could fill: one is made for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dist_ckpt.capture._values import TensorLike
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.tree import TORCH_DTYPES

__all__ = ["Slots"]


class Slots:
    """Makes tensors for such buffers, and takes them away for the restore of another generation."""

    def __init__(self) -> None:
        self._made: list[tuple[nn.Module, str, torch.Tensor]] = []

    def make(
        self,
        view: ModelView,
        keys: Mapping[str, TensorLike],
        component: Callable[[str], str],
        tied: Mapping[str, str],
    ) -> dict[str, torch.Tensor]:
        """Return key → new tensor of each buffer that was saved and is None here; changes nothing.

        It lies beside the other tensors of its module, or of the model where that has none. What
        was one tensor under several names (``tied``) is one again.
        """
        self._made.clear()
        made: dict[str, torch.Tensor] = {}
        slots = {f"model/{component(name)}": slot for name, slot in view.slots.items()}
        for key, (module, local) in slots.items():
            spec = keys.get(key)
            if spec is None or spec.dtype not in TORCH_DTYPES:
                continue
            near = (*module.parameters(), *module.buffers(), *view.parameters.values())
            device = near[0].device if near else None
            made[key] = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            self._made.append((module, local, made[key]))
        ties = [(slots[key], first) for key, first in tied.items() if key in slots]
        if ties:
            live = {**view.parameters, **view.buffers}
            tensors = {f"model/{component(name)}": tensor for name, tensor in live.items()} | made
            self._made += [(*slot, tensors[first]) for slot, first in ties if first in tensors]
        return made

    def fill(self) -> None:
        """The buffers are what was made."""
        for module, local, tensor in self._made:
            module._buffers[local] = tensor  # noqa: SLF001

    def clear(self) -> None:
        """The buffers that were filled are None again, unless they are something else by now."""
        for module, local, tensor in self._made:
            if module._buffers.get(local) is tensor:  # noqa: SLF001
                module._buffers[local] = None  # noqa: SLF001
        self._made.clear()
