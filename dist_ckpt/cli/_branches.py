"""Runs that share a beginning, compared from where they part: a part of ``loss``. Layer 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt.cli._text import plain, table
from dist_ckpt.history import compare_branches

__all__ = ["describe_branches", "tell_branches"]


def describe_branches(curves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where the curves part and their means from there on, for programs.

    Args:
        curves: With ``label`` and canonical ``entries``.
    """
    found = compare_branches([[(step, loss) for step, loss in c["entries"]] for c in curves])
    names = [curve["label"] for curve in curves]
    document = found.to_json()
    windows = [*document["windows"], *([document["whole"]] if document["whole"] else [])]
    for window in windows:
        lowest = window["lowest"]
        window["lowest"] = None if lowest is None else names[lowest]
    return {"runs": names, **document}


def tell_branches(document: Mapping[str, Any]) -> str:
    """Return the same for people."""
    fork = document["fork_step"]
    parted = "they share no beginning" if fork is None else f"the same up to step {fork}"
    if document["whole"] is None:
        return f"\n{parted}; not all of them go on from there.\n"
    heads = ("steps", *document["runs"], "lower")
    windows = [*document["windows"], document["whole"]]
    rows = [
        (
            f"{window['first_step']}-{window['last_step']}",
            *(None if mean is None else f"{mean:.6g}" for mean in window["means"]),
            window["lowest"],
        )
        for window in windows
    ]
    plain_heads = [plain(head) for head in heads]
    means = table(plain_heads, rows, right=plain_heads[1:-1])
    return f"\n{parted}; mean loss from there on:\n{means}"
