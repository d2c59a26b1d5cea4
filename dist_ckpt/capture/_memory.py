"""How tensors inside values lie in memory: noted at a save, made again at a restore. Layer 3.

The elements of each are kept row-major, side by side. What that loses is noted beside it: strides,
the memory that several share, whether it is a parameter, whether it needs a gradient. Sums run in
another order over other strides, and what shares memory is updated together: both decide how a
training goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError
from dist_ckpt.tree import JSON, decode_tree

__all__ = ["MadeTensors", "NotedTensors", "dim_order", "strides_of"]

#: Memory may be so many times as large as the tensors in it; elements between them are zeros.
_SPREAD = 8
_MAX_NUMBER = 2**63 - 1
#: Bytes of the largest element.
_ALIGNED = 16

_Tensor: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, its dims lying in ``order``, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dim_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims as they lie in memory, outermost first."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -shape[dim], dim))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return how many elements' room a tensor spans; None where elements may share a place."""
    reach = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step < reach:
                return None
            reach += (size - 1) * step
    return reach


class _Noted(NamedTuple):
    """Where a tensor that was put lies, and its reference; sorted by place, then by number."""

    start: int
    stop: int
    number: int
    tensor: torch.Tensor
    node: dict[str, JSON]
    is_usual: bool


class NotedTensors:
    """Makes the references to the tensors of one rank's values; `finish` completes them.

    Args:
        put: Takes a path and a tensor; what it returns refers to it.
    """

    def __init__(self, put: Callable[[str, torch.Tensor], JSON]) -> None:
        self._put = put
        # By identity: the object is held as long, so that none takes another's place in memory.
        self._known: dict[int, tuple[_Tensor, dict[str, JSON]]] = {}
        self._noted: dict[torch.device, list[_Noted]] = defaultdict(list)

    def put(self, path: str, item: _Tensor) -> JSON:
        """Return the reference; one object has one, however often it occurs."""
        known = self._known.get(id(item))
        if known is not None:
            return known[1]
        tensor = item if isinstance(item, torch.Tensor) else _as_tensor(item)
        node: dict[str, JSON] = {"at": self._put(path, tensor.detach())}
        if tensor.device.type != "cpu":
            node["device"] = tensor.device.type
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            node["parameter"] = True
        if tensor.requires_grad and tensor.is_leaf:
            node["requires_grad"] = True
        self._known[id(item)] = item, node
        self._note(tensor, node)
        return node

    def _note(self, tensor: torch.Tensor, node: dict[str, JSON]) -> None:
        shape, size, start = tensor.shape, tensor.element_size(), tensor.data_ptr()
        is_plain = tensor.is_contiguous()
        extent = tensor.numel() if is_plain else _extent(shape, tensor.stride())
        if extent and start and start % size == 0:
            # One element, or one row, may have any stride and be contiguous to torch.
            is_usual = extent == 1 or (is_plain and 1 not in shape)
            stop = start + extent * size
            noted = self._noted[tensor.device]
            noted.append(_Noted(start, stop, len(self._known), tensor, node, is_usual))

    def finish(self) -> None:
        """Note in each reference what its tensor shares with others, and its strides."""
        for noted in self._noted.values():
            for group in _overlapping(noted):
                if len(group) > 1 or not group[0].is_usual:
                    _tell(group)
        self._known.clear()
        self._noted.clear()


def _tell(group: Sequence[_Noted]) -> None:
    unit = max(item.tensor.element_size() for item in group)
    base = min(item.start for item in group) // unit * unit
    span = max(item.stop for item in group) - base
    if span > _SPREAD * sum(item.tensor.nbytes for item in group):
        return  # too thinly spread to be made again: each comes back on its own
    for item in group:
        if len(group) > 1:
            item.node["shares"] = group[0].node["at"]
            if item.start > base:
                item.node["offset"] = item.start - base
        strides = item.tensor.stride()
        if not item.is_usual and strides != strides_of(item.tensor.shape):
            item.node["strides"] = list(strides)


def _as_tensor(item: np.ndarray[Any, Any]) -> torch.Tensor:
    # A copy where torch can't look at it in place, its dims lying as they did.
    steps = [step >= 0 and step % item.itemsize == 0 for step in item.strides]
    in_place = item.flags.writeable and item.flags.aligned and all(steps)
    return torch.from_numpy(item if in_place else item.copy(order="K"))


def _overlapping(noted: list[_Noted]) -> Iterator[list[_Noted]]:
    """Yield the tensors whose ranges of memory overlap together, in the order of `put`."""
    noted.sort()  # numbers differ, so that nothing behind them is compared
    group: list[_Noted] = []
    stop = 0
    for item in noted:
        if group and item.start >= stop:
            yield sorted(group, key=lambda item: item.number) if len(group) > 1 else group
            group = []
        group.append(item)
        stop = max(stop, item.stop)
    if group:
        yield sorted(group, key=lambda item: item.number)


