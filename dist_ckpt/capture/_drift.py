"""What of a model changed while it trained, that no resume brings back. Layer 3, reads only.

Two things: a buffer that isn't persistent and yet changes, and a name that the program's own model
doesn't have when it is built. Both are looked for once, since looking costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeAlias

import torch

from dist_ckpt.capture._sharding import local_of
from dist_ckpt.capture._walk import ModelView

__all__ = ["Drift"]

#: So many elements of a buffer are looked at; spread over it where it has more.
_SAMPLE = 1 << 16
_SHOWN = 5

Facts: TypeAlias = tuple[str, tuple[int, ...]]


class Drift:
    """What a model looked like when it was built and when its training began.

    Args:
        built: The model as it was given.
    """

    def __init__(self, built: ModelView) -> None:
        self._built = _facts(built)
        self._slots = frozenset(built.slots)
        self._transient: dict[str, str] | None = None

    def begin(self, view: ModelView) -> None:
        """Note what buffers that aren't persistent hold now."""
        self._transient = {name: _digest(tensor) for name, tensor in view.transient.items()}

    def warnings(self, view: ModelView) -> list[str]:
        """Return what has changed since, for people, each with what to do about it."""
        told = []
        before = self._transient or {}
        changed = [n for n, tensor in view.transient.items() if before.get(n) != _digest(tensor)]
        if changed:
            told.append(
                f"{_names(changed)}: not saved, since it is registered with persistent=False, but "
                "it has changed since training began; a resume begins with what the program "
                "builds. If it is a cache that is computed anew, all is well; if the next step "
                "depends on it, register it persistent or keep it in `extra`."
            )
        now = _facts(view)
        odd = [n for n in now if now[n] != self._built.get(n) and n not in self._slots]
        odd += [name for name in self._built if name not in now]
        if odd:
            told.append(
                f"{_names(odd)}: not as when the model was built (new, gone, or of another shape "
                "or dtype); a resume will refuse what is saved now. Register it with its shape, "
                "or as a buffer that is None, when the model is built."
            )
        return told


def _facts(view: ModelView) -> dict[str, Facts]:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape))
        for group in (view.parameters, view.buffers)
        for name, tensor in group.items()
    }


def _names(names: Iterable[str]) -> str:
    found = [f"model/{name}" for name in names]
    rest = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def _digest(tensor: torch.Tensor) -> str:
    """Return what is another text where dtype, shape or a value that is looked at is another."""
    facts = "?"
    # Whatever has no shape or no bytes (lazy, nested, sparse, quantized, on the meta device, of a
    # class of its own) makes a warning less, no error.
    with suppress(Exception):
        facts = f"{tensor.dtype} {tuple(tensor.shape)}"
        facts += f" {hashlib.blake2b(_looked_at(tensor), digest_size=16).hexdigest()}"
    return facts


def _looked_at(tensor: torch.Tensor) -> bytes:
    local = local_of(tensor)
    while local.numel() > _SAMPLE:  # views only: an expanded one is larger than its memory
        dim = max(range(local.dim()), key=local.size)
        local = local[(slice(None),) * dim + (slice(None, None, 3),)]
    plain = local.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
