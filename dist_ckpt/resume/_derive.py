"""Random state for ranks that the saved job didn't have. Layer 5, no I/O.

A rank that existed keeps its generators. A new one can't: nobody drew for it. It derives its own
from rank 0's saved state, the step and its rank, so that the same resume gives the same draws again
and no two ranks share theirs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dist_ckpt.seeding import seed_generators

__all__ = ["derive_rng"]


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
    text = json.dumps([saved, step, rank], sort_keys=True).encode()
    seeds = np.random.SeedSequence(int.from_bytes(hashlib.sha256(text).digest(), "little"))
    words = [int(word) for word in seeds.generate_state(2 + len(generators), np.uint64)]
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
