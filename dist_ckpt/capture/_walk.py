"""A model's tensors by name, wrappers taken off by type. Layer 3, reads only, no collective.

The walk visits modules in the order of ``named_parameters()``, which is the canonical order. A
wrapper's inner module adds no component to the name; a user's submodule that happens to be called
``module`` does, since wrappers are told by their type.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dist_ckpt.capture._sharding import check_held, local_of
from dist_ckpt.errors import UnsupportedValueError

__all__ = ["ModelView", "view_models"]

# (module that defines the type, type, attribute of the inner module). A type whose module was never
# imported has no instances, so nothing heavy is imported to look.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)

_NEXT_STEP = "Keep state in parameters, persistent buffers or get_extra_state()."
_OWN_STATE_DICT = (
    "Keep it in a persistent buffer that forward changes, in get_extra_state() or in `extra`, and "
    "leave state_dict() as torch has it."
)


@dataclass(slots=True)
class ModelView:
    """What one walk found.

    Attributes:
        parameters: Name → parameter, canonical order, tied ones once under their first name.
        buffers: Name → persistent buffer, likewise.
        transient: Name → buffer that isn't persistent; kept nowhere.
        slots: Name of each persistent buffer that is None → its module, and its name there.
        aliases: Every other name of a tied tensor → its kept name.
        extra_state: ``state_dict`` key → module, for modules that define ``get_extra_state``.
        names: ``id`` of each tensor → kept name.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    transient: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, nn.Module] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def kept_name(self, name: str) -> str:
        """Return the name under which the tensor called ``name`` is kept here."""
        return self.aliases.get(name, name)


def view_models(models: Mapping[str, nn.Module]) -> ModelView:
    """Return the tensors of all models; names are prefixed ``KEY.`` unless the key is empty.

    Modules of FSDP2 are resharded: after a forward without gradients they hold whole parameters
    that no optimizer knows.

    Raises:
        UnsupportedValueError: FSDP1, or two tensors of one name.
    """
    view = ModelView()
    walk = _Walk(view)
    for key, model in models.items():
        walk.visit(model, f"{key}." if key else "", ())
    return view


class _Walk:
    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.seen: set[int] = set()
        self.kinds: dict[type, str | None] = {}
        self.fsdp: set[type] = set()

    def visit(self, module: nn.Module, prefix: str, parents: tuple[int, ...]) -> None:
        view = self.view
        if id(module) in parents:
            _refuse(prefix[:-1], "is a module that contains itself")
        inner = self.inner_name(module, prefix)
        if type(module) in self.fsdp:
            module.reshard()  # type: ignore[operator]
        for local, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                self.keep(view.parameters, prefix + local, parameter)
        self.sort_buffers(module, prefix)
        if id(module) not in self.seen and _has_extra_state(module):
            view.extra_state[f"{prefix}_extra_state"] = module
        self.seen.add(id(module))
        for local, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                below = prefix if local == inner else f"{prefix}{local}."
                self.visit(child, below, (*parents, id(module)))

    def sort_buffers(self, module: nn.Module, prefix: str) -> None:
        view = self.view
        transient = module._non_persistent_buffers_set  # noqa: SLF001
        for local, buffer in module._buffers.items():  # noqa: SLF001
            if local not in transient:
                if buffer is None:
                    if not (local in _STATISTICS and isinstance(module, _NormBase)):
                        view.slots[prefix + local] = (module, local)
                else:
                    self.keep(view.buffers, prefix + local, buffer)
            elif buffer is not None:
                view.transient[prefix + local] = buffer

    def inner_name(self, module: nn.Module, prefix: str) -> str | None:
        """Return which child of ``module`` is what it wraps, or None for a module of the user."""
        cls = type(module)
        if cls not in self.kinds:
            if _is_a(cls, "FullyShardedDataParallel"):
                raise UnsupportedValueError(
                    f"{prefix[:-1] or 'The model'} is wrapped by FSDP1 (FullyShardedDataParallel), "
                    "which flattens parameters beyond recognition.",
                    next_step="Use FSDP2: torch.distributed.fsdp.fully_shard.",
                    path=prefix[:-1],
                )
            if _is_a(cls, "FSDPModule"):
                self.fsdp.add(cls)
            self.kinds[cls] = _wrapped_attribute(cls)
        return self.kinds[cls]

    def keep(self, group: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        view = self.view
        kept = view.names.get(id(tensor))
        if name in view.parameters or name in view.buffers or name in view.aliases:
            _refuse(f"model/{name}", "is the name of two tensors")
        if kept is not None:
            view.aliases[name] = kept
            return
        view.names[id(tensor)] = name
        group[name] = tensor


#: Of a norm: None says that it was built to track nothing.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


def _is_a(cls: type, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.startswith("torch.distributed")
        for base in cls.__mro__
    )


def _wrapped_attribute(cls: type) -> str | None:
    for module_name, type_name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module_name), type_name, None)
        if wrapper is not None and issubclass(cls, wrapper):
            return attribute
    return None


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def check_view(view: ModelView, models: Mapping[str, nn.Module]) -> None:
    """Return if everything that the models keep is in the view and can be kept.

    Raises:
        UnsupportedValueError: A tensor that can't be kept; or a module that writes more into its
            ``state_dict`` than its parameters, persistent buffers and extra state.
    """
    for group in (view.parameters, view.buffers):
        for name, tensor in group.items():
            check_held(tensor, f"model/{name}")
    own: dict[str, nn.Module] = {}
    for key, model in models.items():
        for name, module in model.named_modules(prefix=key):
            _check_state_dict(module, name)
            if _has_own_state_dict(module):
                own[name] = module
    if own:
        kept = {_memory(item) for item in (*view.parameters.values(), *view.buffers.values())}
    for name, module in reversed(own.items()):  # what an inner one adds is in an outer one's, too
        _check_own_state_dict(module, name, kept)


