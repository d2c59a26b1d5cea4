"""Wrong: nothing seeds torch, so that no two runs are the same."""

import torch

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, _, batches = build()
torch.seed()
with dist_ckpt.Checkpointer(run_dir(), model=model, optimizer=optimizer, data=batches) as ckpt:
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
