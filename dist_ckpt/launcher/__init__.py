"""The launcher: torchrun with signals that work (``dist-ckpt run``). Layer 7; imports no torch.

``main`` is the command, ``launch`` the function below it. The worker's side lies in
`dist_ckpt.announce`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt.announce import announce, withdraw
from dist_ckpt.errors import UsageError
from dist_ckpt.launcher._inbox import Inbox
from dist_ckpt.launcher._options import (
    DEFAULT_GRACE_SECS,
    HELP,
    names_a_file,
    parse_options,
    plan_torchrun_args,
)
from dist_ckpt.launcher._supervise import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["announce", "launch", "main", "withdraw"]

_USAGE_STATUS = 2


def main(argv: list[str]) -> int:
    """The job of this command line has ended; returns the exit status.

    Args:
        argv: The launcher's and torchrun's options, the script, its arguments; without the
            program's name.

    Returns:
        0 when the workers ended with 0, also after a stop; the status that all workers ended with,
        where they agree on another; 130 after a second SIGINT; 2 for a wrong command line; 69
        where the nodes didn't meet, or lost each other, and nothing was stopped; else torchrun's.
    """
    try:
        options = parse_options(argv)
        if options.show_help:
            sys.stdout.write(HELP)
            return 0
        return launch(
            options.torchrun_args,
            options.script_args,
            deadline_secs=options.grace_secs,
            announce_wait_secs=options.announce_wait_secs,
        )
    except UsageError as error:
        sys.stderr.write(f"dist-ckpt run: {error}\n")
        return _USAGE_STATUS


def launch(
    torchrun_args: Sequence[str],
    script_args: Sequence[str],
    *,
    deadline_secs: float = DEFAULT_GRACE_SECS,
    announce_wait_secs: float | None = None,
) -> int:
    """The job has ended, and no process of it is left; returns the exit status as `main` does.

    It takes over this process's signals and waits for all of its children, so it belongs into a
    process of its own, on the main thread. SIGUSR1, SIGTERM, SIGINT and SIGHUP are passed on to
    workers that announced their handlers.

    Args:
        torchrun_args: torchrun's options; without one for the rendezvous the job runs on this
            machine alone.
        script_args: The script, or module, and its arguments.
        deadline_secs: What a stop may take from the moment that a worker has it; then torchrun is
            asked to end the workers, and five seconds later everything is killed.
        announce_wait_secs: How long a stop is held back while no worker handles signals; None:
            ``deadline_secs``.

    Raises:
        UsageError: The script doesn't exist, or this isn't the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "The launcher handles signals, which only the main thread can.",
            next_step="Call it there, or run `dist-ckpt run` as a process.",
        )
    if not script_args:
        raise UsageError("No script was given.", next_step="See dist-ckpt run --help.")
    if names_a_file(torchrun_args) and not Path(script_args[0]).is_file():
        raise UsageError(
            f"There is no script {script_args[0]}.",
            next_step="Check the path; torchrun's options stand before it, -m starts a module.",
            path=script_args[0],
        )
    # Behind "--" torchrun takes no option for its own that happens to begin like one of its own.
    command = [*plan_torchrun_args(torchrun_args, os.environ), "--", *script_args]
    with Inbox() as inbox:
        return Launch(
            command,
            inbox,
            grace_secs=deadline_secs,
            announce_wait_secs=deadline_secs if announce_wait_secs is None else announce_wait_secs,
        ).run()
