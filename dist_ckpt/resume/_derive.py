"""Random state for ranks that the saved job didn't have. Layer 5, no I/O.

A rank that existed keeps its generators. A new one can't: nobody drew for it. It derives its own
from rank 0's saved state, the step and its rank, so that the same resume gives the same draws again
and no two ranks share theirs.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dist_ckpt.errors import UsageError
from dist_ckpt.seeding import mix, seed_generators
from dist_ckpt.tree import decode_tree, encode_tree

__all__ = ["derive_rng", "derived_states"]


def derive_rng(
    saved: Any,
    *,
    step: int,
    rank: int,
    generators: Mapping[str, torch.Generator | np.random.Generator | random.Random],
) -> None:
    """Seed every generator of this process from saved state, step and rank.

    Args:
        saved: Tagged JSON of rank 0's generators; only its text is used.
        step: The resume point's step.
        rank: This rank, one that the saved job didn't have.
        generators: The user's own, by name.
    """
    words = _words(saved, step, rank, 2 + len(generators))
    torch.manual_seed(words[0] >> 1)  # CUDA's generators, too
    seed_generators(words[1])
    for (_, generator), word in zip(sorted(generators.items()), words[2:], strict=True):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(word >> 1)
        elif isinstance(generator, np.random.Generator):
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(word).state
        else:
            generator.seed(word)


def derived_states(saved: Any, *, step: int, rank: int) -> Any:
    """Return the states that `derive_rng` would leave, as `encode_rng` tells them; seeds nothing.

    Args:
        saved: Tagged JSON of rank 0's generators.
        step: The resume point's step.
        rank: A rank that the saved job didn't have.

    Raises:
        UsageError: A generator of a kind whose state can't be made without its device.
    """
    named = saved.get("named", {})
    words = _words(saved, step, rank, 2 + len(named))
    other = mix(words[1], 0)
    numpy = saved.get("numpy")
    kind = "MT19937" if numpy is None else decode_tree(numpy)["bit_generator"]
    cuda = None
    if saved.get("cuda") is not None:
        cuda = encode_tree(_cuda_state(words[0] >> 1), path="rng/cuda")
    return {
        "python": encode_tree(_python_state(words[1]), path="rng/python"),
        "numpy": encode_tree(_numpy_state(kind, other >> 32), path="rng/numpy"),
        "torch": encode_tree(_torch_state(other & 0xFFFFFFFF), path="rng/torch"),
        "cuda": cuda,
        "named": {
            name: {"kind": named[name]["kind"], "state": _named_state(name, named[name], word)}
            for name, word in zip(sorted(named), words[2:], strict=True)
        },
    }


def _words(saved: Any, step: int, rank: int, count: int) -> list[int]:
    text = json.dumps([saved, step, rank], sort_keys=True).encode()
    seeds = np.random.SeedSequence(int.from_bytes(hashlib.sha256(text).digest(), "little"))
    return [int(word) for word in seeds.generate_state(count, np.uint64)]


def _python_state(seed: int) -> Any:
    return random.Random(seed).getstate()  # noqa: S311 - training's randomness, no secret


def _torch_state(seed: int) -> bytes:
    return torch.Generator().manual_seed(seed).get_state().numpy().tobytes()


def _cuda_state(seed: int) -> bytes:
    # What torch keeps of a CUDA generator: the seed and how many numbers were drawn. It is that of
    # every device that the new rank will use, as after `torch.manual_seed`.
    return struct.pack("<Qq", seed, 0)


def _numpy_state(kind: str, seed: int) -> dict[str, Any]:
    if kind == "MT19937":
        source = np.random.RandomState(seed)
    else:
        source = np.random.RandomState(getattr(np.random, kind)(seed))
    return dict(source.get_state(legacy=False))


def _named_state(name: str, node: Any, word: int) -> Any:
    library, _, kind = node["kind"].partition(":")
    path = f"generators.{name}"
    state: Any
    if library == "python":
        state = _python_state(word)
    elif library == "numpy":
        state = getattr(np.random, kind)(word).state
    elif kind == "cpu":
        state = _torch_state(word >> 1)
    elif kind == "cuda":
        state = _cuda_state(word >> 1)
    else:
        raise UsageError(
            f"{path} is a torch generator on {kind}, whose state can't be made without one.",
            next_step="Resume on the new number of ranks instead: it needs no rewriting.",
            path=path,
        )
    return encode_tree(state, path=path)
