"""The state that everybody saves, with a digest of each tensor. Layer 7."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from dist_ckpt.bench._plan import SMALL_TENSOR_BYTES

__all__ = ["TrainingState", "build_state"]

_WIDTH = 768
_PATTERN_NUMEL = 1 << 22
_KEYS = ("step", "exp_avg", "exp_avg_sq")
#: A parameter, its state as the optimizer holds it, and the tensors that belong in there.
_Held = tuple[nn.Parameter, dict[str, torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass
class TrainingState:
    """A model and its AdamW after a first update, without having made one.

    Attributes:
        model: Its parameters are all there is.
        optimizer: Its state is there for each of them.
        moment_dtype: Of both moments.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    moment_dtype: torch.dtype

    def __post_init__(self) -> None:
        """Make the optimizer's state: its objects are the same ever after, as in training."""
        self._groups = list(self.optimizer.param_groups)
        self._held: list[_Held] = []
        for parameter in self.model.parameters():
            moments = [torch.empty_like(parameter, dtype=self.moment_dtype) for _ in range(2)]
            self._held.append((parameter, {}, (torch.tensor(1.0), *moments)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor that must come back, by name: weights, moments, step counts."""
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            yield name, parameter.detach()
            for key in _KEYS:
                yield f"{name}.{key}", state[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and moments."""
        return sum(tensor.nbytes for _, tensor in self.tensors() if tensor.dim())

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor's bytes and dtype."""
        return {name: _digest(tensor) for name, tensor in self.tensors()}

    def rebuild(self) -> None:
        """Every tensor holds its first values again, and all objects are those of the start."""
        pattern = torch.randn(_PATTERN_NUMEL, generator=torch.Generator().manual_seed(0))
        self.optimizer.param_groups = list(self._groups)
        self.optimizer.state.clear()
        with torch.no_grad():
            for number, (parameter, state, tensors) in enumerate(self._held):
                for shift, tensor in enumerate((parameter.data, *tensors[1:])):
                    _fill(tensor, pattern, number + shift)
                tensors[0].fill_(1.0)
                state.clear()
                state.update(zip(_KEYS, tensors, strict=True))
                self.optimizer.state[parameter] = state

    def nudge(self, number: int) -> None:
        """Change a little, as an update would, without the time that one takes."""
        with torch.no_grad():
            next(self.model.parameters()).add_(0.5 + number)
            for state in self.optimizer.state.values():
                state["step"] += 1

    def scramble(self) -> None:
        """Change every element, as an update does: whoever still reads the live tensors is torn."""
        tensors = [tensor for _, tensor in self.tensors()]
        with torch.no_grad():
            torch._foreach_mul_(tensors, -3.0)


def build_state(kind: str, num_bytes: int) -> TrainingState:
    """Return a state of about ``num_bytes``, the same on every rank."""
    dtype = torch.bfloat16 if kind == "mixed" else torch.float32
    element_bytes = dtype.itemsize + 8
    shapes = _small(num_bytes) if kind == "small" else _transformer(num_bytes // element_bytes)
    model = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = TrainingState(model, optimizer, torch.float32)
    state.rebuild()
    return state


def _small(num_bytes: int) -> list[tuple[int, ...]]:
    numel = SMALL_TENSOR_BYTES // 4
    return [(numel,)] * max(num_bytes // (3 * SMALL_TENSOR_BYTES), 1)


def _transformer(num_params: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT of about so many parameters: a third of it the embedding."""
    layer = 12 * _WIDTH * _WIDTH + 2 * _WIDTH
    layers = num_params * 2 // 3 // layer
    shapes: list[tuple[int, ...]] = [(max((num_params - layers * layer) // _WIDTH, 1), _WIDTH)]
    for _ in range(layers):
        shapes += [(3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH)]
        shapes += [(4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH), (_WIDTH,), (_WIDTH,)]
    return shapes


def _fill(tensor: torch.Tensor, pattern: torch.Tensor, shift: int) -> torch.Tensor:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _PATTERN_NUMEL):
        part = flat[start : start + _PATTERN_NUMEL]
        first = (shift * 1031) % (_PATTERN_NUMEL // 2)
        source = pattern[first : first + part.numel()]
        part[: source.numel()].copy_(source)
        if rest := part.numel() - source.numel():
            part[source.numel() :].copy_(pattern[:rest])
    return tensor


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {xxhash.xxh3_64_hexdigest(flat.data)}"
