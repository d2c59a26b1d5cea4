"""Starts the ranks of each case and gathers what they measured. Layer 7; imports no torch."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from dist_ckpt import __version__
from dist_ckpt.bench._plan import Case, Options, encode_order
from dist_ckpt.errors import IncompleteError
from dist_ckpt.signals import terminable

__all__ = ["run_bench"]

#: Above a case's own time: imports, the first round, and a slow peer's last.
_GRACE_SECS = 240.0
_LIBRARIES = ("torch", "numpy", "safetensors", "torchsnapshot", "torch-checkpointing")


def run_bench(options: Options, *, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return everything that was measured, as JSON; a case that failed says why.

    Args:
        options: What is asked for.
        tell: Told what goes on.
    """
    free = _free_memory_bytes()
    began = time.time()
    results = []
    with terminable(), _folder(options.directory) as folder:
        machine = _machine(folder, free)
        for case in options.cases(free):
            tell(f"{case.name}: {case.title}")
            start = time.monotonic()
            found = _measure(case, options, folder / case.name)
            facts = {"name": case.name, "title": case.title, "world_size": case.world_size}
            results.append({**facts, "secs": round(time.monotonic() - start, 1), **found})
    return {
        "version": __version__,
        "time": began,
        "secs": round(time.time() - began, 1),
        "repeats": options.repeats,
        "machine": machine,
        "cases": results,
    }


def _measure(case: Case, options: Options, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    answer, log = folder / "answer.json", folder / "log"
    try:
        with (
            log.open("wb") as out,
            _ranks(case, [encode_order(case, options, folder), str(answer)], out) as ranks,
        ):
            statuses = _wait(ranks, time.monotonic() + case.secs + _GRACE_SECS)
        if any(statuses):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            said = next((line for line in reversed(lines) if line.strip()), "nothing")
            return {"error": f"its ranks ended with {', '.join(map(str, statuses))}: {said[:500]}"}
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"error": f"there is no answer: {error}"}
    finally:
        _remove(folder)
    return found


@contextmanager
def _ranks(case: Case, words: list[str], log: IO[bytes]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks of a case; none is left at the end."""
    where = {**os.environ, **_meeting(case.world_size)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(case.world_size):
            ranks.append(  # noqa: PERF401 - each is known at once, so that none is left behind
                subprocess.Popen(
                    [sys.executable, "-m", "dist_ckpt.bench._child", *words],
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
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int | str]:
    """Return how each rank ended; once one has failed, the others get little time."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 10.0)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return ["no status in time" if r.poll() is None else int(r.returncode) for r in ranks]


def _meeting(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    try:
        folder = Path(
            tempfile.mkdtemp(prefix=f"dist-ckpt-bench-{secrets.token_hex(2)}-", dir=parent)
        )
    except OSError as error:
        raise IncompleteError(
            f"There is no directory to measure in: {error.strerror}.",
            next_step="Give --dir one that can be written, on the disk of interest.",
        ) from error
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 34


def _machine(folder: Path, free_memory_bytes: int) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    load = os.getloadavg()[0]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "free_memory_bytes": free_memory_bytes,
        "free_disk_bytes": shutil.disk_usage(folder).free,
        "file_system": _file_system(folder),
        "load": load,
        "libraries": versions,
    }


def _file_system(folder: Path) -> str:
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, point, name, *_ = line.split()
        if f"{folder}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(best):
            best, kind = point, name
    return kind
