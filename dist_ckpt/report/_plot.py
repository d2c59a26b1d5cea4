"""Curves → lines of text for a terminal, in braille dots. Pure: layer 7.

A column of dots shows the whole range of the losses that fall into it, so no spike is thinned away.
Own code: the libraries for it thin out, or take a second for 200,000 points (decision 35).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt.history import LossEntry

__all__ = ["Panel", "draw_panels"]

_DOTS_X, _DOTS_Y = 2, 4
#: Bit of each dot in U+2800 …, by column and row from above.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_COLORS = (36, 33, 35, 32, 34, 31)
_LABEL_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve to draw.

    Attributes:
        name: Shown above it.
        entries: Rising in step; None is left out.
    """

    name: str
    entries: Sequence[LossEntry]


class _Canvas:
    """Dots, each with the number of the curve that set it last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._owner = [[0] * columns for _ in range(rows)]

    def bar(self, x: int, low: int, high: int, owner: int) -> None:
        """Set the dots of column ``x`` from ``low`` to ``high``, counted from below."""
        for y in range(low, high + 1):
            from_top = self.rows * _DOTS_Y - 1 - y
            row, column = from_top // _DOTS_Y, x // _DOTS_X
            self._bits[row][column] |= _BITS[x % _DOTS_X][from_top % _DOTS_Y]
            self._owner[row][column] = owner

    def line(self, row: int, *, colored: bool, braille: bool) -> str:
        """Return one row of characters."""
        text, color = "", None
        for bits, owner in zip(self._bits[row], self._owner[row], strict=True):
            wanted = _COLORS[owner % len(_COLORS)] if bits and colored else None
            if wanted != color:
                text += "\x1b[0m" if wanted is None else f"\x1b[{wanted}m"
                color = wanted
            text += (chr(_BLANK + bits) if braille else "*") if bits else " "
        return text.rstrip() if color is None else f"{text}\x1b[0m"


def draw_panels(
    panels: Sequence[Panel],
    *,
    width: int,
    rows: int = 10,
    colored: bool = False,
    braille: bool = True,
) -> list[str]:
    """Return the lines of all curves over one range of steps and losses.

    In colours they lie over each other; without, each has a frame of its own.

    Args:
        panels: The curves; those without a finite loss are left out.
        width: Characters of a line.
        rows: Lines of a frame.
        colored: The terminal shows colours.
        braille: It shows braille; else dots are stars.
    """
    shown = [(number, panel, _finite(panel.entries)) for number, panel in enumerate(panels)]
    shown = [(number, panel, points) for number, panel, points in shown if points]
    if not shown:
        return []
    steps = [points[place][0] for _, _, points in shown for place in (0, -1)]
    losses = [loss for _, _, points in shown for _, loss in points]
    x_range, y_range = (min(steps), max(steps)), (min(losses), max(losses))
    columns = max(10, width - _LABEL_WIDTH - 2)
    groups = [shown] if colored else [[one] for one in shown]
    lines: list[str] = []
    for group in groups:
        canvas = _Canvas(columns, rows)
        for number, _, points in group:
            _draw(canvas, points, x_range, y_range, number)
        if len(shown) > 1:
            names = [_name(number, panel, colored=colored) for number, panel, _ in group]
            lines.append(" " * (_LABEL_WIDTH + 2) + "   ".join(names))
        lines += _frame(canvas, x_range, y_range, colored=colored, braille=braille)
    return lines


def _finite(entries: Sequence[LossEntry]) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in entries if loss is not None and math.isfinite(loss)]


def _name(number: int, panel: Panel, *, colored: bool) -> str:
    color = _COLORS[number % len(_COLORS)]
    return f"\x1b[{color}m{panel.name}\x1b[0m" if colored else panel.name


def _draw(
    canvas: _Canvas,
    points: Sequence[tuple[int, float]],
    x_range: tuple[int, int],
    y_range: tuple[float, float],
    owner: int,
) -> None:
    """Draw the range of each column, joined to that of the column before."""
    ranges: dict[int, tuple[int, int]] = {}
    ends: dict[int, tuple[int, int]] = {}  # the first and last dot of a column
    for step, loss in points:
        x = _scale(step, x_range, canvas.columns * _DOTS_X - 1)
        y = _scale(loss, y_range, canvas.rows * _DOTS_Y - 1)
        low, high = ranges.get(x, (y, y))
        ranges[x] = (min(low, y), max(high, y))
        ends[x] = (ends.get(x, (y, y))[0], y)
    before: int | None = None
    for x in sorted(ranges):
        low, high = ranges[x]
        if before is not None:
            joint = (before + ends[x][0]) // 2  # half way here, so that slopes stay thin
            low, high = min(low, joint), max(high, joint)
        canvas.bar(x, low, high, owner)
        before = ends[x][1]


def _scale(value: float, ends: tuple[float, float], top: int) -> int:
    # Halves, so that the widest range of floats doesn't overflow.
    span = ends[1] / 2 - ends[0] / 2
    return round((value / 2 - ends[0] / 2) / span * top) if span > 0 else top // 2


def _frame(
    canvas: _Canvas,
    x_range: tuple[int, int],
    y_range: tuple[float, float],
    *,
    colored: bool,
    braille: bool,
) -> list[str]:
    bar, corner, rule = ("│", "└", "─") if braille else ("|", "+", "-")
    low, high = y_range
    middle = low / 2 + high / 2
    labels = {0: high, canvas.rows // 2: middle, canvas.rows - 1: low}
    if low == high:
        labels = {canvas.rows // 2: low}
    lines = []
    for row in range(canvas.rows):
        label = f"{labels[row]:.5g}" if row in labels else ""
        drawn = canvas.line(row, colored=colored, braille=braille)
        lines.append(f"{label:>{_LABEL_WIDTH}} {bar}{drawn}")
    first, last = map(str, x_range)
    gap = " " * max(1, canvas.columns - len(first) - len(last))
    indent = " " * (_LABEL_WIDTH + 1)
    lines.append(f"{indent}{corner}{rule * canvas.columns}")
    lines.append(f"{indent} {first}" + (f"{gap}{last}" if first != last else ""))
    return lines
