"""``prove``: the resume protocol on the user's own command. Layer 8."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._text import plain
from dist_ckpt.errors import IncompleteError

__all__ = ["COMMANDS"]


def prove(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What trains, as in a shell.")
    ],
    *,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Start it on N ranks with the launcher.")
    ] = None,
    cut: Annotated[
        list[int] | None,
        typer.Option(metavar="STEP", help="Cut here; several [three, chosen by what they show]."),
    ] = None,
    until: Annotated[int, typer.Option(metavar="STEP", help="Last step that is compared.")] = 10,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="DIR", help="Must not exist [a new NAME.proof-K]."),
    ] = None,
    run_arg: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The command's option for the run directory, to be rewritten."
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Negative controls; several [all kinds of parts]."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECS", help="What a scenario may take.")
    ] = 1800.0,
    as_json: JsonOption = False,
) -> Answer:
    """Prove that a stopped run of your command goes on bit for bit.

    Status 1: it doesn't, or nobody would notice; the cause is named. 2: it couldn't be tried.
    """
    from dist_ckpt import proof  # noqa: PLC0415 - imports torch, as looking commands must not

    plan = proof.Plan(
        command=command,
        output=None if output is None else Path(output),
        ranks=ranks,
        cuts=cut or (),
        until=until,
        run_arg=run_arg,
        leave_out=leave_out or (),
        timeout_secs=timeout,
    )
    with _spinner(quiet=as_json) as tell, _last_lines(quiet=as_json):
        found = proof.run_proof(plan, tell=tell)
        document = proof.write_report(found)
    document = {**document, "path": str(found.output)}

    def text() -> str:
        lines = [*proof.describe(document).splitlines(), "", str(found.output)]
        return "".join(f"{plain(line)}\n" for line in lines)

    return Answer(document, text, 0 if found.passed else 1)


@contextlib.contextmanager
def _last_lines(*, quiet: bool) -> Iterator[None]:
    """Where a scenario couldn't be completed, print on stderr what it said last."""
    try:
        yield
    except IncompleteError as error:
        lines = [] if quiet else error.values.get("last_lines", [])
        sys.stderr.write("".join(f"  | {plain(line)}\n" for line in lines))
        raise


@contextlib.contextmanager
def _spinner(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give what is to be told of each scenario that begins; draws on a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield lambda _name: None
        return
    from rich.console import Console  # noqa: PLC0415 - only where it is shown

    counter = itertools.count(1)
    with Console(stderr=True).status("starting") as status:
        yield lambda name: status.update(f"scenario {next(counter)}: {name}")


COMMANDS = (prove,)
