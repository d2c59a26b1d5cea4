"""A small training, in pieces that the scripts beside it put together, most of them wrongly."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import dist_ckpt

UNTIL = 40
NUM_ROWS = 24


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two variables and their product."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / NUM_ROWS, (index * 7 % 5) / 5])
        return x, x.prod()


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, dist_ckpt.ResumableLoader]:
    """Return model, optimizer, scheduler and data, the same in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return model, optimizer, scheduler, dist_ckpt.ResumableLoader(Rows(), 4, seed=1)


def run_dir() -> str:
    """Return the run directory of the command line."""
    return sys.argv[sys.argv.index("--run") + 1] if "--run" in sys.argv else "run"


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Make one update and return its loss."""
    loss: torch.Tensor = (model(x).squeeze(1) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
