"""Names that tell runs apart: a copy, or a renamed directory, keeps its files' name. Layer 6.

Pure, but for the working directory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from dist_ckpt.runs._run import Run

__all__ = ["label_runs"]


def label_runs(runs: Sequence[Run], *, with_paths: bool = False) -> list[str]:
    """Return a label for each run, no two the same.

    It is the run's name; where several have it, their directories' own names; where those don't
    tell them apart either, the later ones get a number.

    Args:
        runs: The runs, in their order.
        with_paths: Paths as they were given come before numbers.
    """
    labels = [run.name for run in runs]
    for spell in (_directory, _path) if with_paths else (_directory,):
        counts = Counter(labels)
        labels = [
            spell(run) if counts[label] > 1 else label
            for run, label in zip(runs, labels, strict=True)
        ]
    return _numbered(labels)


def _directory(run: Run) -> str:
    return os.path.basename(os.path.abspath(run.path))


def _path(run: Run) -> str:
    return str(run.path)


def _numbered(labels: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for label in labels:
        unique, number = label, 1
        while unique in found:
            number += 1
            unique = f"{label}~{number}"
        found[unique] = None
    return list(found)
