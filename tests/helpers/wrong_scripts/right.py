"""Nothing is wrong here."""

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, scheduler, batches = build()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches
) as ckpt:
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        scheduler.step()
