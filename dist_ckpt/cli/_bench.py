"""``bench``: side by side with the peers on this machine. Layer 8."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import storage
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._sizes import parse_size
from dist_ckpt.cli._text import plain
from dist_ckpt.errors import NotFoundError, UsageError

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
        against=None
        if against is None
        else [name.strip() for names in against for name in names.split(",")],
        directory=directory,
        patience=patience,
    )

    # Nothing that can be known now is found out when everything has been measured.
    for path, option in ((output, "-o"), (plot, "--plot")):
        if path is not None:
            _check_place(path, option)
    if plot is not None:
        benchmark.check_plot(options, plot)

    def tell(text: str) -> None:
        if not as_json:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it: no figure is lost
                sys.stderr.write(f"{text}\n")

    document = benchmark.run_bench(options, tell=tell)
    document["aims"] = [
        {"figure": bar.figure, "found": bar.value, "aim": bar.aim, "met": bar.met}
        for bar in benchmark.judge(document)
    ]
    unwritten = []
    if output is not None:
        text = json.dumps(document, indent=1) + "\n"
        unwritten += _try(output, lambda: output.write_text(text, encoding="utf-8"))
    if plot is not None:
        unwritten += _try(plot, lambda: benchmark.draw(document, plot))
    for why in unwritten:
        tell(f"dist-ckpt: {plain(why)}")
    if unwritten:
        document["unwritten"] = unwritten
    failed = unwritten or any("error" in case for case in document["cases"])
    return Answer(document, lambda: benchmark.describe(document), 2 if failed else 0)


def _check_place(path: Path, option: str) -> None:
    """Refuse where no file can be written."""
    parent = path.absolute().parent
    if not storage.is_dir(parent):
        raise NotFoundError(
            f"{path.parent} isn't a directory.", next_step="Make it first.", path=str(path)
        )
    if storage.is_dir(path):
        raise UsageError(
            f"{path} is a directory.",
            next_step=f"Give {option} the path of a file.",
            path=str(path),
        )
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise UsageError(
            f"{path} can't be written.", next_step=f"Give {option} another path.", path=str(path)
        )


def _try(path: Path, write: Callable[[], object]) -> list[str]:
    """Return why the file wasn't written, nothing where it was."""
    try:
        write()
    except Exception as error:  # noqa: BLE001 - the figures are printed, whatever it is
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return [f"{path} couldn't be written: {why}"]
    return []


COMMANDS = (bench,)
