"""What ranks tell each other: agreement, reports and outcome of a save. Layer 2, network I/O.

The only place that calls torch.distributed. Two ways lead from rank to rank, and they never meet:

- collectives on a gloo group of our own, blocking, on the thread that connected (agree, mean,
  gather, broadcast, together): fast, but a time-out spoils such a group for good, and two threads
  in one group hang;
- reports through a clone of the job's store, on a background thread (exchange): slower, can be
  tried again.

Every wait has a limit, and every failure is a `JobError` that names the ranks it can name.
"""

from __future__ import annotations

from dist_ckpt.comm._base import Comm
from dist_ckpt.comm._connect import connect, place_in_job
from dist_ckpt.comm._solo import SoloComm

__all__ = ["Comm", "SoloComm", "connect", "place_in_job"]
