"""The processes of a case: started, watched, and none is left. Layer 7; imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["TIME_IS_UP", "run_ranks"]

TIME_IS_UP = "its time was up"

_CHILD = ("-m", "dist_ckpt.bench._child")
#: The others of a rank that failed notice it, or don't.
_OTHERS_SECS = 10.0
_GONE_SECS = 10.0  # from SIGKILL to giving up: a process stuck in the kernel can't be waited for


def run_ranks(
    words: Sequence[str],
    world_size: int,
    log: Path,
    *,
    secs: float,
    news: Callable[[], object],
    patience: Callable[[], float],
) -> str:
    """Run the ranks of a case; return why they didn't end well, empty where they did.

    Args:
        words: Arguments of each.
        world_size: Number of ranks.
        log: What they print, for the reason.
        secs: They may take so long in all.
        news: Returns something else whenever they have got on.
        patience: Returns how many seconds they may be without news now.
    """
    with log.open("wb") as out, _ranks(words, world_size, out) as ranks:
        if why := _wait(ranks, time.monotonic() + secs, news, patience):
            return why
        statuses = {rank.poll() for rank in ranks} - {0, None}
    if not statuses:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "nothing")
    named = ", ".join(sorted(map(_status, statuses)))
    return f"its ranks ended with {named}: {said[:300]}"


@contextmanager
def _ranks(
    words: Sequence[str], world_size: int, log: IO[bytes]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    where = {**os.environ, **_meeting(world_size)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            ranks.append(  # noqa: PERF401 - each is known at once, so that none is left behind
                subprocess.Popen(
                    [sys.executable, *_CHILD, *words],
                    env={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        yield ranks
    finally:
        for process in ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what a peer has started too
            try:
                process.wait(_GONE_SECS)
            except subprocess.TimeoutExpired:
                log.write(f"not gone after SIGKILL, left alone: pid {process.pid}\n".encode())


def _wait(
    ranks: list[subprocess.Popen[bytes]],
    deadline: float,
    news: Callable[[], object],
    patience: Callable[[], float],
) -> str:
    """Return once all have ended, or one has failed and the others had a little time, or a limit.

    A reason is returned for limits alone.
    """
    known, since = news(), time.monotonic()
    failed = None
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if (state := news()) != known:
            known, since = state, now
        if failed is None and any(rank.returncode for rank in ranks):
            failed = now
        if failed is not None and now - failed > _OTHERS_SECS:
            break
        if now > deadline:
            return TIME_IS_UP
        if now - since > (limit := patience()):
            return f"no end within {limit:.0f} s"
        time.sleep(0.05)
    return ""


def _status(number: int | None) -> str:
    return signal.Signals(-number).name if number and number < 0 else str(number)


def _meeting(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
