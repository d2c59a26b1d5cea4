"""A progress bar on a terminal, nothing elsewhere. Layer 8."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["byte_bar"]


@contextlib.contextmanager
def byte_bar(label: str, num_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Give what is to be told of bytes done; draws on stderr if that is a terminal.

    Args:
        label: What is going on.
        num_bytes: How many there are.
        quiet: Draw nothing anyway.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich import progress  # noqa: PLC0415 - only where it is shown
    from rich.console import Console  # noqa: PLC0415 - as above

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda count: bar.update(task, advance=count)
