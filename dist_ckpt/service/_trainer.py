"""What a program gives to `Checkpointer`, in one place. Layer 6, pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_ckpt.capture import Captured
from dist_ckpt.service._policy import KeptPolicy
from dist_ckpt.service._settings import Settings

__all__ = ["Trainer"]


@dataclass(frozen=True)
class Trainer:
    """The user's side of a session: live objects and settings.

    Attributes:
        run_dir: The run directory.
        captured: The live objects.
        settings: What the user set.
        optimizers: Those that a copy from the GPU has to be fenced against.
        data: The data, for their identity.
        policy: The user's policy, or that there is none.
        generators: The user's generators, by name.
        given: Everything that was given to be kept, for a proof that asks what wasn't.
    """

    run_dir: Path
    captured: Captured
    settings: Settings
    optimizers: Sequence[torch.optim.Optimizer]
    data: Any
    policy: KeptPolicy
    generators: Mapping[str, Any]
    given: Sequence[Any] = ()
