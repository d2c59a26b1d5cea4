"""Two runs of numbers: how far apart, how many beyond the tolerance, how many not finite. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dist_ckpt.comparison._result import Tolerance

__all__ = ["Gap", "compare_flat", "compare_numbers"]

#: Doubles of this many elements fit the cache, and memory beside the operands stays bounded.
_TURN = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Gap:
    """What lies between two equally long runs of numbers; positions count from the run's start.

    Attributes:
        max_abs: Largest absolute difference where both are finite.
        at: Where that is; None where all are equal.
        num_beyond: How many differ beyond the tolerance, both being finite.
        first_beyond: The first of them.
        num_non_finite: At how many positions a side isn't finite.
        first_non_finite: The first of them.
    """

    max_abs: float = 0.0
    at: int | None = None
    num_beyond: int = 0
    first_beyond: int | None = None
    num_non_finite: int = 0
    first_non_finite: int | None = None

    def add(self, other: Gap, start: int) -> None:
        """Take in what was found in the run that begins at ``start``."""
        if other.at is not None and (self.at is None or other.max_abs > self.max_abs):
            self.max_abs, self.at = other.max_abs, start + other.at
        self.num_beyond += other.num_beyond
        self.num_non_finite += other.num_non_finite
        if self.first_beyond is None and other.first_beyond is not None:
            self.first_beyond = start + other.first_beyond
        if self.first_non_finite is None and other.first_non_finite is not None:
            self.first_non_finite = start + other.first_non_finite


def compare_flat(
    a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance, *, equal_infinities: bool = False
) -> Gap:
    """Return the gap between two 1-D CPU tensors of one dtype and length.

    Args:
        a: Contiguous.
        b: Contiguous.
        tolerance: For floating and complex dtypes; whole numbers and truth values must be equal.
        equal_infinities: Equal infinities count as equal values; NaN never does.
    """
    gap = Gap()
    for start in range(0, a.numel(), _TURN):
        piece = a[start : start + _TURN], b[start : start + _TURN]
        gap.add(_compare_turn(*piece, tolerance, equal_infinities=equal_infinities), start)
    return gap


def _compare_turn(
    a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance, *, equal_infinities: bool
) -> Gap:
    is_floating = a.dtype.is_floating_point or a.dtype.is_complex
    bits = _bits(a), _bits(b)
    if torch.equal(*bits) and (not is_floating or _all_finite(a)):
        return Gap()
    if not is_floating:
        beyond = bits[0] != bits[1]
        # Two whole numbers that differ are 1 apart at least, however large they are.
        gaps = (a.to(torch.float64) - b.to(torch.float64)).abs().clamp(min=1.0)
        return _gap(torch.where(beyond, gaps, 0.0), beyond, torch.zeros_like(beyond))
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y = _widened(a, wide), _widened(b, wide)
    strange = ~(torch.isfinite(x) & torch.isfinite(y))
    if equal_infinities:
        same = strange & ~torch.isnan(x) & (x == y)
        x, y = torch.where(same, 0.0, x), torch.where(same, 0.0, y)
        strange &= ~same
    gaps = torch.where(strange, 0.0, (x - y).abs())
    limit = tolerance.atol + tolerance.rtol * torch.maximum(x.abs(), y.abs())
    beyond = (gaps > limit) & ~strange
    if tolerance.is_exact:
        differ = bits[0] != bits[1]
        beyond |= (differ.reshape(a.numel(), -1).any(dim=1)) & ~strange
    return _gap(gaps, beyond, strange)


def _gap(gaps: torch.Tensor, beyond: torch.Tensor, strange: torch.Tensor) -> Gap:
    at = int(gaps.argmax())
    max_abs = float(gaps[at])
    num_beyond, num_strange = int(beyond.count_nonzero()), int(strange.count_nonzero())
    return Gap(
        max_abs=max_abs,
        at=at if max_abs > 0 else None,
        num_beyond=num_beyond,
        first_beyond=int(beyond.to(torch.uint8).argmax()) if num_beyond else None,
        num_non_finite=num_strange,
        first_non_finite=int(strange.to(torch.uint8).argmax()) if num_strange else None,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    return tensor.view(_BITS[size]) if size in _BITS else tensor.view(torch.int64)


def _widened(tensor: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    # Eight-bit floats convert to float32 only.
    return tensor.to(torch.float32).to(wide) if tensor.element_size() == 1 else tensor.to(wide)


def _all_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_complex:
        return bool(torch.isfinite(tensor.to(torch.complex128)).all())
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    # One pass, nothing allocated: NaN carries through, infinities are extremes.
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def compare_numbers(
    a: complex, b: complex, tolerance: Tolerance, *, equal_infinities: bool = False
) -> Gap:
    """Return the gap between two Python numbers of one type."""
    if isinstance(a, int) and isinstance(b, int):
        return Gap() if a == b else Gap(_int_gap(a, b), 0, 1, 0)
    parts = [(a.real, b.real), (a.imag, b.imag)]
    if not all(math.isfinite(x) and math.isfinite(y) for x, y in parts):
        if equal_infinities and a == b:
            return Gap()
        return Gap(num_non_finite=1, first_non_finite=0)
    gap = abs(a - b)
    beyond = gap > tolerance.atol + tolerance.rtol * max(abs(a), abs(b))
    if tolerance.is_exact:
        beyond = any(x.hex() != y.hex() for x, y in parts)
    return Gap(gap, 0 if gap > 0 else None, int(beyond), 0 if beyond else None)


def _int_gap(a: int, b: int) -> float:
    try:
        return float(abs(a - b))
    except OverflowError:
        return math.inf
