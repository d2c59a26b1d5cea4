"""Optimizer state by parameter name: reading it. Layer 3, no collective, never runs a step.

A parameter's state is a dict of tensors in nearly every case; then its tensors are named by their
keys. Where there is anything else in it (numbers, lists of tensors as LBFGS has them) a tree keeps
the shape, with references in the places of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch.optim import Optimizer

from dist_ckpt.capture._memory import dim_order, strides_of
from dist_ckpt.capture._sharding import is_sharded
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.capture._zero import check_zero, held_ids, inner_of, is_zero
from dist_ckpt.errors import UnsupportedValueError
from dist_ckpt.tree import JSON, encode_tree
from dist_ckpt.wording import counted

__all__ = [
    "OptimizerStates",
    "ParamState",
    "check_optimizer",
    "encode_name",
    "encode_optimizer",
    "label_of",
    "read_states",
]


@dataclass(slots=True)
class ParamState:
    """The state of one parameter: tensors by path, and a tree if there is anything else."""

    optimizer: str
    tensors: dict[str, torch.Tensor]
    tree: JSON | None = None


@dataclass(slots=True)
class OptimizerStates:
    """The state of all optimizers, in the canonical order of the parameters.

    Attributes:
        by_param: Parameter name → its state; parameters without state are left out.
        owners: Parameter name → key of the optimizer that updates it.
        ties: Key of a tensor that is the same object as an earlier one → that one's key.
        held: Names of the parameters whose state this rank keeps: all that have an owner, but with
            ZeroRedundancyOptimizer.
    """

    by_param: dict[str, ParamState] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)

    def without(self, keys: Collection[str]) -> OptimizerStates:
        """Return the states but of these optimizers."""
        return replace(
            self, owners={name: key for name, key in self.owners.items() if key not in keys}
        )


def encode_name(name: str) -> str:
    """Return ``name`` as one component of a key, escaped as torchsnapshot does."""
    return name.replace("%", "%25").replace("/", "%2F")


def label_of(kind: str, key: str) -> str:
    """Return ``"optimizer"`` or ``"optimizer.KEY"``."""
    return f"{kind}.{key}" if key else kind


def read_states(optimizers: Mapping[str, Optimizer], view: ModelView) -> OptimizerStates:
    """Return the present state of all optimizers; the tensors are the live ones.

    Raises:
        UnsupportedValueError: Parameters that the model doesn't have, a parameter in two
            optimizers, state that belongs to no parameter, or a value in it that can't be kept.
    """
    states = OptimizerStates()
    for key, optimizer in optimizers.items():
        _claim(states.owners, key, optimizer, view)
        states.held.update(view.names[number] for number in held_ids(optimizer))
    for key, optimizer in optimizers.items():
        _check_state_keys(states.owners, key, optimizer, view)
    seen: dict[int, str] = {}
    for name, parameter in view.parameters.items():
        owner = states.owners.get(name)
        # `.get`: looking a missing key up creates one.
        state = None if owner is None else inner_of(optimizers[owner]).state.get(parameter)
        if owner is None or _is_empty(state):
            continue
        found = _read_state(owner, state, f"{label_of('optimizer', owner)}/{encode_name(name)}")
        states.by_param[name] = found
        _note_ties(states.ties, seen, name, found)
    return states


def _claim(owners: dict[str, str], key: str, optimizer: Optimizer, view: ModelView) -> None:
    strangers = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = view.names.get(id(parameter))
            if name is None or name not in view.parameters:
                strangers.append(parameter)
            elif owners.setdefault(name, key) != key:
                _refuse(
                    f"optimizer/{name}",
                    f"is updated by two optimizers, {owners[name]!r} and {key!r}",
                    "Give each parameter to one optimizer.",
                )
    if strangers:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strangers[:20])
        _refuse(
            label_of("optimizer", key),
            f"holds {counted(len(strangers), 'parameter')} that the model doesn't have, of shapes "
            f"{shapes}",
            "Was it built before the model was sharded (fully_shard, parallelize_module), moved or "
            "replaced? Build it from the parameters of the model that is given here.",
        )


def _check_state_keys(
    owners: Mapping[str, str], key: str, optimizer: Optimizer, view: ModelView
) -> None:
    states: Mapping[Any, Any] = inner_of(optimizer).state
    for owner, state in states.items():
        if isinstance(owner, torch.Tensor):
            name = view.names.get(id(owner), f"a tensor of shape {tuple(owner.shape)}")
            if owners.get(name) == key:
                continue
        else:
            name = repr(owner)
        if not _is_empty(state):
            _refuse(
                f"{label_of('optimizer', key)}/{name}",
                "is state of something that is no parameter in its groups",
                "Keep such state in `extra`, or in the state of a parameter.",
            )


def _is_empty(state: Any) -> bool:
    return state is None or (isinstance(state, dict) and not state)


def _read_state(owner: str, state: Any, path: str) -> ParamState:
    if not isinstance(state, dict):
        _refuse(path, f"is a {type(state).__name__}, not a dict", "Keep a dict for each parameter.")
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if type(key) is not str or not isinstance(value, torch.Tensor):
            break
        tensors[_component(key)] = value
    else:
        return ParamState(owner, tensors)
    tensors.clear()

    def put(where: str, value: torch.Tensor | np.ndarray[Any, Any]) -> JSON:
        inner = where.removeprefix(f"{path}/").replace(".", "%2E").replace("/", ".")
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        tensors[inner] = tensor.detach()
        return inner

    return ParamState(owner, tensors, encode_tree(dict(state), path=path, put_tensor=put))


def _component(key: str) -> str:
    # As the tree does: a path is the same whether or not there is a number beside the tensor.
    if key.isidentifier():
        return key
    return encode_name(key).replace("[", "%5B").replace(".", "%2E")


def _note_ties(ties: dict[str, str], seen: dict[int, str], name: str, state: ParamState) -> None:
    prefix = f"optimizer/{encode_name(name)}/"
    for path, tensor in state.tensors.items():
        if path in {"exp_avg", "exp_avg_sq"}:
            continue  # a parameter's moments are its own
        first = seen.setdefault(id(tensor), prefix + path)
        if first != prefix + path:
            ties[prefix + path] = first


def iter_groups(
    optimizer: Optimizer, view: ModelView
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield each parameter group with the names of its parameters, in its order."""
    for group in optimizer.param_groups:
        yield group, [view.names[id(parameter)] for parameter in group["params"]]


