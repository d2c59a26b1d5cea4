"""``bench``: side by side with the peers on this machine. Layer 8."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._sizes import parse_size

__all__ = ["COMMANDS"]


def bench(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CASE", help="Several, or with commas: adamw, mixed, small, flat ..."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Weights and moments of a rank, as 64MiB [1.5GB]."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Rounds that count; fewer where time is up.")
    ] = 5,
    patience: Annotated[
        float, typer.Option(metavar="X", help="Give each case X times its time.")
    ] = 1.0,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="LIBRARY", help="Several, as the table names them [all], or none."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where to write; on the disk of interest."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write all samples there, as JSON."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the first case: .png, .svg.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Measure this machine's limits, dist_ckpt and other libraries in turn, in one run.

    Everything is written below a fresh directory that goes at the end. About 15 minutes; for true
    figures nothing else should run. Libraries that aren't installed are left out.
    """
    from dist_ckpt import bench as benchmark  # noqa: PLC0415 - looking commands don't need it

    options = benchmark.Options(
        only=[name for names in only or () for name in names.split(",") if name],
        num_bytes=None if size is None else parse_size(size, "--size"),
        repeats=repeats,
        against=None if against is None else [name for n in against for name in n.split(",")],
        directory=directory,
        patience=patience,
    )

    def tell(text: str) -> None:
        if not as_json:
            sys.stderr.write(f"{text}\n")

    document = benchmark.run_bench(options, tell=tell)
    document["aims"] = [
        {"figure": bar.figure, "found": bar.value, "aim": bar.aim, "met": bar.met}
        for bar in benchmark.judge(document)
    ]
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        benchmark.draw(document, plot)
    failed = any("error" in case for case in document["cases"])
    return Answer(document, lambda: benchmark.describe(document), 2 if failed else 0)


COMMANDS = (bench,)
