"""Wrong: the data's state says nothing about what was consumed."""

from typing import Any

import torch

import dist_ckpt
from pieces import UNTIL, build, run_dir, update


class Endless:
    """The same batch for ever, and a state without a place."""

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 2), torch.ones(4)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing of use."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


model, optimizer, scheduler, _ = build()
batches = Endless()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches, data_id="ones"
) as ckpt:
    for _step in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        scheduler.step()
