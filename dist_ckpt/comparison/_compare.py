"""The comparison itself: which trees are walked against which. Reads files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

from dist_ckpt.canonical import CanonicalState
from dist_ckpt.comparison._address import resolve
from dist_ckpt.comparison._result import Comparison, Tolerance
from dist_ckpt.comparison._views import (
    BinView,
    GenerationView,
    LiveView,
    StateView,
    count_params,
    open_generation,
)
from dist_ckpt.comparison._walk import Walker
from dist_ckpt.errors import UsageError
from dist_ckpt.export import read_bin

__all__ = ["compare", "compare_watched"]

View: TypeAlias = BinView | StateView

_SHOWN_NOTES = 10


def compare(
    a: Any,
    b: Any,
    atol: float = 1e-12,
    rtol: float = 0.0,
    *,
    expect_infinite: Collection[str] = (),
) -> Comparison:
    """Return every difference between two training states, with its path in the tree.

    Floating values agree where ``|a - b| <= atol + rtol * max(|a|, |b|)``. Whole numbers, text and
    bytes must be equal, and with both tolerances 0 floating values bit by bit. Values that aren't
    finite are findings, on one side or on both; so is every difference of keys, types, dtypes,
    shapes and lengths. Which kind of dict it is, and its order, don't count.

    Any thread, not collective. Text given as ``a`` or ``b`` is an address; within them, it is text.

    Args:
        a: Any nesting of dicts, lists, tuples, tensors, arrays, numbers, text, bytes and None, and
            of objects with ``state_dict()`` (modules, optimizers, …). Or what names a resume point
            (``RUN``, ``RUN@N``, ``RUN@latest``, a generation's directory) or a ``.bin``; or an open
            generation; or a :class:`~dist_ckpt.CanonicalState`. Files are read piece by piece, a
            generation's digests are checked.
        b: Likewise. Against a resume point or a ``.bin``, live objects are ``{"model": …,
            "optimizer": …}`` and what else was given to ``Checkpointer``; what isn't given isn't
            compared, and a note says so.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        expect_infinite: Patterns of paths (``"*/best"``) where equal infinities are meant to be;
            NaN never is.

    Raises:
        UsageError: There is nothing to compare, or the two are of kinds that can't be.
        UnsupportedValueError: A value that can't be compared; ``path`` says where.
        SettingError: A tolerance is negative or not finite.
        NotFoundError, CorruptFileError: A file is missing or not whole.
    """
    return compare_watched(a, b, atol, rtol, expect_infinite=expect_infinite)


def compare_watched(
    a: Any,
    b: Any,
    atol: float = 1e-12,
    rtol: float = 0.0,
    *,
    expect_infinite: Collection[str] = (),
    watch: Callable[[int], Callable[[int], None]] | None = None,
) -> Comparison:
    """Compare as `compare` does, and tell how far it is.

    Args:
        a: As there, like the others.
        b: As there.
        atol: As there.
        rtol: As there.
        expect_infinite: As there.
        watch: Given how many bytes will be checked and compared, or nearly; what it returns is told
            the bytes since its last call, from any thread.
    """
    tolerance = Tolerance(atol, rtol)
    walker = Walker(tolerance, expect_infinite)
    stored = _open(a, "A"), _open(b, "B")
    if watch is not None:
        walker.progress = watch(sum(view.num_bytes for view in stored if view))
        for view in stored:
            if isinstance(view, GenerationView):
                view.watch(walker.progress)
    view_a: View | None
    view_b: View | None
    view_a, view_b = stored
    notes: list[str] = []
    if view_a is None and view_b is None:
        walker.walk(a, b, "")
    else:
        view_a, view_b = view_a or LiveView(a, "A"), view_b or LiveView(b, "B")
        _compare_views(walker, view_a, view_b, notes)
    labels = [view.label if view else name for view, name in ((view_a, "A"), (view_b, "B"))]
    findings = walker.findings()
    if not findings and walker.num_values == 0:
        raise UsageError(
            f"{labels[0]} and {labels[1]} hold no values: there is nothing to compare.",
            next_step="Give two states that hold something.",
        )
    if places := [pattern for pattern in expect_infinite if pattern != "*"]:
        notes.append(f"equal infinities were expected at {', '.join(places)}")
    return Comparison(
        a=labels[0],
        b=labels[1],
        tolerance=tolerance,
        findings=findings,
        largest=walker.largest(),
        max_abs=walker.max_abs,
        num_values=walker.num_values,
        notes=tuple(notes),
    )


def _open(value: Any, name: str) -> BinView | GenerationView | None:
    """Return a view of what is stored, None for live values."""
    if isinstance(value, CanonicalState):
        return BinView(value, name)
    path = getattr(value, "path", None)
    if isinstance(path, Path | str) and isinstance(getattr(value, "step", None), int):
        value = Path(path)  # an open generation
    if not isinstance(value, str | os.PathLike):
        return None
    address = resolve(value)
    if address.is_bin:
        return BinView(read_bin(address.path), os.fspath(value))
    return open_generation(address.path, os.fspath(value))


def _compare_views(walker: Walker, a: View, b: View, notes: list[str]) -> None:
    if a.step is not None and b.step is not None:
        walker.walk(a.step, b.step, "step")
    if isinstance(a, BinView):
        if isinstance(b, BinView):
            _compare_bins(walker, a, b)
        else:
            _compare_with_bin(walker, a, b, notes, is_first=True)
    elif isinstance(b, BinView):
        _compare_with_bin(walker, b, a, notes, is_first=False)
    else:
        _compare_states(walker, a, b, notes)


def _compare_bins(walker: Walker, a: BinView, b: BinView) -> None:
    walker.walk(a.num_params, b.num_params, "num_params")
    if a.num_params == b.num_params:
        walker.walk(a.whole(), b.whole(), "")


def _compare_with_bin(
    walker: Walker, file: BinView, view: StateView, notes: list[str], *, is_first: bool
) -> None:
    def walk(mine: Any, theirs: Any, path: str) -> None:
        walker.walk(*((mine, theirs) if is_first else (theirs, mine)), path)

    total = count_params(view)
    walk(file.num_params, total, "num_params")
    if file.num_params == total:
        for key, mine, theirs in file.cut(view):
            walk(mine, theirs, key)
    notes.append("a .bin holds step, weights and two moments: nothing else was compared")


def _compare_states(walker: Walker, a: StateView, b: StateView, notes: list[str]) -> None:
    is_live = any(isinstance(view, LiveView) for view in (a, b))
    walker.walk(a.tensors, b.tensors, "")
    walker.walk(a.ties, b.ties, "ties")
    shared_a, shared_b = a.shared(), b.shared()
    if is_live:
        notes.append("random state and step were not compared: live objects go on")
        _drop_what_one_lacks(shared_a, shared_b, notes)
    walker.walk(shared_a, shared_b, "")
    if a.world_size == b.world_size:
        for rank in range(a.world_size):
            walker.walk(*_both(a.rank(rank), b.rank(rank), is_live=is_live), f"ranks/{rank}")
        return
    notes.append(
        f"{a.world_size} ranks against {b.world_size}: values of single ranks (random state, data, "
        "the user's state, buffers of ranks above 0) differ without counting"
    )
    aside = Walker(walker.tolerance)
    aside.walk(*_both(a.rank(0), b.rank(0), is_live=is_live), "ranks/0")
    found = aside.findings()
    notes.extend(str(finding) for finding in found[:_SHOWN_NOTES])
    if len(found) > _SHOWN_NOTES:
        notes.append(f"… and {len(found) - _SHOWN_NOTES} more of rank 0")


def _drop_what_one_lacks(a: dict[str, Any], b: dict[str, Any], notes: list[str]) -> None:
    """Leave the parts that both have: live objects needn't be all that was saved."""
    for word in sorted(set(a["parts"]) ^ set(b["parts"])):
        notes.append(f"{word} was not compared: only one side has it")
        for shared in (a, b):
            shared["parts"].pop(word, None)
            for kind in ("schedulers", "scalers"):
                shared[kind].pop(word, None)


def _both(
    a: dict[str, Any], b: dict[str, Any], *, is_live: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    if not is_live:
        return a, b
    words = set(a["values"]) & set(b["values"])
    kept = [{word: side["values"][word] for word in words} for side in (a, b)]
    return {"values": kept[0]}, {"values": kept[1]}
