"""Makes step_000007.bin, the frozen example of the canonical format's first version.

Written with ``struct`` alone, so that it says what the format is without the code under test.
Run once; the result is kept and never made again by a test. Usage: ``python make_bin.py``.
"""

from __future__ import annotations

import struct
from pathlib import Path

STEP = 7
WEIGHTS = [0.0, -0.0, 1.0, -1.5, 3.4028234663852886e38, 1.401298464324817e-45]
M = [0.1, -0.2, 0.0, 2.0**-126, -1e-8, 0.5]
V = [0.01, 0.04, 0.0, 1e-12, 1e-16, 0.25]


def make() -> bytes:
    """Return the bytes of the file: 8 + 12 · 6 = 80."""
    num_params = len(WEIGHTS)
    header = struct.pack("<ii", STEP, num_params)
    return header + b"".join(struct.pack(f"<{num_params}f", *part) for part in (WEIGHTS, M, V))


if __name__ == "__main__":
    Path(__file__).with_name("step_000007.bin").write_bytes(make())
