"""The smallest training, in the test's own process: some lines around a Checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dist_ckpt


def train_tiny(
    run: Path,
    until: int,
    *,
    body: Callable[[dist_ckpt.Checkpointer, int], None] = lambda _ckpt, _step: None,
    **settings: Any,
) -> dist_ckpt.Checkpointer:
    """Train three numbers; return the Checkpointer, which has ended.

    Args:
        run: The run directory.
        until: The last step.
        body: Called in each step's body, at its end.
        settings: Of the Checkpointer; also another model or optimizer, which isn't trained then.
    """
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"every": 2, "model": model, "optimizer": optimizer, **settings}
    with dist_ckpt.Checkpointer(run, **settings) as ckpt:
        for step in ckpt.steps(until):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).square().mean()
            loss.backward()
            optimizer.step()
            ckpt.record(loss=loss, twice=2 * loss)
            body(ckpt, step)
    return ckpt
