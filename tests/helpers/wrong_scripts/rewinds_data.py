"""Wrong: the data begin anew in each process, after the Checkpointer has put them in place."""

import dist_ckpt
from pieces import UNTIL, build, run_dir, update

model, optimizer, scheduler, batches = build()
beginning = batches.state_dict()
with dist_ckpt.Checkpointer(
    run_dir(), model=model, optimizer=optimizer, scheduler=scheduler, data=batches
) as ckpt:
    batches.load_state_dict(beginning)
    for _ in ckpt.steps(until=UNTIL):
        ckpt.record(loss=update(model, optimizer, *next(batches)))
        scheduler.step()
