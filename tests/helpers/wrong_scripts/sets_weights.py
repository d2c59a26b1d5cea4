"""Wrong: a layer is set anew in each process, after the Checkpointer has put it in place."""

import torch

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, scheduler, batches = build()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches
) as ckpt:
    with torch.no_grad():
        model[3].bias.zero_()  # type: ignore[index]
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        scheduler.step()
