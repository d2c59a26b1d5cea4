"""What the tests of faults found, as a table: `docs/reliability.md`.

A test that has struck faults and judged what came of them says so by `record_fault`: one JSON line
in the file that the variable names, nothing without it. A test that failed has recorded nothing.

    DIST_CKPT_TEST_RECORD=faults.jsonl pytest …
    python tests/helpers/reliability.py faults.jsonl > docs/reliability.md
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = "DIST_CKPT_TEST_RECORD"
ROOT = Path(__file__).resolve().parents[2]
#: The order of the tables; a kind that isn't among them comes last.
KINDS = (
    "Power cut",
    "Kill",
    "Storage",
    "Bad bytes",
    "Signals",
    "Clock",
    "Ranks",
    "Network",
    "Two at once",
)

_HEAD = """\
# What was tried

Each line tells of faults that the tests strike a run with: what was done, how often, what came of
it. A test writes its line only after it has proven that each of its faults struck, and that the
run kept what it promises; so what isn't here wasn't tried. Some tests draw their instants anew each
time. [How this page is made](#how-this-page-is-made) is said below.

What holds after each of them, unless its line says otherwise: the newest point from before the
fault, or a newer one, is whole and is resumed; the loss history is whole; and the run then ends
bit-equal to one that nothing happened to.
"""
_FOOT = """\
## How this page is made

```sh
export DIST_CKPT_TEST_RECORD=$PWD/faults.jsonl
make test
make soak
.venv/bin/python tests/helpers/reliability.py faults.jsonl > docs/reliability.md
```

`make soak` is every operation instead of a sample, and random instants by the hundred. With
`MINUTES=60` it begins no more tests after an hour, in an order drawn anew each time (`ORDER=N`
repeats one). `DIST_CKPT_TEST_SEED=N` gives the random ones the seed that a failed run has printed.
"""


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        kind: One of `KINDS`.
        where: What was done, where.
        times: How many faults struck, or states were tried.
        result: What came of it.
        test: The test, ``file::name``.
    """

    kind: str
    where: str
    times: int
    result: str
    test: str


def record_fault(kind: str, where: str, times: int, result: str) -> None:
    """The table has one more line, where a table is asked for."""
    target = os.environ.get(RECORD)
    if not target:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    line = json.dumps(asdict(Line(kind, where, times, result, test)), ensure_ascii=False)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


def read_lines(path: Path) -> list[Line]:
    """Return what tests wrote; of a test that ran again, the last."""
    lines: dict[tuple[str, str], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = Line(**json.loads(text))
        lines[line.test, line.where] = line
    return list(lines.values())


def encode_page(lines: Iterable[Line]) -> str:
    """Return the page."""
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line.kind, []).append(line)
    order = [*(kind for kind in KINDS if kind in by_kind), *sorted(set(by_kind) - set(KINDS))]
    ordered = {kind: by_kind[kind] for kind in order}
    tables = (_encode_table(kind, ordered[kind]) for kind in order)
    return "\n".join([_HEAD, _encode_overview(ordered), *tables, _FOOT])


def _encode_overview(by_kind: Mapping[str, list[Line]]) -> str:
    rows = [
        f"| [{_cell(kind)}](#{kind.lower().replace(' ', '-')}) | {_count_times(lines):,} |"
        f" {len({line.test.partition('[')[0] for line in lines}):,} |"
        for kind, lines in by_kind.items()
    ]
    head = ["| kind | faults that struck, states tried | tests |", "|---|---:|---:|"]
    return "\n".join([*head, *rows, ""])


def _encode_table(kind: str, lines: list[Line]) -> str:
    merged: dict[tuple[str, str, str], int] = {}
    for line in lines:
        key = (line.where, line.result, line.test.partition("::")[0])
        merged[key] = merged.get(key, 0) + line.times
    rows = [
        f"| {_cell(where)} | {times:,} | {_cell(result)} | {_encode_test(test)} |"
        for (where, result, test), times in sorted(merged.items())
    ]
    head = ["| what was done | times | what came of it | test |", "|---|---:|---|---|"]
    return "\n".join([f"## {kind}\n", f"{_count_times(lines):,} in all.\n", *head, *rows, ""])


def _count_times(lines: Iterable[Line]) -> int:
    return sum(line.times for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _encode_test(test: str) -> str:
    return f"`{test.partition('::')[0]}`" if test else ""


def main(arguments: Mapping[int, str] | list[str]) -> int:
    """Print the page of the lines in a file."""
    if len(arguments) != 2:
        sys.stderr.write("usage: reliability.py FAULTS.jsonl > docs/reliability.md\n")
        return 2
    sys.stdout.write(encode_page(read_lines(Path(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
