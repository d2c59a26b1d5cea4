"""A picture of the first case: who holds training for how long, and when the bytes are safe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.bench._bars import median
from dist_ckpt.bench._plan import CASES, Options
from dist_ckpt.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "draw"]

_PANELS = (
    ("blocked", "memcpy", "training held, s"),
    ("durable", "write", "until durable, s"),
    ("warm", "read warm", "restored, warm, s"),
)
_OURS, _PEER, _WRONG = "#c2410c", "#64748b", "#cbd5e1"


def check_plot(options: Options, path: Path) -> None:
    """Refuse before anything is measured what :func:`draw` couldn't draw after it.

    Raises:
        UsageError: matplotlib isn't installed or knows no such picture, or there is no case for it.
    """
    kinds = _figure_class()().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UsageError(
            f"{path} has no ending of a picture, as .png and .svg are.",
            next_step="Give --plot PATH.png.",
            path=str(path),
        )
    if not any(case.has_savers for case in options.chosen()):
        names = ", ".join(case.name for case in CASES if case.has_savers)
        raise UsageError(
            "There is nothing to draw: none of the cases has saves in it.",
            next_step=f"Leave out --plot, or give --only one of {names} too.",
        )


def draw(document: Mapping[str, Any], path: Path) -> None:
    """The picture lies at ``path``; its name's ending says which kind (.png, .svg).

    Raises:
        UsageError: matplotlib isn't installed.
        IncompleteError: The run has no case with savers in it.
    """
    made = _figure_class()
    cases = [case for case in document["cases"] if "contenders" in case]
    if not cases:
        raise IncompleteError("There is nothing to draw.", next_step="Measure --only adamw.")
    case = cases[0]
    figure = made(figsize=(10, 3.6), layout="constrained")
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


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only where it is drawn
    except ImportError as error:
        raise UsageError(
            "A plot needs matplotlib.", next_step="pip install 'dist-ckpt[report]'"
        ) from error
    return Figure


def _colour(name: str, correct: str) -> str:
    if name == "dist_ckpt":
        return _OURS
    return _PEER if correct == "yes" else _WRONG
