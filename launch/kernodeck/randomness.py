"""The three generators as plain values: read, set, and observed without moving them.

Integers, text and one tensor of bytes: nothing that a restricted load would refuse, and no array
of NumPy's (case 22).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generator = np.random.Generator


def read_rng(generator: Generator) -> dict[str, Any]:
    """Return the state of Python's generator, of NumPy's PCG64 and of torch's on the CPU."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(generator.bit_generator.state)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            # 128 bits each: as text, since a file's integers may have 64.
            "state": str(numpy_state["state"]["state"]),
            "inc": str(numpy_state["state"]["inc"]),
            "has_uint32": int(numpy_state["has_uint32"]),
            "uinteger": int(numpy_state["uinteger"]),
        },
        "torch": torch.get_rng_state(),
    }


def restore_python(state: dict[str, Any]) -> None:
    """Python's generator goes on where it was."""
    random.setstate((state["version"], tuple(state["words"]), state["gauss"]))


def restore_numpy(state: dict[str, Any], generator: Generator) -> None:
    """NumPy's generator goes on where it was."""
    generator.bit_generator.state = {
        "bit_generator": state["bit_generator"],
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


def restore_torch(state: torch.Tensor) -> None:
    """Torch's generator goes on where it was."""
    torch.set_rng_state(state)


def restore_rng(state: dict[str, Any], generator: Generator) -> None:
    """All three generators go on where they were; to be called last, after all that draws."""
    restore_python(state["python"])
    restore_numpy(state["numpy"], generator)
    restore_torch(state["torch"])


def observe_draws(generator: Generator) -> dict[str, list[float]]:
    """Return the next draws of each generator; they are put back, so nothing has moved."""
    before = read_rng(generator)
    draws = {
        "python": [random.random() for _ in range(3)],  # noqa: S311 - not a secret
        "numpy": [float(value) for value in generator.standard_normal(3)],
        "torch": torch.rand(3, dtype=torch.float64).tolist(),
    }
    restore_python(before["python"])
    restore_numpy(before["numpy"], generator)
    restore_torch(before["torch"])
    return draws
