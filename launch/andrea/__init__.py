"""ANDREA: a GPT in plain PyTorch, trained on the text that Python ships. What people copy from.

- `model`: the network and its presets, `tiny` to `andrea-120m`
- `text`: several named sources of bytes, and windows of them as a data set
- `bandit`: which source the next batch comes from: UCB, floors and ceilings, phases
- `mixture`: one loader for each source, as one state
- `training`: AdamW, the schedule, one update, mixed precision on CUDA, deterministic settings
- `sampling`: audit samples that leave the training's random numbers alone
"""

from __future__ import annotations

from andrea.bandit import Bandit, Phase, Settings
from andrea.mixture import Mixture
from andrea.model import GPT, PRESETS, GPTConfig
from andrea.sampling import generate
from andrea.text import TextWindows, data_id, load_sources
from andrea.training import Trainer, TrainingConfig, make_deterministic

__all__ = [
    "GPT",
    "PRESETS",
    "Bandit",
    "GPTConfig",
    "Mixture",
    "Phase",
    "Settings",
    "TextWindows",
    "Trainer",
    "TrainingConfig",
    "data_id",
    "generate",
    "load_sources",
    "make_deterministic",
]
