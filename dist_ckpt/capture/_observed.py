"""Whether the live objects are the very ones that were listed before. Layer 3, reads only.

Walking 100,000 tensors by name takes a second; that nothing has moved since the last walk is seen
in a fraction of it. What was listed is used again only where *every* object it was made of is the
same object in the same place, and every tensor among them still has its memory, shape, strides and
dtype: a list that is stale can't be returned (docs/decisions/0041-unchanged-objects.md).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Observed", "observe"]


def observe(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> list[Any]:
    """Return every object that names or holds a tensor, in the order in which they are found.

    Modules with their types and what they hold by name, groups' parameters, optimizer state.
    """
    objects: list[Any] = []
    waiting: list[nn.Module] = list(models.values())
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            objects.append(module)
            continue
        seen.add(id(module))
        objects += (module, type(module))
        objects += module._non_persistent_buffers_set  # noqa: SLF001
        held: tuple[dict[str, Any], ...] = (
            module._parameters,  # noqa: SLF001
            module._buffers,  # noqa: SLF001
            module._modules,  # noqa: SLF001
        )
        for group in held:
            objects += group
            objects.append(None)
            objects += group.values()
        waiting += [child for child in held[2].values() if child is not None]
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            objects += (group, group["params"])
            objects += group["params"]
        for owner, state in optimizer.state.items():
            objects += (owner, state)
            if type(state) is dict:
                objects += state
                objects += state.values()
    return objects


class Observed:
    """What `observe` saw, and how each tensor among it lay in memory.

    Attributes:
        is_whole: Every tensor that was listed has been seen, and is one that can be compared.
    """

    def __init__(self, objects: list[Any], listed: Iterable[torch.Tensor]) -> None:
        self._objects = objects
        found = {id(item): item for item in objects if isinstance(item, torch.Tensor)}
        self._tensors = list(found.values())
        comparable = all(map(_is_comparable, self._tensors))
        self.is_whole = comparable and all(id(tensor) in found for tensor in listed)
        self._facts = _facts(self._tensors) if self.is_whole else ()

    def marks(self) -> list[tuple[int, int]]:
        """Return what is likely to be the same later where nothing was replaced; holds nothing."""
        if not self.is_whole:
            return []
        return [(id(tensor), tensor.data_ptr()) for tensor in self._tensors]

    def has_same_objects(self, objects: list[Any]) -> bool:
        """Return whether all are the same objects in the same order."""
        return (
            self.is_whole
            and len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
        )

    def lies_as_before(self) -> bool:
        """Return whether every tensor has its memory and form still: ``p.data = …`` moves it."""
        return _facts(self._tensors) == self._facts


def _is_comparable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_complex()


def _facts(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    # Columns: few passes by comprehension are quicker than a tuple for each tensor. Shapes a
    # dimension at a time, since making a `torch.Size` takes longer than all the rest; strides only
    # where shape alone doesn't tell them. Of complex tensors, which may be conjugated lazily, none
    # is comparable.
    depths = [tensor.dim() for tensor in tensors]
    sizes, rest, left = [], tensors, depths
    for dim in range(max(depths, default=0)):
        if not all(depth > dim for depth in left):
            rest = [tensor for tensor, depth in zip(rest, left, strict=True) if depth > dim]
            left = [depth for depth in left if depth > dim]
        sizes.append([tensor.size(dim) for tensor in rest])
    dense = [tensor.is_contiguous() for tensor in tensors]
    return (
        [tensor.data_ptr() for tensor in tensors],
        depths,
        sizes,
        dense,
        [t.stride() for t, is_dense in zip(tensors, dense, strict=True) if not is_dense],
        [tensor.dtype for tensor in tensors],
        [tensor.is_neg() for tensor in tensors],
    )
