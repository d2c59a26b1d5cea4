"""``serve``: the live page and its JSON. Layer 8."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt.cli._answer import JsonOption, dump
from dist_ckpt.cli._text import plain

__all__ = ["COMMANDS"]


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUNS...", help="Run directories, or directories that hold some."),
    ],
    *,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="0 takes a free one.")
    ] = 8088,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0: everyone who reaches this machine.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name that browsers may call it by; several."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A page elsewhere that may read the JSON; several."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Serve the live page of runs, and the JSON that dashboards read, until SIGTERM or Ctrl-C.

    Read only, and on this machine alone unless --host says otherwise: there are no passwords.
    """
    from dist_ckpt.report import Server  # noqa: PLC0415 - imports numpy

    server = Server(
        [Path(run) for run in runs],
        host=host,
        port=port,
        allow_hosts=allow_host or (),
        allow_origins=allow_origin or (),
    )
    names = sorted(server.catalog.runs())

    def tell() -> None:
        if as_json:
            sys.stdout.write(dump({"url": server.url, "port": server.server_port, "runs": names}))
        else:
            what = ", ".join(names) if names else "no run yet"
            sys.stdout.write(f"{server.url}  ({plain(what)}); Ctrl-C ends it\n")
        sys.stdout.flush()

    server.serve(ready=tell)
    return 0


COMMANDS = (serve,)
