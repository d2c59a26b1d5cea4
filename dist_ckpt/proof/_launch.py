"""One scenario as processes of its own: started, waited for, ended. I/O, main thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dist_ckpt.errors import IncompleteError

__all__ = ["Launch", "Order", "last_lines", "run_process"]

_END_SECS = 5.0
_GONE_SECS = 10.0  # from SIGKILL to giving up: a process stuck in the kernel can't be waited for
_TAIL_BYTES = 1 << 16
_NUM_LINES = 12
_NUM_CHARS = 500
#: Its report on a rank that failed fills a screen, below the error that it is about.
_OF_TORCHRUN = re.compile(r"^[WE]\d{4} .*torch/distributed/elastic/")


@dataclass(frozen=True)
class Order:
    """What a scenario's process is.

    Attributes:
        command: Its words.
        environ: What is added to this process's environment; None takes a variable away.
        log: The file for all that it prints; in a directory that exists.
        timeout_secs: How long it may take.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str | None]
    log: Path
    timeout_secs: float

    def whole_environ(self) -> dict[str, str]:
        """Return the process's whole environment."""
        merged = {**os.environ, **self.environ}
        return {name: value for name, value in merged.items() if value is not None}


#: Runs one order to its end; returns the exit status, None where time was up.
Launch: TypeAlias = Callable[[Order], int | None]


def run_process(order: Order) -> int | None:
    """The processes of an order have ended; returns the status, None where time was up.

    Raises:
        IncompleteError: The command can't be started, or can't be ended.
    """
    with order.log.open("wb") as log:
        try:
            # A session of its own: Ctrl-C in a terminal is for the proof alone, which ends it.
            process = subprocess.Popen(
                list(order.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=order.whole_environ(),
                start_new_session=True,
            )
        except OSError as error:
            raise IncompleteError(
                f"{order.command[0]} can't be started: {error.strerror}.",
                next_step="Write the command as you would in a shell, behind two dashes.",
            ) from error
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(order.timeout_secs)
        status = process.returncode
    finally:
        is_gone = _end(process)
    if not is_gone:
        raise IncompleteError(
            f"Process {process.pid} of {order.command[0]} is not gone after SIGKILL and is left "
            "alone.",
            next_step="It is stuck in the kernel: look at the disk that it uses.",
            pid=process.pid,
        )
    return status


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Nothing of it is left running; False where the kernel doesn't let go of it."""
    try:
        if process.poll() is None:
            # Twice: a launcher ends its whole job then, and a Checkpointer doesn't wait for a save.
            for _ in range(2):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECS)
    finally:  # also where a second Ctrl-C ends the patience
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_SECS)
    return process.returncode is not None


def last_lines(log: Path) -> list[str]:
    """Return the last lines that a scenario printed, without what torchrun says of a dead rank."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    said = list(itertools.takewhile(lambda line: not _OF_TORCHRUN.search(line), lines))
    kept = [line[:_NUM_CHARS] for line in (said if any(said) else lines) if line.strip()]
    return kept[-_NUM_LINES:]
