"""One backward before training, so that DDP sums gradients in the same order ever after. Layer 5.

DistributedDataParallel finds out in its first backward in which order gradients become ready, and
puts them into other buckets from then on. With three or more ranks the place of a gradient in its
bucket decides in which order the ranks' values are added, so the last bits of the first step differ
from what the same step gives later in a run. A resume makes some step the first of a process again.
With a rehearsal before each start, a fresh one too, no step of the training is the first.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt.capture import (
    Generator,
    check_stateful,
    cuda_devices,
    encode_rng,
    load_stateful,
    restore_rng,
    state_of,
)
from dist_ckpt.errors import UsageError

__all__ = ["rehearse", "will_reorder_sums"]

#: What sums in its final order. By object: a wrapper made anew has its first backward again.
_rehearsed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def rehearse(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    data: Any = None,
    generators: Mapping[str, Generator] | None = None,
) -> bool:
    """DDP in ``model`` sums gradients in its final order from now on; nothing else has changed.

    Runs ``loss().backward()`` once, twice with ``static_graph=True``, and puts back parameters,
    buffers, modules' extra state, random state and the place in the data; gradients are None again.
    Call it before `Checkpointer.steps`, on every rank, at every start of the script: a fresh run
    that wasn't rehearsed differs from a resumed one that was.

    Not put back: what a communication hook keeps (PowerSGD's errors), an optimizer that steps
    inside backward, and whatever else ``loss`` changes that isn't listed.

    A model without DDP, or with ``find_unused_parameters=True`` and no static graph, never changes
    its order: ``loss`` isn't called then, so the same script runs on one rank too. Memory: a copy
    of parameters and buffers on the host while it runs.

    Collective, main thread.

    Args:
        model: The DDP module, or one that holds it (a compiled one, say).
        loss: Makes the loss of a batch through ``model``, as a step of the training does, autocast
            included; any batch will do, also one of zeros.
        data: What ``loss`` takes its batch from, if it moves: with ``state_dict()`` and
            ``load_state_dict()``.
        generators: The program's own generators that ``loss`` draws from.

    Returns:
        Whether there was anything to rehearse.

    Raises:
        UsageError: Gradients are there already, or the loss doesn't depend on the DDP module.
        UnsupportedValueError: ``data`` has no state.
    """
    wrappers = [module for module in _wrappers(model) if will_reorder_sums(module)]
    if not wrappers:
        return False
    _check_untouched(model)
    passes = 2 if any(module.static_graph for module in wrappers) else 1
    with _put_back(model, data, dict(generators or {})):
        for parameter in model.parameters():
            parameter.grad = None
        for _ in range(passes):
            loss().backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                parameter.grad = None
        for module in wrappers:
            # What its next forward would do first. Done here it tells whether there was a backward.
            if not module.reducer._rebuild_buckets():  # noqa: SLF001
                raise UsageError(
                    "The rehearsed loss didn't reach the DistributedDataParallel module: its "
                    "buckets are as they were.",
                    next_step="Have loss() call the wrapped model and return the loss of a step; "
                    "rehearse before the first step.",
                )
            _rehearsed.add(module)
    return True


def will_reorder_sums(module: nn.Module) -> bool:
    """Return whether ``module`` is a DDP that will sum gradients in another order after a backward.

    False for one that was rehearsed. One that has trained without still counts: its first step
    wasn't like the others.
    """
    return (
        isinstance(module, DistributedDataParallel)
        and (module.static_graph or not module.find_unused_parameters)
        and module not in _rehearsed
    )


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _check_untouched(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        # Zeros are what a save before the loop has put there; the loop puts them there again.
        grad = parameter.grad
        if grad is not None and (grad.layout is not torch.strided or grad.count_nonzero()):
            raise UsageError(
                f"{name} has a gradient already.",
                next_step="Rehearse before the first step; or zero_grad(set_to_none=True) first.",
            )


@contextmanager
def _put_back(model: nn.Module, data: Any, generators: dict[str, Generator]) -> Iterator[None]:
    """Everything that a forward and backward may change is as it was, whatever happens inside."""
    place = None
    if data is not None:
        check_stateful("data", data)
        # Some hand out the very objects that they go on with.
        place = copy.deepcopy(state_of("data", data))
    tensors = [*model.parameters(), *model.buffers()]
    devices = cuda_devices(tensors)
    rng = encode_rng(generators, devices)
    held = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    extra = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, held, strict=True):
                tensor.copy_(values)
        for parameter in model.parameters():
            parameter.grad = None
        for module, state in extra:
            module.set_extra_state(state)
        if data is not None:
            load_stateful("data", data, place)
        restore_rng(rng, generators, devices)  # last: what loads may draw
