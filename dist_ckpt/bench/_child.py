"""One rank of one case: ``python -m dist_ckpt.bench._child ORDER ANSWER``. Layer 7."""

from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dist_ckpt.bench._answer import write_answer
from dist_ckpt.bench._flat import measure_flat
from dist_ckpt.bench._plan import decode_order
from dist_ckpt.bench._rounds import measure_case
from dist_ckpt.bench._scale import measure_scale

__all__: list[str] = []

_LIMIT = timedelta(seconds=600)
#: gloo's threads may be at work still when the interpreter ends, and abort it then.
_LAST_WAIT_SECS = 0.1


def main() -> None:
    """Measure; rank 0 writes the answer."""
    order, answer = sys.argv[1:]
    case, options, folder = decode_order(order)
    warnings.simplefilter("ignore")  # those of the peers, which nobody here can act on
    world_size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    dist.init_process_group("gloo", timeout=_LIMIT)
    if case.state == "flat":
        found = measure_flat(case, options.repeats, folder)
    elif case.state == "scale":
        found = measure_scale(case)
    else:
        found = measure_case(case, options, folder, partial(write_answer, Path(answer)))
    if dist.get_rank() == 0:
        write_answer(Path(answer), "", found, is_all=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(_LAST_WAIT_SECS)


if __name__ == "__main__":
    main()
