"""Names of the history's files in a run directory. Layer 4; `run_name` lists the directory."""

from __future__ import annotations

import os
from typing import Final

from dist_ckpt.storage import list_names

__all__ = ["FILES", "SIDECARS", "history_path", "run_name"]

FILES: Final = {
    "loss": ".loss.json",
    "metrics": ".metrics.jsonl",
    "samples": ".samples.json",
    "journal": ".journal.jsonl",
}
#: Written whole, not appended to; a pivot sets them aside.
SIDECARS: Final = {"state": ".state.json", "policy": ".policy.json"}


def history_path(run_dir: str | os.PathLike[str], name: str, what: str) -> str:
    """Return the path of one of `FILES` or `SIDECARS`, by its word (``"loss"``, ``"state"``, …)."""
    return os.path.join(os.fspath(run_dir), name + {**FILES, **SIDECARS}[what])


def run_name(run_dir: str | os.PathLike[str]) -> str:
    """Return the name with which the files of a run begin.

    It is the last component of the directory's path. Where files of one other name lie there
    (the directory was renamed, or is reached through a link), it is that name.

    Raises:
        NotFoundError: No such directory.
        StorageError: The file system refused.
    """
    name = os.path.basename(os.path.abspath(run_dir))
    present = list_names(run_dir)
    for suffix in (FILES["journal"], FILES["loss"]):
        others = {other.removesuffix(suffix) for other in present if other.endswith(suffix)}
        if name not in others and len(others) == 1:
            return others.pop()
    return name
