"""Numbers, times and tables in words. Layer 8, pure.

Tables are aligned here: rich takes 0.8 s for 2,000 rows, and cuts them to the width of a terminal
where there is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence

from dist_ckpt.wording import counted

__all__ = ["ago", "duration", "first_line", "plain", "size", "spell_settings", "table"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_NONE = "-"


def plain(text: object) -> str:
    """Return text from a file so that a terminal can't be made to do anything by it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))


def size(num_bytes: int | None) -> str:
    """Return bytes in decimal units: ``153.4 MB``."""
    if num_bytes is None:
        return _NONE
    value, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if value < 999.95 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def first_line(text: str, where: str) -> str:
    """Return the first line of a text, how many more there are, and where they can be read."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        return text.strip()
    return f"{lines[0].rstrip()} (and {counted(len(lines) - 1, 'more line')}: {where})"


def spell_settings(settings: object) -> str:
    """Return a policy's settings; None where no file sets any."""
    return "as the program sets it" if settings is None else json.dumps(settings)


def duration(secs: float | None) -> str:
    """Return a time in its two largest units: ``2 h 5 min``; tenths of a second below a minute."""
    if secs is None or not math.isfinite(secs):
        return _NONE
    if secs < 60:
        return f"{max(secs, 0.0):.1f} s"
    minutes = round(secs / 60)
    for unit, length, lower, lower_length in (("d", 1440, "h", 60), ("h", 60, "min", 1)):
        if minutes >= length:
            rest = minutes % length // lower_length
            return f"{minutes // length} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{minutes} min"


def ago(secs: float | None) -> str:
    """Return how long ago; a clock that was set back makes it ``just now``."""
    if secs is None:
        return _NONE
    return "just now" if secs < 1 else f"{duration(secs)} ago"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = ()
) -> str:
    """Return aligned columns, a head and a line a row; None is a dash.

    Args:
        heads: Of the columns.
        rows: Cells; control characters in them are spelled out.
        right: Heads of the columns of numbers.
    """
    cells = [[_NONE if cell is None else plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    is_right = [head in right for head in heads]

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, is_right, strict=True)
        )
        return "  ".join(parts).rstrip() + "\n"

    return "".join(map(line, [heads, *cells]))
