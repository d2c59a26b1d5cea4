"""Bytes ↔ entries of ``NAME.loss.json``, and the canonical reading of them. Pure: layer 4.

The file is a JSON array of ``[step, loss]``, one entry a line. A loss that isn't finite is
``null``. Reading it (contract, "Reading the loss file"): in the order of the file, an entry for
step s voids all earlier entries with a step >= s. What remains therefore rises strictly.
"""

from __future__ import annotations

import enum
import json
import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.history._json_array import ArrayScan, scan_array

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

__all__ = [
    "MISSING",
    "CanonicalIndex",
    "LossEntry",
    "Missing",
    "canonical",
    "encode_entry",
    "loss_kind",
    "pair_columns",
    "parse_appended",
    "parse_loss",
    "scan_loss",
]

LossEntry = tuple[int, float | None]


class Missing(enum.Enum):
    """Type of `MISSING`."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING
_NAN: Final = math.nan  # stands for null in the index: the file itself holds finite numbers only
_MAX_STEP: Final = 2**63 - 1
_NUMBER_BYTES: Final = b"0123456789.e+-null"
_BRACKETS_AS_SPACES: Final = bytes.maketrans(b"[]", b"  ")


def encode_entry(step: int, loss: float | None) -> bytes:
    """Return ``[step, loss]`` in bytes; the float is exact, one that isn't finite becomes null.

    Raises:
        UsageError: ``step`` is negative or above int64.
    """
    if not 0 <= step <= _MAX_STEP:
        message = f"Step {step} can't be logged, steps are 0 … {_MAX_STEP}."
        raise UsageError(message, expected=_MAX_STEP, found=step)
    if loss is None or not math.isfinite(loss):
        return b"[%d, null]" % step
    return b"[%d, %s]" % (step, repr(float(loss)).encode())


def loss_kind(loss: float) -> Literal["nan", "inf", "-inf"] | None:
    """Return what kind of not finite ``loss`` is, None for a finite one."""
    if math.isfinite(loss):
        return None
    if math.isnan(loss):
        return "nan"
    return "inf" if loss > 0 else "-inf"


def scan_loss(
    data: bytes, *, path: str | os.PathLike[str]
) -> tuple[array[int], array[float], ArrayScan]:
    """Return the steps and losses that are whole in a loss file, and what `scan_array` found.

    Null is NaN in ``losses``; the scan's own items are let go of.

    Raises:
        CorruptFileError: The bytes never were a loss file.
    """
    if (columns := _scan_own(data)) is not None:
        return *columns, ArrayScan([], len(data) - 1, whole=True)
    scan = scan_array(data, accept=_are_entries, what="[step, loss]", path=path)
    return *_columns(scan.items), replace(scan, items=[])


def parse_loss(
    data: bytes, *, path: str | os.PathLike[str], torn_ok: bool = False
) -> list[LossEntry]:
    """Return all entries of a loss file in the order of the file (see `canonical` for history).

    Args:
        data: All bytes of the file.
        path: Named in errors; never opened.
        torn_ok: Whether an end that an append in progress (or a crash) left torn is passed over:
            for readers beside a running job.

    Raises:
        CorruptFileError: Not a JSON array of ``[step, loss]``; torn, without ``torn_ok``.
    """
    steps, losses, scan = scan_loss(data, path=path)
    if not scan.whole and not torn_ok:
        message = f"{path}: the loss file is whole up to byte {scan.end} of {len(data)} only."
        raise CorruptFileError(
            message,
            next_step="Read it again if the job runs; it is repaired when the run resumes.",
            path=path,
            expected="]",
            found=repr(data[scan.end : scan.end + 40]),
        )
    return list(pair_columns(steps, losses))


def parse_appended(data: bytes) -> tuple[array[int], array[float]] | None:
    """Return steps and losses of what appends put where a loss file had its last bracket.

    Null is NaN in ``losses``. None where it is anything else, as while an append is under way.

    Args:
        data: The bytes from that bracket's place on.
    """
    data = data.rstrip(b" \t\r\n")
    if data == b"]":
        return array("q"), array("d")
    return _scan_own(b"[\n" + data[2:]) if data.startswith(b",\n") else None


def canonical(entries: Iterable[LossEntry]) -> list[LossEntry]:
    """Return the canonical history: an entry for s voids all earlier ones of a step >= s. O(n)."""
    kept: list[LossEntry] = []
    for entry in entries:
        while kept and kept[-1][0] >= entry[0]:
            kept.pop()
        kept.append(entry)
    return kept


class CanonicalIndex:
    """The canonical history in memory: 16 bytes an entry, rising in step, kept up to date.

    Args:
        steps: Steps in the order of the file.
        losses: Losses beside them, null as NaN.
    """

    def __init__(self, steps: array[int], losses: array[float]) -> None:
        if all(map(operator.lt, steps, steps[1:])):  # the usual file: nothing to void
            self._steps, self._losses = steps, losses
            return
        self._steps, self._losses = array("q"), array("d")
        for step, loss in zip(steps, losses, strict=True):
            self.push(step, loss)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[LossEntry]:
        return pair_columns(self._steps, self._losses)

    @property
    def last_step(self) -> int | None:
        """The last step that counts, None where there is none."""
        return self._steps[-1] if self._steps else None

    def push(self, step: int, loss: float | None) -> None:
        """Add an entry, which voids those of a step >= ``step``; amortised O(1)."""
        if self._steps and self._steps[-1] >= step:
            first = bisect_left(self._steps, step)
            del self._steps[first:]
            del self._losses[first:]
        self._steps.append(step)
        self._losses.append(_NAN if loss is None else loss)

    def get(self, step: int) -> LossEntry | Missing:
        """Return the entry of ``step``, `MISSING` where there is none. O(log n)."""
        position = bisect_left(self._steps, step)
        if position == len(self._steps) or self._steps[position] != step:
            return MISSING
        return self._entry(position)

    def at_or_before(self, step: int) -> LossEntry | None:
        """Return the last entry of a step <= ``step``, None where there is none."""
        position = bisect_right(self._steps, step)
        return self._entry(position - 1) if position else None

    def after(self, step: int) -> list[LossEntry]:
        """Return the entries of a step > ``step``."""
        first = bisect_right(self._steps, step)
        return list(pair_columns(self._steps[first:], self._losses[first:]))

    def columns_up_to(self, step: int) -> tuple[array[int], array[float]]:
        """Return steps and losses, null as NaN, of the entries of a step <= ``step``."""
        last = bisect_right(self._steps, step)
        return self._steps[:last], self._losses[:last]

    def clear(self) -> None:
        """Void everything."""
        del self._steps[:]
        del self._losses[:]

    def _entry(self, position: int) -> LossEntry:
        loss = self._losses[position]
        return self._steps[position], None if math.isnan(loss) else loss


def pair_columns(steps: array[int], losses: array[float]) -> Iterator[LossEntry]:
    """Return the entries of two columns, NaN as None."""
    return (
        (step, None if math.isnan(loss) else loss) for step, loss in zip(steps, losses, strict=True)
    )


def _scan_own(data: bytes) -> tuple[array[int], array[float]] | None:
    """Return the columns of a file that is whole and has our own spacing, None for any other.

    Without what numbers consist of, such a file is one pattern repeated: so each entry has two
    parts, and nothing else is anywhere. Where its brackets stand together no number lies between
    them, that is, outside of an entry. Without them it is one flat JSON array, in which the parser
    checks each part. It refuses what isn't certain, and `scan_array` decides then.
    """
    if not (data.startswith(b"[\n[") and data.endswith(b"]]")):
        return None
    num_entries = data.count(b"],\n[") + 1
    if data.translate(None, _NUMBER_BYTES) != b"[\n[, " + b"],\n[, " * (num_entries - 1) + b"]]":
        return None
    try:
        flat = json.loads(b"[" + data.translate(_BRACKETS_AS_SPACES) + b"]")
        numbers, losses = flat[0::2], flat[1::2]
        steps = array("q", numbers)  # refuses all but integers of 64 bits
        if has_null := b"u" in data:
            finite = [loss for loss in losses if loss is not None]
            losses = [_NAN if loss is None else loss for loss in losses]
        column = array("d", losses)
        # What isn't finite makes every sum so: 1e999 is read as infinity.
        is_finite = math.isfinite(sum(finite if has_null else losses))
    except (ValueError, TypeError, OverflowError):
        return None
    return (steps, column) if is_finite and min(numbers) >= 0 else None


def _are_entries(items: list[Any]) -> bool:
    # Whole columns at a time: 200,000 entries in some 30 ms, a loop over them takes twice that.
    if not set(map(type, items)) <= {list} or not set(map(len, items)) <= {2}:
        return False
    steps = [item[0] for item in items]
    losses = [item[1] for item in items if item[1] is not None]
    try:
        return (
            set(map(type, steps)) <= {int}
            and set(map(type, losses)) <= {int, float}
            and all(map(math.isfinite, losses))  # 1e999 is read as infinity
            and min(steps, default=0) >= 0
            and max(steps, default=0) <= _MAX_STEP
        )
    except OverflowError:  # an integer that no float can hold
        return False


def _columns(items: list[Any]) -> tuple[array[int], array[float]]:
    steps = array("q", [item[0] for item in items])
    losses = array("d", [_NAN if item[1] is None else item[1] for item in items])
    return steps, losses
