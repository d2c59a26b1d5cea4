"""Wrong: each process seeds torch once more when its loop has begun."""

import torch

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, scheduler, batches = build()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches
) as ckpt:
    is_first = True
    for _ in ckpt.steps(until=UNTIL):
        if is_first:
            torch.manual_seed(0)
            is_first = False
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        scheduler.step()
