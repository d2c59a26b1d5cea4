"""Wrong: the model draws noise from a generator of its own that nobody saves."""

import torch
from torch import nn

import dist_ckpt
from pieces import UNTIL, build, run_dir, update


class Noise(nn.Module):
    """Adds noise to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with noise."""
        return x + 0.1 * torch.randn(x.shape, generator=self.source)


plain, *others, batches = build()
model = nn.Sequential(Noise(), plain)
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
with dist_ckpt.Checkpointer(run_dir(), model=model, optimizer=optimizer, data=batches) as ckpt:
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