def encode_optimizer(
    key: str, optimizer: Optimizer, view: ModelView, states: OptimizerStates
) -> JSON:
    """Return what is kept of an optimizer besides its tensors: groups whole, and its trees.

    ``{"kind", "groups": [{"params", "values"}], "layouts", "homes", "trees"}``: ``layouts`` holds
    each order of keys that occurs, ``homes`` where state lies when parameters are on an
    accelerator: small tensors; and those of their parameter's shape, if all lie on the host.
    Beside them ``orders``, where there are such, of tensors whose dims lie in another order in
    memory than a restore would give them.
    """
    label = label_of("optimizer", key)
    groups = []
    for index, (group, names) in enumerate(iter_groups(optimizer, view)):
        values = {k: v for k, v in group.items() if k not in {"params", "param_names"}}
        tree = encode_tree(values, path=f"{label}/param_groups/{index}")
        groups.append({"params": names, "values": tree})
    layouts: dict[tuple[str, ...], None] = {}
    homes: dict[str, str] = {}
    offloaded: dict[str, str] = {}
    beside: set[str] = set()
    trees: dict[str, JSON] = {}
    for name, state in states.by_param.items():
        if state.optimizer != key:
            continue
        if state.tree is None:
            layouts[tuple(state.tensors)] = None
        else:
            trees[name] = state.tree
        parameter = view.parameters[name]
        if parameter.device.type != "cpu":
            for path, tensor in state.tensors.items():
                home = "host" if tensor.device.type == "cpu" else "device"
                if tensor.shape != parameter.shape:
                    homes[path] = home
                elif home == "device":
                    beside.add(path)
                elif tensor.dim():
                    offloaded[path] = home
    homes = {**{path: home for path, home in offloaded.items() if path not in beside}, **homes}
    found = {
        name: _orders_of(state, view.parameters[name])
        for name, state in states.by_param.items()
        if state.optimizer == key
    }
    orders = {name: own for name, own in found.items() if own}
    return {
        "kind": type(inner_of(optimizer)).__name__,
        "groups": groups,
        "layouts": [list(layout) for layout in layouts],
        "homes": homes,
        "trees": trees,
        **({"orders": orders} if orders else {}),
    }


def _orders_of(state: ParamState, parameter: torch.Tensor) -> dict[str, list[int]]:
    """Return the order of the dims of each tensor where a restore would give it another."""
    orders: dict[str, list[int]] = {}
    is_plain = parameter.is_contiguous()
    for path, tensor in state.tensors.items():
        if is_plain and tensor.is_contiguous():
            continue
        if is_sharded(tensor) or is_sharded(parameter):
            continue
        usual = strides_of(tensor.shape)
        if tensor.shape == parameter.shape:
            if tensor.stride() == parameter.stride():  # the rule, and the rest of this costs
                continue
            usual = torch.empty_like(parameter, device="meta").stride()
        order = dim_order(tensor)
        if strides_of(tensor.shape, order) != usual:
            orders[path] = order
    return orders


def check_optimizer(key: str, optimizer: Any) -> None:
    """Return if ``optimizer`` keeps all its state where it can be seen.

    Raises:
        UnsupportedValueError: It isn't a torch optimizer, or keeps state elsewhere.
    """
    label = label_of("optimizer", key)
    if not isinstance(optimizer, Optimizer):
        _refuse(label, f"is a {type(optimizer).__name__}", "Give a torch.optim.Optimizer.")
    if is_zero(optimizer):
        check_zero(label, optimizer)
        optimizer = inner_of(optimizer)
    if type(optimizer).state_dict is not Optimizer.state_dict:
        more = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
        if more:
            _refuse(
                label,
                f"({type(optimizer).__name__}) keeps {', '.join(map(str, more))} outside its state "
                "and param_groups",
                "Keep such values in `extra`.",
            )


def _refuse(path: str, what: str, next_step: str) -> NoReturn:
    raise UnsupportedValueError(f"{path} {what}.", next_step=next_step, path=path)
