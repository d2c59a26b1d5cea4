"""How long rewriting a generation takes, and how much memory.

    python tests/benchmarks/reshard.py [--gigabytes 1.5] [--rounds 5] [--directory DIR]

In each round, one after the other and each from a cold cache: the same bytes copied (``cp``, then a
sync), read and written at the disk's limit (direct reads by two threads; direct writes of one
buffer by four), and rewritten 4 → 1 and 1 → 4 in a process of its own, once as the command does it
and once without reading the result back. Ratios within a round are what counts: a machine's speed
drifts. All samples are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dist_ckpt import storage
from dist_ckpt.generations import StoredGenerations

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.generating import adam_part, write_generation

_CHILD = """
import json, resource, sys, time
from pathlib import Path
import torch
from dist_ckpt import reshard as r
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.reshard import _reshard

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

run, ranks, out, memory, trial = sys.argv[1:]
if trial == "no":
    _reshard.try_loading = lambda *args, **kwargs: None
store = StoredGenerations(Path(run))
idle, began = peak(), time.perf_counter()
job = r.prepare(store, store.manifest(100), int(ranks))
done = r.reshard(job, out, memory_bytes=int(memory))
print(json.dumps({"secs": time.perf_counter() - began, "above": peak() - idle}))
"""


def make(base: Path, num_bytes: int, ranks: int) -> Path:
    """Return a run with one generation of so many bytes, of a model like GPT-2."""
    torch.manual_seed(0)
    width = 768
    rows = num_bytes // 12 // width
    weights = {"wte": torch.randn(rows * 3 // 10, width)}
    weights |= {f"h.{n}.w": torch.randn(rows * 7 // 10 // 12, width) for n in range(12)}
    weights |= {f"h.{n}.b": torch.randn(width) for n in range(12)}
    part = adam_part(weights)
    run = base / f"of-{ranks}"
    write_generation(run, [part] * ranks)
    return run


def forget(directory: Path) -> None:
    """Have none of the files' bytes in the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def copy(run: Path, out: Path) -> float:
    """Return the seconds of ``cp`` and a sync of each file."""
    began = time.perf_counter()
    subprocess.run(["/bin/cp", "-r", str(run / "checkpoints"), str(out)], check=True)
    for path in out.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - began


def limit(run: Path, out: Path) -> tuple[float, float]:
    """Return the seconds of reading all bytes, and of writing as many."""
    store = StoredGenerations(run)
    point = store.manifest(100)
    arena = storage.Arena(max(record["size_bytes"] for record in point.files.values()))
    arena.array[:] = 1
    out.mkdir()
    began = time.perf_counter()
    store.verify(point)
    read = time.perf_counter() - began
    began = time.perf_counter()
    for name, record in point.files.items():
        storage.write_shard(out / name, arena.array, record["size_bytes"])
    return read, time.perf_counter() - began


def rewrite(run: Path, ranks: int, out: Path, memory: int, *, trial: bool) -> dict[str, float]:
    """Return seconds and peak memory above the idle process of rewriting, in its own process."""
    words = [str(run), str(ranks), str(out), str(memory), "yes" if trial else "no"]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print every round, then the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=256 << 20)
    parser.add_argument("--directory", default=None, help="Where to work; a disk of interest.")
    given = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="reshard-", dir=given.directory))
    try:
        runs = {n: make(base, int(given.gigabytes * 1e9), n) for n in (4, 1)}
        rows = [measure(base, runs, given.memory) for _ in range(given.rounds)]
    finally:
        shutil.rmtree(base)
    print(f"\nmedians of {len(rows)} rounds, and the lowest and highest")
    for key in rows[0]:
        values = sorted(row[key] for row in rows)
        print(f"{key:<32} {statistics.median(values):8.3f}  {values[0]:.3f} to {values[-1]:.3f}")


def measure(base: Path, runs: dict[int, Path], memory: int) -> dict[str, float]:
    """Return one round."""
    row: dict[str, float] = {}
    out = base / "out"
    for old, new in ((4, 1), (1, 4)):
        what = f"{old} to {new}"
        forget(runs[old])
        row[f"{what}: copy, s"] = copied = copy(runs[old], out)
        shutil.rmtree(out)
        forget(runs[old])
        read, write = limit(runs[old], out)
        row[f"{what}: limit read, s"], row[f"{what}: limit write, s"] = read, write
        shutil.rmtree(out)
        for trial in (True, False):
            forget(runs[old])
            found = rewrite(runs[old], new, out, memory, trial=trial)
            shutil.rmtree(out)
            label = "reshard" if trial else "without reading back"
            row[f"{what}: {label}, s"] = found["secs"]
            row[f"{what}: {label} / copy"] = found["secs"] / copied
            row[f"{what}: {label} / limit"] = found["secs"] / (read + write)
            if trial:
                row[f"{what}: peak above idle, MB"] = found["above"] / 1e6
    print("  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