_Key: TypeAlias = tuple[str, int, str]


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a memory: bytes from its beginning, elements from one to the next."""

    memory: _Key
    offset: int
    strides: tuple[int, ...]


class MadeTensors:
    """The tensors of one rank's values, as they lay when they were saved.

    Args:
        nodes: All trees that refer to them.
        get: Returns the tensor for what ``put`` returned: contiguous, on the CPU, its own memory.

    Raises:
        CorruptFileError: A place that `NotedTensors` gives to none.
    """

    def __init__(self, nodes: Iterable[JSON], get: Callable[[JSON], torch.Tensor]) -> None:
        self._get = get
        self._made: dict[int, torch.Tensor] = {}
        self._plain: dict[int, torch.Tensor] = {}
        self._places: dict[int, _Place] = {}
        self._sizes: dict[_Key, int] = defaultdict(int)
        self._memories: dict[_Key, torch.Tensor] = {}
        stored: dict[_Key, int] = defaultdict(int)
        for node in _references([list(nodes)]):
            at = node.get("at")
            if type(at) is not int or at in self._places:
                continue  # what is wrong with it, `get` says
            plain = self._plain[at] = get(at)
            place, stop = _place_of(node, plain)
            self._places[at] = place
            self._sizes[place.memory] = max(self._sizes[place.memory], stop)
            stored[place.memory] += plain.nbytes
        for memory, size in self._sizes.items():
            if size <= _SPREAD * stored[memory]:
                continue
            if memory[0] == "own":
                raise _malformed(f"memory of {size} bytes for tensors of {stored[memory]}")
            # What else lay there isn't restored: what is left begins with its first, or, where even
            # that is too far from its last, each is on its own, as at a save.
            own = {at: place for at, place in self._places.items() if place.memory == memory}
            low = min(place.offset for place in own.values()) // _ALIGNED * _ALIGNED
            self._sizes[memory] = size - low
            for at, place in own.items():
                if size - low <= _SPREAD * stored[memory]:
                    self._places[at] = replace(place, offset=place.offset - low)
                else:
                    del self._places[at]

    def get(self, node: JSON) -> torch.Tensor:
        """Return the tensor that ``node`` refers to; one object however often it occurs."""
        if not isinstance(node, dict) or type(node.get("at")) is not int:
            raise CorruptFileError(
                f"The saved state refers to a tensor by {node!r:.100}.",
                next_step="Verify the generation, or use another.",
            )
        at = node["at"]
        if at not in self._made:
            self._made[at] = self._make(at, node)
        return self._made[at]

    def _make(self, at: int, node: dict[str, JSON]) -> torch.Tensor:
        plain = self._plain.pop(at) if at in self._plain else self._get(at)
        device = decode_tree({"$device": node.get("device", "cpu")})
        place = self._places.get(at)
        if place is not None:
            tensor = self._placed(plain, place, device)
        else:
            tensor = plain if device.type == plain.device.type else plain.to(device)
        is_parameter, needs_grad = (node.get(name, False) for name in _FLAGS)
        can_need = tensor.is_floating_point() or tensor.is_complex()
        if {type(is_parameter), type(needs_grad)} != {bool} or (needs_grad and not can_need):
            raise _malformed(f"a tensor of {tensor.dtype} with {node!r:.100}")
        if is_parameter:
            return nn.Parameter(tensor, requires_grad=needs_grad)
        return tensor.requires_grad_() if needs_grad else tensor

    def _placed(self, plain: torch.Tensor, place: _Place, device: torch.device) -> torch.Tensor:
        memory = self._memories.get(place.memory)
        if memory is None:
            memory = _zeros(self._sizes[place.memory], device)
            self._memories[place.memory] = memory
        # No views of one another to autograd: as when each is taken from its storage.
        tensor = torch.empty(0, dtype=plain.dtype, device=device)
        offset = place.offset // plain.element_size()
        tensor.set_(memory.untyped_storage(), offset, plain.shape, place.strides)
        return tensor.copy_(plain)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if device.type != "cpu":
            raise
        # Its size was bounded by the tensors': a lack of memory speaks against no file.
        raise storage.no_memory("allocate", size) from error


_FLAGS = ("parameter", "requires_grad")


def _references(nodes: list[JSON]) -> Iterator[dict[str, JSON]]:
    """Yield each reference that says where its tensor lies."""
    while nodes:
        node = nodes.pop()
        items = node.values() if isinstance(node, dict) else node
        for item in items:
            if isinstance(item, dict):
                inner = item.get("$tensor", item.get("$ndarray"))
                if not isinstance(inner, dict):
                    nodes.append(item)
                elif "shares" in inner or "strides" in inner:
                    yield inner
            elif isinstance(item, list):
                nodes.append(item)


def _place_of(node: dict[str, JSON], plain: torch.Tensor) -> tuple[_Place, int]:
    """Return where a tensor lies, and the end of its bytes there."""
    strides = node.get("strides", list(strides_of(plain.shape)))
    offset, shares = node.get("offset", 0), node.get("shares")
    numbers = [*strides, offset] if isinstance(strides, list) else [None]
    numbers += [] if shares is None else [shares]
    if any(type(number) is not int or not 0 <= number <= _MAX_NUMBER for number in numbers):
        raise _malformed(f"a tensor at {node!r:.200}")
    extent = _extent(plain.shape, strides) if len(strides) == plain.dim() else None
    size = plain.element_size()
    if extent is None or not plain.numel() or offset % size:
        raise _malformed(f"a tensor of shape {list(plain.shape)} at {node!r:.200}")
    kind, number = ("own", node["at"]) if shares is None else ("shared", shares)
    memory = (kind, number, repr(node.get("device")))  # one on each device
    return _Place(memory, offset, tuple(strides)), offset + extent * size


def _malformed(what: str) -> CorruptFileError:
    return CorruptFileError(
        f"The saved state has {what}, which no save writes.",
        next_step="Verify the generation, or use another.",
    )
