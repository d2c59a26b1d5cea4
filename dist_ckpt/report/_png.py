"""Curves → a PNG, by matplotlib, which is imported here alone. Layer 7."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from dist_ckpt.errors import UsageError
from dist_ckpt.report._plot import Panel

__all__ = ["draw_png"]

#: Of the exponential mean: the weight of what was before.
_KEEP = 0.98
_RAW_ALPHA = 0.35
_MIN_SMOOTHED = 50


def draw_png(panels: Sequence[Panel]) -> bytes:
    """Return a picture of the curves, a smoothed line over a faint one each.

    Raises:
        UsageError: matplotlib isn't installed.
    """
    try:
        # Not pyplot: that looks for a display.
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise UsageError(
            "--png needs matplotlib, which isn't installed.",
            next_step="Install it: pip install 'dist-ckpt[report]'",
        ) from None
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, panel in enumerate(panels):
        steps = [step for step, _ in panel.entries]
        losses = [math.nan if loss is None else loss for _, loss in panel.entries]
        label, color = panel.name.replace("$", r"\$"), f"C{number % 10}"
        is_smoothed = len(steps) >= _MIN_SMOOTHED
        axes.plot(
            steps,
            losses,
            color=color,
            linewidth=0.8,
            alpha=_RAW_ALPHA if is_smoothed else 1.0,
            label=None if is_smoothed else label,
        )
        if is_smoothed:
            axes.plot(steps, _smooth(losses), color=color, linewidth=1.6, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if panels:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    return buffer.getvalue()


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the exponential mean of the finite losses so far, the first not weighing more."""
    means, total, weight = [], 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            total = _KEEP * total + (1 - _KEEP) * loss
            weight = _KEEP * weight + (1 - _KEEP)
        means.append(total / weight if weight else math.nan)
    return means
