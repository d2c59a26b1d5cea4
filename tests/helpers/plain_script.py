"""A script that knows nothing of dist_ckpt: says who it is and sleeps."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    log = Path(sys.argv[1]) / f"rank_{os.environ['RANK']}.log"
    log.write_text(f"0 pid {os.getpid()}\n0 launch {os.environ['DIST_CKPT_LAUNCH_ID']}\n")
    time.sleep(600)
