"""A picture of the first case: who holds training for how long, and when the bytes are safe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_ckpt.bench._bars import median
from dist_ckpt.errors import IncompleteError, UsageError

__all__ = ["draw"]

_PANELS = (
    ("blocked", "memcpy", "training held, s"),
    ("durable", "write", "until durable, s"),
    ("warm", "read warm", "restored, warm, s"),
)
_OURS, _PEER, _WRONG = "#c2410c", "#64748b", "#cbd5e1"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """The picture lies at ``path``; its name's ending says which kind (.png, .svg).

    Raises:
        UsageError: matplotlib isn't installed.
        IncompleteError: The run has no case with savers in it.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only where it is drawn
    except ImportError as error:
        raise UsageError(
            "A plot needs matplotlib.", next_step="pip install 'dist-ckpt[report]'"
        ) from error
    cases = [case for case in document["cases"] if "contenders" in case]
    if not cases:
        raise IncompleteError("There is nothing to draw.", next_step="Measure --only adamw.")
    case = cases[0]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    names = list(case["contenders"])
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for axis, (key, limit, title) in zip(axes, _PANELS, strict=True):
        values = [median(case["contenders"][name]["samples"].get(key)) or 0.0 for name in names]
        colours = [_colour(name, case["contenders"][name]["correct"]) for name in names]
        axis.barh(names, values, color=colours)
        line = median(case["limits"].get(limit))
        if line:
            axis.axvline(line, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(
        f"{case['title']}, {case['bytes'] / 1e9:.2f} GB; dotted: the machine's limit; pale: what "
        "comes back isn't what was saved",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _colour(name: str, correct: str) -> str:
    if name == "dist_ckpt":
        return _OURS
    return _PEER if correct == "yes" else _WRONG
