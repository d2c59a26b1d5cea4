"""Wrong: gradients of one step are used in the next, so that no boundary is closed."""

import torch

import dist_ckpt
from pieces import UNTIL, build, run_dir

model, optimizer, scheduler, batches = build()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches
) as ckpt:
    for _ in ckpt.steps(until=UNTIL):
        x, y = next(batches)
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(0.5))
        scheduler.step()
        ckpt.record(loss=loss)
