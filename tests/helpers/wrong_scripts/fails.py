"""Wrong: it fails in its third step."""

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, scheduler, batches = build()
with dist_ckpt.Checkpointer(run_dir(), model=model, optimizer=optimizer, data=batches) as ckpt:
    for step in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        if step == 3:
            raise RuntimeError("the disk of the data is gone")
