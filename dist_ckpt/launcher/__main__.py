"""``python -m dist_ckpt.launcher`` is ``dist-ckpt run``. Layer 7."""

from __future__ import annotations

import sys

from dist_ckpt.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
