"""What capture hands on: live tensors, a model's structure, differences. Layer 3, pure."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dist_ckpt.errors import MismatchError
from dist_ckpt.slices import TensorSpec
from dist_ckpt.tree import JSON

__all__ = ["LiveTensor", "Mismatches", "Stateful", "Structure", "TensorLike", "is_accepted"]

_SHOWN = 20


class Stateful(Protocol):
    """Anything that tells its state as a dict and takes it back."""

    def state_dict(self) -> Any:
        """Return the state: plain values, tensors, arrays."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` returned."""


class TensorLike(Protocol):
    """What a restore must know of a saved tensor; `TensorSpec` has it."""

    @property
    def dtype(self) -> str:
        """Name of torch's dtype, without ``torch.``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the training state, now.

    Attributes:
        spec: Its key, role, dtype, shape and boxes.
        tensor: What this rank holds of it: the boxes of ``spec``, side by side where there are
            several. Detached, sharing memory with the live object; any device, maybe not
            contiguous.
        is_updated: An optimizer updates it, and nothing else is meant to.
    """

    spec: TensorSpec
    tensor: torch.Tensor
    is_updated: bool = False


@dataclass(frozen=True, slots=True)
class Structure:
    """Names, shapes, dtypes and ties of a model's tensors, in the model's own order.

    Attributes:
        parameters: ``(name, dtype, shape)`` in canonical order, tied ones once.
        buffers: The same for persistent buffers.
        aliases: ``(other name, kept name)`` of everything tied.
    """

    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    buffers: tuple[tuple[str, str, tuple[int, ...]], ...]
    aliases: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """Return ``sha256:…``, equal for equal structures in whatever order they are declared.

        Which of several tied names is declared first doesn't matter either.
        """
        others: dict[str, list[str]] = defaultdict(list)
        for other, kept in self.aliases:
            others[kept].append(other)
        facts = sorted(
            [kind, sorted([name, *others[name]]), dtype, list(shape)]
            for kind, group in (("parameter", self.parameters), ("buffer", self.buffers))
            for name, dtype, shape in group
        )
        text = json.dumps(facts, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()}"

    def to_json(self) -> dict[str, JSON]:
        """Return plain JSON, in canonical order; `from_json` reads it back.

        ``{"parameters": [[name, dtype, shape]], "buffers": likewise, "aliases": [[other, kept]]}``
        """
        return {
            "parameters": [[name, dtype, list(shape)] for name, dtype, shape in self.parameters],
            "buffers": [[name, dtype, list(shape)] for name, dtype, shape in self.buffers],
            "aliases": [list(pair) for pair in self.aliases],
        }

    @classmethod
    def from_json(cls, node: Mapping[str, JSON]) -> Structure:
        """Return the structure that `to_json` wrote."""
        parameters, buffers = (
            tuple((name, str(dtype), tuple(shape)) for name, dtype, shape in node[kind])
            for kind in ("parameters", "buffers")
        )
        return cls(parameters, buffers, tuple((other, kept) for other, kept in node["aliases"]))


class Mismatches:
    """Collects every difference between what was saved and what is live, then raises them all.

    ``accepted`` are those that somebody has accepted, in words: they raise nothing.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.acceptable: list[str] = []
        self.accepted: list[str] = []

    def differ(self, what: str, saved: object, live: object) -> None:
        """Note that ``what`` was saved as ``saved`` and is ``live`` here."""
        self.different.append(f"{what} (saved {saved}, here {live})")

    def raise_if_any(self) -> None:
        """Return where everything fits.

        Raises:
            MismatchError: Something doesn't; ``missing``, ``unexpected`` and ``different`` list it
                all, the message shows the first 20 of each.
        """
        parts = [
            f"{len(found)} {label}: {_shown(found)}"
            for label, found in (
                ("missing in the saved state", self.missing),
                ("unknown to the live objects", self.unexpected),
                ("different", self.different),
            )
            if found
        ]
        num_found = len(self.missing) + len(self.unexpected) + len(self.different)
        next_step = "Build the same model, optimizer and parts as the saved run."
        if self.acceptable and len(self.acceptable) == num_found:
            words = ", ".join(map(repr, self.acceptable[:_SHOWN]))
            next_step = f"Give the same parts as the saved run, or accept it: accept=({words},)."
        if parts:
            raise MismatchError(
                f"The saved state doesn't fit the live objects. {'; '.join(parts)}.",
                next_step=next_step,
                missing=self.missing,
                unexpected=self.unexpected,
                different=self.different,
            )


def _shown(found: Sequence[str]) -> str:
    rest = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def is_accepted(word: str, accept: Collection[str]) -> bool:
    """Return whether the part ``word`` (``"extra.ema"``) or its kind (``"extra"``) is accepted."""
    return word in accept or word.split(".", 1)[0] in accept
