"""Optimizer state by parameter name: fitting what was saved to the live one. Layer 3.

State is assigned, not loaded: ``Optimizer.load_state_dict`` casts moments to the parameter's dtype,
aliases what it is given and overwrites flags. Groups are filled in place, since schedulers hold
references to them. No step is ever run to make state: hooks would fire, and training would differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import torch
from torch.optim import ASGD, Optimizer

from dist_ckpt.capture._memory import strides_of
from dist_ckpt.capture._optim import OptimizerStates, encode_name, iter_groups, label_of
from dist_ckpt.capture._sharding import is_sharded
from dist_ckpt.capture._values import Mismatches, TensorLike
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.capture._zero import inner_of, is_zero
from dist_ckpt.errors import CorruptFileError
from dist_ckpt.tree import JSON, TORCH_DTYPES, decode_tree

__all__ = ["StatePlan", "check_groups", "load_groups"]

# How the update is computed, not what: the choice of whoever built the optimizer here.
_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_HOST_SCALARS = ("step", "mu_product")


def check_groups(
    key: str,
    saved: JSON,
    optimizer: Optimizer,
    view: ModelView,
    found: Mismatches,
    *,
    elsewhere: Collection[str] = (),
) -> None:
    """Note in ``found`` each group whose parameters aren't those of the saved one in its place.

    Parameters ``elsewhere`` belong to other ranks (pipeline stages), and to their groups.
    """
    label = label_of("optimizer", key)
    if len(saved["groups"]) != len(optimizer.param_groups):
        found.differ(
            f"number of {label}'s groups", len(saved["groups"]), len(optimizer.param_groups)
        )
        return
    pairs = zip(saved["groups"], iter_groups(optimizer, view), strict=True)
    for index, (group, (_, names)) in enumerate(pairs):
        wanted = sorted(_here(group["params"], view, elsewhere))
        if wanted != sorted(names):
            only_saved = sorted(set(wanted) - set(names))[:20]
            only_live = sorted(set(names) - set(wanted))[:20]
            found.differ(
                f"parameters of {label}/param_groups/{index}",
                f"{len(wanted)}, among them {only_saved}",
                f"{len(names)}, among them {only_live}",
            )


def is_kin(kind: str, optimizer: Optimizer) -> bool:
    """Return whether a class of this name is the optimizer's, above it or below it (Adam, AdamW).

    State of such a one can be gone on with; to any other optimizer it means nothing.
    """
    own = type(inner_of(optimizer))
    above = {cls.__name__ for cls in own.__mro__ if cls not in Optimizer.__mro__}
    return kind in above or kind in _names_below(own)


def _names_below(cls: type[Optimizer]) -> set[str]:
    names: set[str] = set()
    for below in cls.__subclasses__():
        names |= {below.__name__, *_names_below(below)}
    return names


def names_of(saved: Mapping[str, JSON], keys: Collection[str], view: ModelView) -> set[str]:
    """Return the names of the parameters that these optimizers were saved with, and have here."""
    groups = [group for key in keys if key in saved for group in saved[key]["groups"]]
    names = {name for group in groups for name in group["params"]}
    return names | {view.kept_name(name) for name in names}


def _here(names: Sequence[str], view: ModelView, elsewhere: Collection[str]) -> list[str]:
    return [view.kept_name(name) for name in names if name not in elsewhere]


def load_groups(
    key: str,
    saved: JSON,
    optimizer: Optimizer,
    view: ModelView,
    elsewhere: Collection[str] = (),
) -> list[str]:
    """Every group holds the saved values, in place, and its parameters in the saved order.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` stay as they were built.

    Returns:
        A note for each flag that was saved with another value.
    """
    notes = []
    pairs = zip(saved["groups"], iter_groups(optimizer, view), strict=True)
    for index, (entry, (group, names)) in enumerate(pairs):
        if not is_zero(optimizer):  # it has divided its parameters by their present order
            _reorder(group, names, _here(entry["params"], view, elsewhere))
        for name, value in _decode_dict(entry["values"], "a group").items():
            if name in _FLAGS and name in group:
                if group[name] != value:
                    where = f"{label_of('optimizer', key)}/param_groups/{index}/{name}"
                    notes.append(f"{where}: saved as {value}, stays {group[name]}")
            else:
                with torch.no_grad():
                    group[name] = _filled(group.get(name), value)
    return notes


def _reorder(group: dict[str, Any], names: list[str], wanted: list[str]) -> None:
    if names == wanted:
        return
    places = defaultdict(list)
    for place, name in enumerate(names):
        places[name].append(place)
    order = [places[name].pop(0) for name in wanted]
    # In place: LBFGS holds a reference to the list.
    group["params"][:] = [group["params"][place] for place in order]
    if "param_names" in group:
        group["param_names"] = [group["param_names"][place] for place in order]


def _filled(live: Any, value: Any) -> Any:
    """Return ``value``, in the live tensors where there are such: also inside tuples and lists.

    A CUDA graph, or the user, may hold those very tensors (``lr``, one of ``betas``).
    """
    if isinstance(live, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            return live.fill_(value)
        if live.shape == value.shape and live.dtype == value.dtype:
            return live.copy_(value)
        return value.to(live.device)
    if isinstance(live, tuple | list) and type(live) is type(value) and len(live) == len(value):
        return type(value)(map(_filled, live, value))
    return value


class StatePlan:
    """New state for the live optimizers, built aside and put in place at once by `apply`.

    Args:
        optimizers: The live optimizers by key.
        view: The live model.
        states: What the optimizers hold now; tensors that fit are filled where they are.
        saved: ``shared["optimizers"]``.
        ties: ``shared["ties"]``: tensors that were one object when saved are one again.
        elsewhere: Names of parameters that only other ranks have.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        view: ModelView,
        states: OptimizerStates,
        saved: Mapping[str, JSON],
        ties: Mapping[str, str],
        *,
        elsewhere: Collection[str] = (),
    ) -> None:
        self.elsewhere = frozenset(elsewhere)
        pairs = [(self._split(tied, view), first) for tied, first in ties.items()]
        self.ties = {place: first for place, first in pairs if place[0] not in self.elsewhere}
        self.optimizers = optimizers
        self.view = view
        self.states = states
        self.paths: dict[str, dict[str, tuple[str, TensorLike]]] = defaultdict(dict)
        self.trees: dict[str, JSON] = {}
        self.homes: dict[str, Mapping[str, str]] = {}
        self.layouts: dict[str, dict[frozenset[str], list[str]]] = {}
        self.orders: dict[str, dict[str, list[int]]] = {}
        for key, entry in saved.items():
            self.homes[key] = entry["homes"]
            self.layouts[key] = {frozenset(layout): layout for layout in entry["layouts"]}
            self.trees.update(
                (view.kept_name(name), tree)
                for name, tree in entry["trees"].items()
                if name not in self.elsewhere
            )
            self.orders.update(
                (view.kept_name(name), orders) for name, orders in entry.get("orders", {}).items()
            )
        self.groups = {
            id(parameter): group
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.new: list[tuple[Optimizer, torch.nn.Parameter, dict[Any, Any] | None]] = []

    def add(self, key: str, spec: TensorLike) -> None:
        """Note one saved tensor ``optimizer/<name>/<path>``; other ranks' are passed over."""
        name, path = self._split(key, self.view)
        if name not in self.elsewhere:
            self.paths[name][path] = (key, spec)

    def check(self, stateless: Sequence[str], found: Mismatches) -> None:
        """Note in ``found`` state without a live parameter, and parameters without saved state.

        A layout knows tensors only and may call a parameter stateless whose state is a number: what
        was saved counts.
        """
        without = {self.view.kept_name(name) for name in stateless}
        saved = {*self.paths, *self.trees, *(name for name, _ in self.ties)}
        # What is wrong with the parameter itself has been said already.
        told = {*found.missing, *found.unexpected}
        live = self.states.owners
        strangers = [name for name in sorted(saved) if name not in live]
        lost = [name for name in live if name not in saved and name not in without]
        found.unexpected += [
            f"optimizer/{n}" for n in strangers if f"model/{encode_name(n)}" not in told
        ]
        found.missing += [f"optimizer/{n}" for n in lost if f"model/{encode_name(n)}" not in told]
        for paths in self.paths.values():
            found.different += [
                f"{key} (dtype {spec.dtype} isn't known)"
                for key, spec in paths.values()
                if spec.dtype not in TORCH_DTYPES
            ]

    def build(self) -> dict[str, torch.Tensor]:
        """Return key → tensor to be filled, of the state that `apply` will put in place.

        Of parameters whose state another rank keeps there is none. Nothing live has changed when
        this returns.
        """
        targets: dict[str, torch.Tensor] = {}
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        held = self.states.held
        for name, paths in self.paths.items():
            for path, (key, spec) in paths.items() if name in held else ():
                parts[name][path] = targets[key] = self._target(name, path, spec)
        for (name, path), first in self.ties.items():
            if name in held:
                if first not in targets:
                    raise _malformed(f"{name}/{path} is tied to {first!r}, which isn't there")
                parts[name][path] = targets[first]
        for name, owner in self.states.owners.items():
            if name not in held:
                continue
            found = name in parts or name in self.trees
            state = self._state(name, owner, parts[name]) if found else None
            self.new.append((self.optimizers[owner], self.view.parameters[name], state))
        return targets

    @staticmethod
    def _split(key: str, view: ModelView) -> tuple[str, str]:
        parts = key.split("/", 2)
        if len(parts) != 3 or parts[0] != "optimizer":
            raise _malformed(f"{key!r} names no tensor of an optimizer")
        return view.kept_name(unquote(parts[1])), parts[2]

    def apply(self) -> None:
        """Every live parameter has the state that was built, or none."""
        for optimizer, parameter, state in self.new:
            if state is None:
                inner_of(optimizer).state.pop(parameter, None)
            else:
                inner_of(optimizer).state[parameter] = state

    def _target(self, name: str, path: str, spec: TensorLike) -> torch.Tensor:
        dtype = TORCH_DTYPES[spec.dtype]
        shape = tuple(spec.shape)
        strides = self._strides(name, path, shape)
        live = self.states.by_param.get(name)
        if live is not None and live.tree is None and name not in self.trees:
            tensor = live.tensors.get(path)
            fits = tensor is not None and tensor.dtype == dtype and tuple(tensor.shape) == shape
            if tensor is not None and fits and strides in (None, tensor.stride()):
                return tensor
        parameter = self.view.parameters[name]
        owner = self.states.owners[name]
        if shape and shape == tuple(parameter.shape):
            is_offloaded = self.homes.get(owner, {}).get(path) == "host"
            device = "cpu" if is_offloaded and not is_sharded(parameter) else None
            if strides is not None:
                where = device or parameter.device
                return torch.empty_strided(shape, strides, dtype=dtype, device=where)
            return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        if shape and is_sharded(parameter):
            # As torch makes it there: Adafactor's rows and columns are whole on every rank.
            whole: torch.Tensor = parameter.detach().new_empty(shape, dtype=dtype)
            return whole
        group = self.groups[id(parameter)]
        optimizer = inner_of(self.optimizers[owner])
        on_host = lies_on_host(path, group, optimizer, self.homes.get(owner, {}))
        home = torch.device("cpu") if on_host else parameter.device
        return torch.empty_strided(shape, strides or strides_of(shape), dtype=dtype, device=home)

    def _strides(self, name: str, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the strides of a tensor whose dims lay in an order of their own."""
        order = self.orders.get(name, {}).get(path)
        if order is None or is_sharded(self.view.parameters[name]):
            return None
        if sorted(order) != list(range(len(shape))):
            raise _malformed(f"the dims of {name}/{path} lie in the order {order}")
        return strides_of(shape, order)

    def _state(self, name: str, owner: str, tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
        tree = self.trees.get(name)
        if tree is not None:

            def get(path: JSON) -> torch.Tensor:
                if not isinstance(path, str) or path not in tensors:
                    raise _malformed(f"the state of {name} refers to {path!r}, which isn't there")
                return tensors[path]

            return _decode_dict(tree, f"the state of {name}", get)
        order = self.layouts.get(owner, {}).get(frozenset(tensors), tensors)
        return {unquote(path): tensors[path] for path in order}


def _decode_dict(
    tree: JSON, what: str, get: Callable[[JSON], torch.Tensor] | None = None
) -> dict[Any, Any]:
    found = decode_tree(tree, get_tensor=get)
    if not isinstance(found, dict):
        raise _malformed(f"{what} is a {type(found).__name__}")
    return found


def _malformed(what: str) -> CorruptFileError:
    return CorruptFileError(
        f"The saved state isn't one of an optimizer: {what}.",
        next_step="Verify the generation, or use another.",
    )


def lies_on_host(
    path: str, group: Mapping[str, Any], optimizer: Optimizer, homes: Mapping[str, str]
) -> bool:
    """Return whether a state tensor that isn't shaped like its parameter belongs on the CPU.

    torch keeps ``step`` there unless a flag of the group says otherwise. For everything else, it
    lies where it lay when it was saved (``homes``), or else beside its parameter.
    """
    if isinstance(optimizer, ASGD):
        return False
    if path in _HOST_SCALARS and ("capturable" in group or "fused" in group):
        return not (group.get("capturable") or group.get("fused"))
    return homes.get(path, "host" if path == "step" else "device") == "host"
