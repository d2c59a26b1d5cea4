"""Seeds for one sample, and the global generators put back afterwards. No I/O.

Touches the state of Python's, NumPy's and torch's global generators.

Layer 1. Everything here is a rule that old runs rely on: numbers derived from a seed never change.
NumPy promises that ``SeedSequence`` and the raw stream of a bit generator stay as they are (NEP
19); nothing else of it is used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["MAX_SEED", "derive_key", "kept_generators", "mix", "seed_generators", "seed_sequence"]

MAX_SEED = 2**64 - 1
_MASK64 = 2**64 - 1


def seed_sequence(seed: int, number: int, purpose: int) -> np.random.SeedSequence:
    """Return the seed sequence of (seed, number, purpose); different triples never share one.

    Args:
        seed: 0 … 2**64 - 1.
        number: 0 … 2**64 - 1, an epoch for instance.
        purpose: 0 … 2**32 - 1, what the numbers are for.
    """
    # Five words of fixed width: SeedSequence strings words together, so that (2**32, 0) and (0, 1)
    # could meet.
    words = [seed & 0xFFFFFFFF, seed >> 32, number & 0xFFFFFFFF, number >> 32, purpose]
    return np.random.SeedSequence(words)


def derive_key(seed: int, number: int, purpose: int) -> int:
    """Return 64 bits for (seed, number, purpose), the ``key`` of `mix`. About 15 µs."""
    return int(seed_sequence(seed, number, purpose).generate_state(1, np.uint64)[0])


def mix(key: int, index: int) -> int:
    """Return 64 bits for ``index`` under ``key``: one step of splitmix64. About 0.5 µs.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed_generators(key: int) -> None:
    """Python's, NumPy's and torch's global CPU generators are seeded from the 64 bits of ``key``.

    CUDA's generators are left alone. About 8 µs; ``torch.manual_seed`` alone would take 97.
    """
    random.seed(key)
    # NumPy and torch both run MT19937 and take 32 bits: one seed for both would make them draw the
    # same numbers.
    other = mix(key, 0)
    torch.default_generator.manual_seed(other & 0xFFFFFFFF)
    np.random.seed(other >> 32)  # noqa: NPY002 - datasets draw from the global generator
    kind = type(np.random.mtrand.get_bit_generator())
    if kind is not np.random.MT19937:
        # The user has set another: NumPy seeds it alone then, and keeps the second of the last two
        # normal numbers for the next call.
        state = {**kind(other >> 32).state, "has_gauss": 0, "gauss": 0.0}
        np.random.set_state(state)  # noqa: NPY002 - as above


@contextmanager
def kept_generators() -> Iterator[None]:
    """Python's, NumPy's and torch's global CPU generators end as they were, also after an error."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    torch_cpu = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above
        torch.default_generator.set_state(torch_cpu)
