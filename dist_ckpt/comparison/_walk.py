"""Two trees of values, walked side by side; every difference is a finding with its path."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dist_ckpt.comparison._kinds import is_number, kind_of, plain
from dist_ckpt.comparison._leaves import (
    LEAVES,
    Leaf,
    LiveArray,
    LiveTensor,
    Request,
    numel,
    read_all,
)
from dist_ckpt.comparison._numbers import Gap, compare_flat, compare_numbers
from dist_ckpt.comparison._result import NUM_LARGEST, Difference, Finding, Kind, Tolerance, shown
from dist_ckpt.errors import UnsupportedValueError
from dist_ckpt.slices import dtype_size

__all__ = ["Walker"]

#: So much of each side is in memory at a time.
BATCH_BYTES = 16 << 20
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class _Pending:
    """A part of two leaves of one dtype and shape, to be read and compared with others together."""

    order: int
    path: str
    a: Request
    b: Request


@dataclass(slots=True)
class _Tally:
    """A leaf that is compared in parts: its gap so far, and the values that show it."""

    gap: Gap
    shape: tuple[int, ...]
    largest: tuple[Any, Any] = (None, None)
    beyond: tuple[Any, Any] = (None, None)
    strange: tuple[Any, Any] = (None, None)


class Walker:
    """Walks any number of pairs of trees and gathers what differs.

    Args:
        tolerance: What is accepted between floating values.
        expect_infinite: Patterns of paths where equal infinities are meant to be.
    """

    def __init__(self, tolerance: Tolerance, expect_infinite: Collection[str] = ()) -> None:
        self.num_values = 0
        self.max_abs = 0.0
        self.tolerance = tolerance
        self._expect_infinite = tuple(expect_infinite)
        #: Told the bytes of tensors that were compared, both sides together.
        self.progress: Callable[[int], None] = lambda _num_bytes: None
        self._findings: list[tuple[int, Finding]] = []
        self._differences: list[Difference] = []
        self._order = itertools.count()
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._tallies: dict[int, _Tally] = {}

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings in the order of the trees; what is still to be read is read."""
        self._flush()
        return tuple(finding for _, finding in sorted(self._findings, key=lambda pair: pair[0]))

    def largest(self) -> tuple[Difference, ...]:
        """Return the largest differences, largest first."""
        self._flush()
        return tuple(self._top())

    def _top(self) -> list[Difference]:
        return sorted(self._differences, key=lambda one: -one.max_abs)[:NUM_LARGEST]

    def walk(self, a: Any, b: Any, path: str, depth: int = 0) -> None:
        """Compare two values and all that is in them.

        Raises:
            UnsupportedValueError: A value that can't be compared, or that lies too deep.
        """
        if depth > _MAX_DEPTH:
            raise UnsupportedValueError(
                f"{path} lies deeper than {_MAX_DEPTH} levels.",
                next_step="Compare a smaller part; does the value contain itself?",
                path=path,
            )
        a, b = plain(a), plain(b)
        kinds = kind_of(a, path), kind_of(b, path)
        if kinds[0] != kinds[1]:
            self._differs(path, Kind.TYPE, f"{kinds[0]} in A, {kinds[1]} in B", a, b)
        elif isinstance(a, Mapping):
            self._walk_mapping(a, b, path, depth)
        elif kinds[0] in {"tensor", "array"}:
            self._walk_tensor(_leaf(a, path), _leaf(b, path), path)
        elif kinds[0] in {"list", "tuple", "deque", "size"}:
            self._walk_sequence(list(a), list(b), path, depth)
        elif is_number(a):
            self._compare_sequence([a], [b], path, index=False)
        else:
            self.num_values += 1
            if not _same(a, b):
                self._differs(path, Kind.VALUE, _contrast(a, b), a, b)

    def _walk_mapping(
        self, a: Mapping[Any, Any], b: Mapping[Any, Any], path: str, depth: int
    ) -> None:
        # The type of a key counts: True, 1 and 1.0 are one key to Python.
        keys_a = {(type(key), key): value for key, value in a.items()}
        keys_b = {(type(key), key): value for key, value in b.items()}
        for key, value in keys_a.items():
            where = _join(path, key[1])
            if key in keys_b:
                self.walk(value, keys_b[key], where, depth + 1)
            else:
                self._differs(where, Kind.MISSING, "only in A", value, None)
        for key, value in keys_b.items():
            if key not in keys_a:
                self._differs(_join(path, key[1]), Kind.EXTRA, "only in B", None, value)

    def _walk_sequence(self, a: list[Any], b: list[Any], path: str, depth: int) -> None:
        if len(a) != len(b):
            self._differs(path, Kind.LENGTH, f"{len(a)} items in A, {len(b)} in B", len(a), len(b))
        if a and all(is_number(x) and type(x) is type(a[0]) for x in (*a, *b)):
            self._compare_sequence(a, b, path)
            return
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            self.walk(x, y, _join(path, str(index)), depth + 1)

    def _compare_sequence(
        self, a: Sequence[Any], b: Sequence[Any], path: str, *, index: bool = True
    ) -> None:
        order = next(self._order)
        length = min(len(a), len(b))
        tally = _Tally(Gap(), (length,) if index else ())
        infinite = self._is_infinite(path)
        for position, (x, y) in enumerate(zip(a, b, strict=False)):
            gap = compare_numbers(x, y, self.tolerance, equal_infinities=infinite)
            self._note(tally, gap, position, lambda _, pair=(x, y): pair)
        self._close(order, path, tally, length)

    def _walk_tensor(self, a: Leaf, b: Leaf, path: str) -> None:
        order = next(self._order)
        for kind, x, y in ((Kind.DTYPE, a.dtype, b.dtype), (Kind.SHAPE, a.shape, b.shape)):
            if x != y:
                self._findings.append((order, _finding(path, kind, f"{x} in A, {y} in B", x, y)))
        if a.dtype != b.dtype or a.shape != b.shape:
            return
        count = numel(a)
        self._tallies[order] = _Tally(Gap(), a.shape)
        piece = max(1, BATCH_BYTES // dtype_size(a.dtype))
        for start in range(0, max(count, 1), piece):
            stop = min(count, start + piece)
            request = Request(a, start, stop)
            if self._pending and self._pending_bytes + request.num_bytes > BATCH_BYTES:
                self._flush()
            self._pending.append(_Pending(order, path, request, Request(b, start, stop)))
            self._pending_bytes += request.num_bytes

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        tensors_a = read_all([item.a for item in pending])
        tensors_b = read_all([item.b for item in pending])
        for item, x, y in zip(pending, tensors_a, tensors_b, strict=True):
            infinite = self._is_infinite(item.path)
            gap = compare_flat(x, y, self.tolerance, equal_infinities=infinite)
            tally = self._tallies[item.order]
            self._note(tally, gap, item.a.start, lambda at, x=x, y=y: (x[at].item(), y[at].item()))
            if item.a.stop == numel(item.a.leaf):
                self._close(item.order, item.path, self._tallies.pop(item.order), item.a.stop)
        self.progress(sum(item.a.num_bytes + item.b.num_bytes for item in pending))

    def _note(self, tally: _Tally, gap: Gap, start: int, values: Any) -> None:
        before = tally.gap
        is_larger = gap.at is not None and (before.at is None or gap.max_abs > before.max_abs)
        if is_larger:
            tally.largest = values(gap.at)
        if before.first_beyond is None and gap.first_beyond is not None:
            tally.beyond = values(gap.first_beyond)
        if before.first_non_finite is None and gap.first_non_finite is not None:
            tally.strange = values(gap.first_non_finite)
        before.add(gap, start)

    def _close(self, order: int, path: str, tally: _Tally, count: int) -> None:
        gap, shape = tally.gap, tally.shape
        self.num_values += count
        # Whole numbers are findings when they differ at all: a generator's state isn't "far away".
        if gap.at is not None and not isinstance(tally.largest[0], int):
            index = _index(gap.at, shape)
            self.max_abs = max(self.max_abs, gap.max_abs)
            self._differences.append(Difference(path, index, *tally.largest, gap.max_abs))
            if len(self._differences) > 100 * NUM_LARGEST:
                self._differences = self._top()
        if gap.first_non_finite is not None:
            self._findings.append((order, _non_finite(path, tally, count)))
        if gap.first_beyond is not None:
            self._findings.append((order, _beyond(path, tally, count)))

    def _is_infinite(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._expect_infinite)

    def _differs(self, path: str, kind: Kind, detail: str, a: Any, b: Any) -> None:
        self._findings.append((next(self._order), _finding(path, kind, detail, a, b)))


def _finding(path: str, kind: Kind, detail: str, a: Any, b: Any) -> Finding:
    return Finding(path, kind, detail, _brief(a), _brief(b))


def _beyond(path: str, tally: _Tally, count: int) -> Finding:
    gap = tally.gap
    # Bits alone may differ (the sign of a zero): then the first such place is shown.
    at, (a, b) = (gap.first_beyond, tally.beyond) if gap.at is None else (gap.at, tally.largest)
    where = (
        "" if not tally.shape else f", the largest at {list(_index(at or 0, tally.shape) or ())}"
    )
    many = f"{gap.num_beyond} of {count} values differ{where}: " if count > 1 else ""
    return Finding(
        path,
        Kind.VALUE,
        f"{many}{a!r} and {b!r} differ by {gap.max_abs:.6g}",
        a,
        b,
        max_abs=gap.max_abs,
        index=_index(at or 0, tally.shape),
        num_values=gap.num_beyond,
    )


def _non_finite(path: str, tally: _Tally, count: int) -> Finding:
    gap = tally.gap
    a, b = tally.strange
    index = _index(gap.first_non_finite or 0, tally.shape)
    where = "" if not tally.shape else f", the first at {list(index or ())}"
    many = f"{gap.num_non_finite} of {count} values aren't finite{where}: " if count > 1 else ""
    detail = f"{many}{a!r} in A, {b!r} in B" + ("" if many else ": not finite")
    return Finding(path, Kind.NON_FINITE, detail, a, b, index=index, num_values=gap.num_non_finite)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if not shape:
        return None
    return tuple(int(part) for part in np.unravel_index(flat, shape))


def _leaf(value: Any, path: str) -> Leaf:
    if isinstance(value, np.ndarray):
        return LiveArray(value)
    return LiveTensor(value, path) if isinstance(value, torch.Tensor) else value


def _join(path: str, key: Any) -> str:
    # In brackets, so that the keys 1 and "1" have paths of their own.
    text = key if isinstance(key, str) else f"[{key!r}]"
    return f"{path}/{text}" if path else text


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    return bool(a == b)


def _contrast(a: Any, b: Any) -> str:
    if isinstance(a, bytes | bytearray):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        first = "one continues the other" if at is None else f"the first difference is at byte {at}"
        return f"{len(a)} bytes in A, {len(b)} in B, {first}"
    if isinstance(a, set | frozenset):
        return f"only in A {sorted(map(repr, a - b))}, only in B {sorted(map(repr, b - a))}"
    return f"{shown(a)!r} in A, {shown(b)!r} in B"


def _brief(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return shown(value)
    if isinstance(value, LEAVES):
        return f"{value.kind} {value.dtype} {list(value.shape)}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{len(value)} keys"
    return f"{len(value)} items" if isinstance(value, list | bytes) else shown(value)
