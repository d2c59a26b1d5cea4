"""Rewrite a generation for another number of ranks: ``python launch/reshard.py RUN@N …``.

    python launch/reshard.py runs/first@400 --world-size 1 -o runs/first-1

No GPU and no process group are needed. It is the same as ``dist-ckpt reshard``; ``--help`` lists
the options.
"""

from __future__ import annotations

import sys

from dist_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main(["reshard", *sys.argv[1:]]))
