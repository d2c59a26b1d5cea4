"""Every case in its turn, in a directory that goes at the end. Layer 7; imports no torch."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from dist_ckpt import __version__
from dist_ckpt.bench._attempts import measure, remove_tree
from dist_ckpt.bench._plan import Options
from dist_ckpt.errors import IncompleteError
from dist_ckpt.signals import terminable

__all__ = ["run_bench"]

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
            found = measure(case, options, folder / case.name)
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
        remove_tree(folder)


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
