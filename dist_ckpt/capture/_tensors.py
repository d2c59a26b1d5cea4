"""The list of a training's tensors, now and after the first update. Layer 3, reads only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from dist_ckpt.capture._optim import OptimizerStates, ParamState, encode_name
from dist_ckpt.capture._sharding import boxes_of, check_held, is_sharded, local_of
from dist_ckpt.capture._values import LiveTensor
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.capture._zero import inner_of
from dist_ckpt.slices import Role, TensorSpec

__all__ = ["SpecCache", "dtype_name", "list_tensors", "predict_states"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class SpecCache:
    """Specs by key, made and checked once: a save of 1,000 parameters asks for 4,000 of them."""

    def __init__(self, *, check: bool = True) -> None:
        self._check = check
        self._specs: dict[str, tuple[TensorSpec, object, torch.dtype, torch.Size, bool]] = {}
        self._names: dict[str, str] = {}

    def live(
        self,
        key: str,
        role: Role,
        tensor: torch.Tensor,
        param: str | None,
        *,
        is_updated: bool = True,
    ) -> LiveTensor:
        """Return ``tensor`` with its spec, detached; of a DTensor this rank's part.

        Raises:
            UnsupportedValueError: It can't be kept; the path is its key.
        """
        known = self._specs.get(key)
        if (
            known is None
            or known[1] is not _kind_of(tensor)
            or known[2] is not tensor.dtype
            or known[0].role is not role
            or known[3] != tensor.shape
            or tensor.layout is not torch.strided
        ):
            known = self._specs[key] = self._describe(key, role, tensor, param)
        if known[4] or tensor.requires_grad:
            tensor = local_of(tensor)
        return LiveTensor(known[0], tensor, is_updated)

    def _describe(
        self, key: str, role: Role, tensor: torch.Tensor, param: str | None
    ) -> tuple[TensorSpec, object, torch.dtype, torch.Size, bool]:
        if self._check:
            check_held(tensor, key)
        boxes = boxes_of(tensor, key)
        dtype = dtype_name(tensor.dtype)
        spec = TensorSpec(key, role, dtype, tuple(tensor.shape), boxes, param)
        is_plain = type(tensor) is torch.Tensor
        return spec, _kind_of(tensor), tensor.dtype, tensor.shape, not is_plain

    def component(self, name: str) -> str:
        """Return ``encode_name(name)``."""
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = encode_name(name)
        return found


def _kind_of(tensor: torch.Tensor) -> object:
    """Return what a known spec hangs on: the type, of a DTensor the very object of its placement.

    That object stays the same while nobody redistributes the tensor, and comparing it is free.
    """
    return getattr(tensor, "_spec", None) or type(tensor)


def list_tensors(view: ModelView, states: OptimizerStates, specs: SpecCache) -> list[LiveTensor]:
    """Return every tensor: weights, first moments, second moments, other optimizer state, buffers.

    Each group is in canonical order of the parameters, other state by path within a parameter.
    """
    # Optimizers hold frozen parameters too (MoCo's averaged encoder), and pass them over.
    weights = [
        specs.live(
            f"model/{specs.component(name)}",
            Role.WEIGHT,
            parameter,
            name,
            is_updated=name in states.owners and parameter.requires_grad,
        )
        for name, parameter in view.parameters.items()
    ]
    firsts: list[LiveTensor] = []
    seconds: list[LiveTensor] = []
    others: list[LiveTensor] = []
    # In one pass: with thousands of parameters each look at a tensor counts.
    for name, state in states.by_param.items():
        shape = view.parameters[name].shape
        prefix = f"optimizer/{specs.component(name)}/"
        for path in sorted(state.tensors):
            tensor = state.tensors[path]
            if path == "exp_avg" and tensor.shape == shape:
                firsts.append(specs.live(prefix + path, Role.EXP_AVG, tensor, name))
            elif path == "exp_avg_sq" and tensor.shape == shape:
                seconds.append(specs.live(prefix + path, Role.EXP_AVG_SQ, tensor, name))
            elif prefix + path not in states.ties:
                others.append(specs.live(prefix + path, Role.OPTIMIZER, tensor, name))
    buffers = [
        specs.live(
            f"model/{specs.component(name)}",
            Role.SHARED_BUFFER if is_sharded(buffer) else Role.BUFFER,
            buffer,
            None,
            is_updated=False,
        )
        for name, buffer in view.buffers.items()
    ]
    return [*weights, *firsts, *seconds, *others, *buffers]


def predict_states(
    view: ModelView, states: OptimizerStates, optimizers: Mapping[str, Optimizer]
) -> OptimizerStates | None:
    """Return the states as they will be after the first update, new tensors as placeholders.

    A parameter that requires a gradient is taken to get one. None where a parameter has no state
    yet and its optimizer is neither of Adam's kind nor SGD.
    """
    groups = {
        id(parameter): group
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    by_param: dict[str, ParamState] = {}
    for name, parameter in view.parameters.items():
        if name in states.by_param:
            by_param[name] = states.by_param[name]
            continue
        owner = states.owners.get(name)
        if owner is None or name not in states.held or not parameter.requires_grad:
            continue
        group = groups[id(parameter)]
        optimizer = inner_of(optimizers[owner])
        shaped = parameter  # nothing but its shape, dtype and placement is looked at
        if isinstance(optimizer, Adam | AdamW):
            wide = torch.get_default_dtype() is torch.float64 and not group["fused"]
            step_dtype = torch.float64 if wide else torch.float32
            tensors: dict[str, torch.Tensor] = {
                "step": torch.empty((), dtype=step_dtype, device="meta"),
                "exp_avg": shaped,
                "exp_avg_sq": shaped,
            }
            if group["amsgrad"]:
                tensors["max_exp_avg_sq"] = shaped
        elif isinstance(optimizer, SGD):
            tensors = {"momentum_buffer": shaped} if group["momentum"] else {}
        else:
            return None
        if tensors:
            by_param[name] = ParamState(owner, tensors)
    return OptimizerStates(by_param, states.owners, states.ties, states.held)
