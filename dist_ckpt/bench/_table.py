"""What was measured, in words and columns. Layer 7, pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_ckpt.bench._bars import judge, median

__all__ = ["describe", "spread"]

_SAVES = (("blocked", "blocked, s"), ("durable", "durable, s"))
_LOADS = (("warm", "restored warm, s"), ("cold", "cold, s"))
_LIMITS = {"blocked": "memcpy", "durable": "write", "warm": "read warm", "cold": "read cold"}


def describe(document: Mapping[str, Any]) -> str:
    """Return the whole run as Markdown that also reads well on a terminal."""
    machine = document["machine"]
    libraries = ", ".join(f"{k} {v}" for k, v in machine["libraries"].items() if v)
    where = f"{machine['system']}, {machine['cpus']} CPUs, {machine['file_system']}"
    load = f"load {machine['load']:.1f} at the start"
    how = f"Medians of n rounds in one run of {document['secs']:.0f} s"
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
        notes: list[str] = []
        yield from _contenders(case, _SAVES, "limit: memcpy, O_DIRECT write", notes)
        yield ""
        yield from _contenders(case, _LOADS, "limit: read", notes)
        if lines := [*notes, *(f"Note: {note}" for note in case["notes"])]:
            yield ""
            yield from lines
    elif "figures" in case:
        rows = [(name, spread(samples)) for name, samples in case["figures"].items()]
        yield from _markdown(("figure", "found (s, bytes)"), rows)
    else:
        yield from _plans(case["rows"])


def _contenders(
    case: Mapping[str, Any],
    figures: Sequence[tuple[str, str]],
    limit: str,
    notes: list[str],
) -> Iterator[str]:
    """Yield one table; ``notes`` gets what is too long for its cells, each once."""
    limits = case["limits"]
    saves = figures is _SAVES
    heads = ["", *(head for _, name in figures for head in (name, "ratio")), "n"]
    rows = []
    found = [limits.get(_LIMITS[figure]) for figure, _ in figures]
    bare = [cell for samples in found for cell in (spread(samples), "1.0" if samples else "-")]
    rows.append([limit, *bare, _count(found), *(("", "") if saves else ())])
    for name, samples in limits.items():
        if saves and name.startswith("small "):
            ratio = _times(samples, limits, "blocked")
            rows.append([name[6:], spread(samples), ratio, "-", "-", _count([samples]), "", ""])
    for name, entrant in case["contenders"].items():
        found = [entrant["samples"].get(figure) for figure, _ in figures]
        row = [name]
        for (figure, _), samples in zip(figures, found, strict=True):
            row += [spread(samples), _times(samples, limits, figure)]
        row.append(_count(found))
        if saves:
            row += [
                _verdict(name, entrant, notes),
                f"{entrant['stored_bytes'] / case['bytes']:.3f}",
            ]
        rows.append(row)
    yield from _markdown([*heads, "correct", "stored / state"] if saves else heads, rows)


def _verdict(name: str, entrant: Mapping[str, Any], notes: list[str]) -> str:
    """Return whether what came back was right, in a word; the rest of it becomes a note."""
    verdict, _, what = entrant["correct"].partition(": ")
    words = [what, entrant["left_out"], entrant["error"] and f"failed: {entrant['error']}"]
    if said := "; ".join(word for word in words if word):
        notes.append(f"[{len(notes) + 1}] {name}: {said}")
        return f"{verdict or '-'} [{len(notes)}]"
    return verdict or "-"


def _count(found: Sequence[Sequence[float] | None]) -> str:
    return "/".join(sorted({str(len(samples or ())) for samples in found}))


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