def _has_own_state_dict(module: nn.Module) -> bool:
    """Return whether anybody but torch has a say in what ``module.state_dict()`` returns.

    Only such a module is asked for it: with torch's wrappers alone the walk knows all there is.
    """
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())  # noqa: SLF001
    says: list[Any] = [type(module).state_dict, *hooks]
    if "state_dict" in vars(module):
        says.append(vars(module)["state_dict"])
    return any(not _is_of_torch(getattr(item, "func", item)) for item in says)


def _is_of_torch(function: Any) -> bool:
    return f"{getattr(function, '__module__', None)}.".startswith("torch.")


def _check_own_state_dict(module: nn.Module, name: str, kept: set[int]) -> None:
    """Return if all that ``module.state_dict()`` returns is kept, whatever it is called there.

    Tensors count as kept where they are of the name, or of the memory, of one that is.
    """
    path = f"model/{name}".rstrip("/")
    before = _versions(module)
    try:
        written = list(_leaves(_ask_state_dict(module), ""))
    except Exception as error:
        raise UnsupportedValueError(
            f"{path} ({type(module).__name__}) failed when its state_dict() was asked for.",
            next_step="Let state_dict() work without arguments, or leave it as torch has it.",
            path=path,
        ) from error
    known = {
        f"{prefix}.{local}" if prefix else local
        for prefix, child in module.named_modules(remove_duplicate=False)
        for local in (
            *child._parameters,  # noqa: SLF001
            *(child._buffers.keys() - child._non_persistent_buffers_set),  # noqa: SLF001
        )
    }
    more = [
        key
        for key, value in written
        if key not in known
        and not _is_extra_state(key)
        and not (isinstance(value, torch.Tensor) and _is_kept(value, kept))
    ]
    if more:
        what = f"({type(module).__name__}) adds {', '.join(more[:20])} in its state_dict"
        _refuse(path, what, _OWN_STATE_DICT)
    changed = [key for key, version in _versions(module).items() if before.get(key) != version]
    if changed:
        # Tensors are read where they lie: nobody would have them brought up to date at a save.
        names = ", ".join(changed[:20])
        what = f"({type(module).__name__}) writes {names} when its state_dict() is asked for"
        _refuse(path, what, _OWN_STATE_DICT)


def _is_kept(value: torch.Tensor, kept: set[int]) -> bool:
    return not value.numel() or _memory(value) in kept  # nothing is lost of what has no elements


def _ask_state_dict(module: nn.Module) -> Any:
    with suppress(TypeError):
        if (told := module.state_dict()) is not None:
            return told
    # One that only its parent calls: it is given what to fill, and what it returns doesn't count.
    told = OrderedDict()
    module.state_dict(destination=told, prefix="", keep_vars=False)
    return told


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"  # torch's name for it, which the walk knows


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (id(tensor), 0 if tensor.is_inference() else tensor._version)  # noqa: SLF001
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def _leaves(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and not _is_extra_state(str(key)):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _memory(tensor: torch.Tensor) -> int:
    """Return where its elements lie; a number of its own for a tensor that has none anywhere."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return local_of(tensor).untyped_storage().data_ptr() or -id(tensor)


def _check_state_dict(module: nn.Module, name: str) -> None:
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:  # noqa: SLF001
        return
    written: dict[str, Any] = {}
    module._save_to_state_dict(written, "", keep_vars=True)  # noqa: SLF001
    known = {*module._parameters, *module._buffers, "_extra_state"}  # noqa: SLF001
    more = sorted(set(written) - known)
    if more:
        _refuse(
            f"model/{name}",
            f"({type(module).__name__}) keeps {', '.join(more)} outside its parameters and buffers",
        )


def _refuse(path: str, what: str, next_step: str = _NEXT_STEP) -> NoReturn:
    raise UnsupportedValueError(f"{path} {what}.", next_step=next_step, path=path)
