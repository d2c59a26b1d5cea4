"""Wrong: what is there is removed at the start."""

import os
import shutil

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, _, batches = build()
shutil.rmtree(os.environ.get("DIST_CKPT_RUN_DIR", run_dir()), ignore_errors=True)
with dist_ckpt.Checkpointer(run_dir(), model=model, optimizer=optimizer, data=batches) as ckpt:
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
