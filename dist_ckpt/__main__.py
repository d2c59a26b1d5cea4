"""``python -m dist_ckpt`` is ``dist-ckpt``."""

from __future__ import annotations

import sys

from dist_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
