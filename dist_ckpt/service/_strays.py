"""What a program holds that decides its next steps and that nobody keeps: hints. Layer 6, pure.

A guess by looking: the variables of the program's frames and modules, and what hangs on them one
level deep. It names suspects when a proof has failed, and never decides anything.
"""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["find_strays", "listed"]

_GENERATORS = (
    torch.Generator, np.random.Generator, np.random.RandomState, random.Random,
)  # fmt: skip
_NO_LOOK = (types.ModuleType, type, types.FunctionType, str, bytes, torch.Tensor, np.ndarray)
_MAX_STRAYS = 20
_MAX_ITEMS = 1000


def find_strays(given: Sequence[Any], frame: types.FrameType | None) -> list[dict[str, str]]:
    """Return ``{"kind", "where", "type"}`` of generators and schedulers that weren't given.

    Args:
        given: All that was: objects, and dicts of them; models first, the data fifth.
        frame: The innermost frame of the program.
    """
    known = {id(torch.default_generator)}
    for item in given:
        known |= {id(one) for value in listed(item) for one in (value, *_inner(value))}
    found: dict[int, dict[str, str]] = {}
    for where, value in _reachable(given, frame, known):
        kind = _kind(value)
        if kind is not None and id(value) not in known and len(found) < _MAX_STRAYS:
            stray = {"kind": kind, "where": where, "type": type(value).__name__}
            found.setdefault(id(value), stray)
    return list(found.values())


def listed(value: Any) -> list[Any]:
    """Return a value, or those of a dict, as a list; ``[]`` for None."""
    if value is None:
        return []
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _inner(value: Any) -> list[Any]:
    inner = getattr(value, "_schedulers", None)
    return list(inner) if isinstance(inner, list | tuple) else []


def _kind(value: Any) -> str | None:
    if issubclass(type(value), _GENERATORS):
        return None if type(value) is random.SystemRandom else "generator"
    return "scheduler" if issubclass(type(value), LRScheduler) else None


def _reachable(
    given: Sequence[Any], frame: types.FrameType | None, known: set[int]
) -> Iterator[tuple[str, Any]]:
    for model in listed(given[0]):
        yield from _of_module(model)
    # A loader's data set: its own generators are nobody's. A loader of the user tells its state.
    dataset = getattr(given[4], "dataset", None)
    yield from _attributes("data.dataset", dataset)
    seen: set[int] = set()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        spaces = () if package in {"torch", "runpy"} else (frame.f_locals, frame.f_globals)
        for space in spaces:
            if id(space) in seen:
                continue
            seen.add(id(space))
            for name, value in list(space.items()):
                if isinstance(value, nn.Module):
                    yield from _of_module(value, name)
                elif id(value) not in known:
                    yield name, value
                    yield from _attributes(name, value)
        frame = frame.f_back


def _of_module(model: nn.Module, name: str = "model") -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        # Who has extra state of its own may keep its generators there.
        if type(module).get_extra_state is nn.Module.get_extra_state:
            yield from _attributes(f"{name}.{path}" if path else name, module)


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if value is None or issubclass(type(value), _NO_LOOK):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for key, item in list(attributes.items()):
            yield f"{name}.{key}", item
    elif isinstance(value, dict):
        for key, item in itertools.islice(list(value.items()), _MAX_ITEMS):
            yield f"{name}[{key!r}]", item
