"""Losses ↔ the few bytes that a page carries of them. Pure: layer 7.

Every entry of the loss file goes into a page, in the order of the file; the page applies the rule
of the canonical history itself. Steps are differences. A loss is a float64 cut into planes of
bytes, the most significant first: neighbouring losses share their first bytes, float32 losses have
nothing in their last ones, and a page that has no room for all of it loses the last bits alone.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_ckpt.history import LossEntry

__all__ = ["Curve", "encode_curve", "pack"]

_FLOAT_BYTES = 8
#: One sign, 11 bits of exponent, 20 of the value: six digits, what a curve needs.
_MIN_PLANES = 4
#: Decimal digits that the kept bits tell for sure.
_DIGITS = {4: 6, 5: 8, 6: 11, 7: 13, 8: 17}


@dataclass(frozen=True, slots=True)
class Curve:
    """Encoded entries.

    Attributes:
        count: How many entries.
        planes: How many bytes of each loss are kept, 8 are all.
        is_exact: No loss lost a bit.
        data: Base64 of the deflated steps and planes.
    """

    count: int
    planes: int
    is_exact: bool
    data: str

    def to_json(self) -> dict[str, Any]:
        """Return it as the page reads it."""
        return {
            "count": self.count,
            "planes": self.planes,
            "exact": self.is_exact,
            "digits": _DIGITS[_FLOAT_BYTES if self.is_exact else self.planes],
            "data": self.data,
        }


def encode_curve(entries: Sequence[LossEntry], *, limit_chars: int | None = None) -> Curve:
    """Return entries so that they take ``limit_chars`` if that can be had with six digits.

    Steps are exact up to 2**53, a loss of None is NaN.

    Args:
        entries: In the order of the file, void ones included.
        limit_chars: Of ``data``; None keeps every bit.
    """
    steps = np.array([step for step, _ in entries], dtype=np.float64)
    losses = np.array([loss for _, loss in entries], dtype=np.float64)  # None becomes NaN
    deltas = np.diff(steps, prepend=0.0).astype("<f8").tobytes()
    for planes in range(_FLOAT_BYTES, _MIN_PLANES - 1, -1):
        kept = _round(losses, planes)
        is_exact = bool(np.array_equal(kept, losses, equal_nan=True))
        data = pack(deltas + _planes(kept)[: planes * len(losses)])
        if limit_chars is None or len(data) <= limit_chars:
            break
    return Curve(len(entries), planes, is_exact, data)


def pack(data: bytes) -> str:
    """Return bytes deflated, in base64."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _round(losses: np.ndarray[Any, np.dtype[np.float64]], planes: int) -> Any:
    """Return the nearest numbers whose last bytes are zero; what rounds to infinity is cut."""
    if planes == _FLOAT_BYTES:
        return losses
    dropped = 8 * (_FLOAT_BYTES - planes)
    bits = losses.astype("<f8").view(np.uint64)
    mask = ~np.uint64((1 << dropped) - 1)
    rounded = ((bits + np.uint64(1 << (dropped - 1))) & mask).view(np.float64)
    return np.where(np.isfinite(rounded), rounded, (bits & mask).view(np.float64))


def _planes(losses: np.ndarray[Any, np.dtype[np.float64]]) -> bytes:
    rows = losses.astype("<f8").view(np.uint8).reshape(-1, _FLOAT_BYTES)
    return rows[:, ::-1].T.tobytes()
