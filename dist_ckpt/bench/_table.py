"""What was measured, in words and columns. Layer 7, pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_ckpt.bench._bars import judge, median

__all__ = ["describe", "spread"]

_FIGURES = ("blocked", "durable", "warm", "cold")
_HEADS = (
    "",
    *("blocked, s", "ratio"),
    *("durable, s", "ratio"),
    *("restored warm, s", "ratio"),
    *("cold, s", "ratio"),
)
_LIMITS = {"blocked": "memcpy", "durable": "write", "warm": "read warm", "cold": "read cold"}


def describe(document: Mapping[str, Any]) -> str:
    """Return the whole run as Markdown that also reads well on a terminal."""
    machine = document["machine"]
    libraries = ", ".join(f"{k} {v}" for k, v in machine["libraries"].items() if v)
    where = f"{machine['system']}, {machine['cpus']} CPUs, {machine['file_system']}"
    load = f"load {machine['load']:.1f} at the start"
    how = f"Medians of up to {document['repeats']} rounds in one run of {document['secs']:.0f} s"
    lines = [
        f"{where}, {load}; Python {machine['python']}, {libraries}.",
        f"{how}, lowest to highest in brackets; ratios are to the limit in the first line.",
        "",
    ]
    for case in document["cases"]:
        lines += [f"## {case['name']}: {case['title']}", ""]
        lines += _case(case)
        lines.append("")
    if bars := judge(document):
        lines += ["## Aims", ""]
        words = {True: "met", False: "MISSED", None: "-"}
        rows = [(bar.figure, bar.value, bar.aim, words[bar.met]) for bar in bars]
        lines += _markdown(("figure", "found", "aim", ""), rows)
    return "\n".join(lines).rstrip() + "\n"


def _case(case: Mapping[str, Any]) -> Iterator[str]:
    if "error" in case:
        yield f"Not measured: {case['error']}."
    elif "contenders" in case:
        yield (
            f"{case['bytes']:,} bytes of weights and moments in {case['num_tensors']:,} tensors on "
            f"each of {case['world_size']} ranks; a write is quickest by {case['write_threads']} "
            "threads."
        )
        yield ""
        yield from _saves(case)
        if case["notes"]:
            yield ""
            yield from (f"Note: {note}" for note in case["notes"])
    elif "figures" in case:
        rows = [(name, spread(samples)) for name, samples in case["figures"].items()]
        yield from _markdown(("figure", "found (s, bytes)"), rows)
    else:
        yield from _plans(case["rows"])


def _saves(case: Mapping[str, Any]) -> Iterator[str]:
    limits = case["limits"]
    first: list[str] = ["limit: memcpy / O_DIRECT / read"]
    for figure in _FIGURES:
        samples = limits.get(_LIMITS[figure])
        first += [spread(samples), "1.0" if samples else "-"]
    rows = [[*first, "", "-"]]
    rows += [
        [name.removeprefix("small "), spread(samples), _times(samples, limits, "blocked")]
        + ["-"] * 6
        + ["", "-"]
        for name, samples in limits.items()
        if name.startswith("small ")
    ]
    for name, entrant in case["contenders"].items():
        row = [name]
        for figure in _FIGURES:
            samples = entrant["samples"].get(figure)
            row += [spread(samples), _times(samples, limits, figure)]
        verdict = entrant["correct"] or "-"
        if entrant["error"]:
            verdict = f"failed: {entrant['error']}"
        rows.append([*row, verdict, f"{entrant['stored_bytes'] / case['bytes']:.3f}"])
    yield from _markdown((*_HEADS, "correct", "stored / state"), rows)


def _plans(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    heads = ("tensors held", "ranks", "sent to each rank", "decode, s", "plan, s", "index", "s")
    table = []
    for row in rows:
        start = [row["kind"], f"{row['world_size']:,}"]
        if "not_tried" in row:
            table.append([*start, row["not_tried"], "", "", "", ""])
            continue
        secs = [f"{row[key]:.2f}" for key in ("decode_secs", "plan_secs", "index_secs")]
        sent = f"{row['gather_bytes'] / 1e6:,.1f} MB"
        index = f"{row['index_bytes'] / 1e6:,.1f} MB"
        table.append([*start, sent, secs[0], secs[1], index, secs[2]])
    yield from _markdown(heads, table)


def spread(samples: Sequence[float] | None) -> str:
    """Return median, and lowest and highest where there are several."""
    middle = median(samples)
    if middle is None or samples is None:
        return "-"
    if len(samples) == 1:
        return _number(middle)
    return f"{_number(middle)} ({_number(min(samples))} to {_number(max(samples))})"


def _number(value: float) -> str:
    if float(value).is_integer() and abs(value) >= 10:
        return f"{int(value):,}"
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _times(
    samples: Sequence[float] | None, limits: Mapping[str, Sequence[float]], figure: str
) -> str:
    found, limit = median(samples), median(limits.get(_LIMITS[figure]))
    return f"{found / limit:.1f}" if found is not None and limit else "-"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    table = [list(heads), *([cell.replace("|", "/") for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, row in enumerate(table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"
