"""Wrong for a proof: two trainings in one process."""

import dist_ckpt
from pieces import build, run_dir, update

for until in (2, 4):
    model, optimizer, _, batches = build()
    with dist_ckpt.Checkpointer(run_dir(), model=model, optimizer=optimizer, data=batches) as ckpt:
        for _ in ckpt.steps(until=until):
            ckpt.record(loss=update(model, optimizer, *next(batches)))
