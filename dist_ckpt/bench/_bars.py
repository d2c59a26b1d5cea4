"""Figures held against what was aimed at, all from one run. Layer 7, pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Bar", "judge", "median"]

_OURS = "dist_ckpt"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure beside its aim.

    Attributes:
        figure: What was measured.
        value: As text, with its unit.
        aim: As text.
        met: Whether it is; None where it can't be told.
    """

    figure: str
    value: str
    aim: str
    met: bool | None


def median(samples: Sequence[float] | None) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(samples) if samples else None


def judge(document: Mapping[str, Any]) -> list[Bar]:
    """Return every aim whose figures the run has."""
    bars: list[Bar] = []
    for case in document["cases"]:
        if "contenders" in case:
            bars += _of_saves(case)
        elif "figures" in case:
            bars += _of_figures(case)
    return bars


def _of_saves(case: Mapping[str, Any]) -> Iterator[Bar]:
    ours = case["contenders"].get(_OURS, {}).get("samples", {})
    limits = case["limits"]
    name = case["name"]
    copy = median(limits.get("memcpy"))
    how = "memcpy" if case["world_size"] == 1 else f"memcpy of 1/{case['world_size']} of the bytes"
    if case["name"] == "small":
        ways = {way: median(found) for way, found in limits.items() if way.startswith("small ")}
        known = {way: secs for way, secs in ways.items() if secs is not None}
        if known:
            way = min(known, key=lambda key: known[key])
            copy, how = known[way], way.removeprefix("small ")
    share = 1.25 if case["world_size"] == 1 else 1.3
    share = 1.2 if name == "small" else share
    yield from _ratio(f"{name}: blocked / {how}", ours.get("blocked"), copy, share)
    yield from _beats(case, "blocked")
    yield from _ratio(
        f"{name}: durable / O_DIRECT write", ours.get("durable"), median(limits.get("write")), 1.2
    )
    yield from _beats(case, "durable")
    for kind, share in (("warm", 1.5), ("cold", 1.2)):
        limit = median(limits.get(f"read {kind}"))
        if case["world_size"] == 1:
            yield from _ratio(f"{name}: restore / read, {kind}", ours.get(kind), limit, share)
    cold = median(limits.get("read cold"))
    if case["world_size"] == 1:
        yield from _ratio(f"{name}: verify / read, cold", ours.get("verify"), cold, 1.2)
    write = median(limits.get("write"))
    if case["world_size"] > 1:
        yield from _ratio(f"{name}: export / write", ours.get("exported"), write, 1.7)


def _ratio(
    figure: str, samples: Sequence[float] | None, limit: float | None, most: float
) -> Iterator[Bar]:
    found = median(samples)
    if found is not None and limit:
        ratio = found / limit
        yield Bar(figure, f"{ratio:.2f}", f"≤ {most}", ratio <= most)


def _beats(case: Mapping[str, Any], figure: str) -> Iterator[Bar]:
    """Compare with every peer whose result is correct."""
    found = {
        name: median(entrant["samples"].get(figure))
        for name, entrant in case["contenders"].items()
        if entrant["correct"] == "yes" or name == _OURS
    }
    known = {name: secs for name, secs in found.items() if secs is not None}
    mine = known.pop(_OURS, None)
    if mine is None or not known:
        return
    best = min(known, key=lambda name: known[name])
    ratio = mine / known[best]
    yield Bar(f"{case['name']}: {figure} / {best}", f"{ratio:.2f}", "< 1", ratio < 1)


def _of_figures(case: Mapping[str, Any]) -> Iterator[Bar]:
    figures = {name: median(samples) for name, samples in case["figures"].items()}

    def at_most(name: str, figure: str, most: float, unit: str, scale: float) -> Iterator[Bar]:
        value = figures.get(figure)
        if value is not None:
            shown = f"{value * scale:.3g} {unit}"
            yield Bar(name, shown, f"≤ {most * scale:.3g} {unit}", value <= most)

    step, reduce = figures.get("step"), figures.get("all_reduce")
    if case["world_size"] > 1:
        yield from _ratio(
            "a step without a save / one all_reduce", [step] if step else None, reduce, 1.3
        )
        return
    yield from at_most("a step without a save", "step", 30e-6, "µs", 1e6)
    losses = int(figures.get("num losses") or 0)
    yield from at_most(f"{losses:,} losses opened", "losses opened", 0.2, "s", 1)
    yield from at_most(f"one append at {losses:,} losses", "last appends", 30e-6, "µs", 1e6)
    count = int(figures.get("num generations") or 0)
    yield from at_most(f"`ls` of {count:,} generations, the process", "ls", 0.5, "s", 1)
    state = figures.get("state bytes") or 0.0
    yield from at_most(
        "peak memory of a save above arena", "save above the arena bytes", 64e6, "MB", 1e-6
    )
    yield from at_most(
        "peak memory of a restore above state", "resume above the state bytes", 128e6, "MB", 1e-6
    )
    for what in ("written", "stored"):
        yield from _ratio(
            f"bytes {what} a checkpoint / state", case["figures"].get(f"bytes {what}"), state, 1.02
        )
