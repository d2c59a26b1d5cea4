"""``report``: a run as one HTML page. Layer 8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import storage
from dist_ckpt.cli._address import RunArgument, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._text import plain, size
from dist_ckpt.errors import DistCkptError, NotFoundError, UsageError

__all__ = ["COMMANDS"]


def report(
    run: RunArgument,
    *,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PATH", help="The page [NAME.html, here]."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Every bit of every loss, however large the page.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that isn't ours.")] = False,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Write one HTML page about a run that needs nothing else: curve, attempts, generations."""
    from dist_ckpt import report as report_  # noqa: PLC0415 - imports numpy
    from dist_ckpt.export import put_whole  # noqa: PLC0415 - as above

    found = find_run(run)
    path = Path(output if output is not None else f"{found.name}.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path} doesn't end in .html.", next_step="Give -o PATH.html.")
    if not storage.is_dir(path.absolute().parent):
        raise NotFoundError(
            f"{path.parent} isn't a directory.", next_step="Make it first.", path=str(path)
        )
    if storage.exists(path) and not force and not _is_page(path, report_.PAGE_MARK):
        raise UsageError(
            f"{path} is there and is no page of ours.",
            next_step="Give another -o PATH, or --force.",
            path=str(path),
        )
    gathered = report_.gather(found)
    data = report_.render_page(gathered, every_bit=exact).encode()
    put_whole(path, lambda beside: storage.write_durable(beside, data, mode=0o600))
    document = {
        "run": found.name,
        "path": str(path),
        "bytes": len(data),
        "losses": len(gathered.entries),
        "problems": gathered.story["problems"],
    }

    def tell() -> str:
        lines = [f"{path}: {size(len(data))}", *gathered.story["problems"]]
        return "".join(f"{plain(line)}\n" for line in lines)

    return Answer(document, tell)


def _is_page(path: Path, mark: str) -> bool:
    try:
        return storage.read_file(path, limit_bytes=1 << 30).startswith(mark.encode())
    except DistCkptError:
        return False


COMMANDS = (report,)
