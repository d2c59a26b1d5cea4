"""torchrun with signals that work: ``python launch/torchrun.py [torchrun's options] SCRIPT …``.

SIGUSR1 makes the job write a checkpoint and go on; SIGTERM and Ctrl-C make it write and end with
status 0. It is the same as ``dist-ckpt run``; ``--help`` says what differs from torchrun.
"""

from __future__ import annotations

import sys

from dist_ckpt.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
