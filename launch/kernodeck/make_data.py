"""Write the data of the mini-project: 24 rows, two variables and a target.

    python make_data.py rows.csv

The values come from Python's own generator and four operations, rounded to six digits, so that
every machine writes the same bytes. `rows.csv` beside this script is what it wrote.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_ROWS = 24
SEED = 24


def render() -> str:
    """Return the whole file as text."""
    generator = random.Random(SEED)  # noqa: S311 - data, not a secret
    lines = ["row,x1,x2,target"]
    for row in range(NUM_ROWS):
        x1, x2 = (round(2 * generator.random() - 1, 6) for _ in range(2))
        target = 0.8 * x1 - 0.5 * x2 + 0.6 * x1 * x2
        lines.append(f"{row},{x1:.6f},{x2:.6f},{target:.6f}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: make_data.py FILE", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(render(), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
