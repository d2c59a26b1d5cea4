"""A training whose data are given by the step: ``import_script.py RUN_DIR SEED UNTIL``, any ranks.

Tied weights, no dropout: where it begins, and what it is then fed, is all that decides its weights.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import dist_ckpt


class Small(torch.nn.Module):
    """An embedding tied to the head, a layer between, one layer that is never used."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, width)
        self.middle = torch.nn.Linear(width, width)
        self.unused = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next token."""
        scores: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return scores


def train(run_dir: str, seed: int, until: int, *, width: int = 5, **given: Any) -> dict[str, Any]:
    """Train to ``until``; return what the caller may want to look at."""
    torch.manual_seed(seed)
    model = Small(width).to(given.pop("dtype", torch.float32))
    kind = given.pop("optimizer", torch.optim.AdamW)
    optimizer = kind(model.parameters(), **given.pop("options", {"lr": 0.01}))
    wrapped: torch.nn.Module = model
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    rank = int(os.environ.get("RANK", "0"))
    with dist_ckpt.Checkpointer(
        run_dir, model=wrapped, optimizer=optimizer, every=100, **given
    ) as ckpt:
        found = {"resumed": ckpt.resumed, "began": ckpt.step}
        for step in ckpt.steps(until=until):
            tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(step))
            own = tokens.chunk(world_size)[rank]
            wrapped(own).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [sorted(optimizer.state.get(p, {})) for p in model.parameters()]
    return {**found, "states": states, "model": model, "optimizer": optimizer}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    if "WORLD_SIZE" in os.environ:
        torch.distributed.destroy_process_group()
