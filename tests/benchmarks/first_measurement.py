"""A first measurement on a large AdamW state: blocked, durable, restored, beside torch's own.

    python tests/benchmarks/first_measurement.py [--params 124000000] [--repeats 5] [--dir DIR]

Everything is measured in turn in one process, so the ratios hold where the absolute times do not:

* blocked: how long a save keeps the training loop, beside a warm memcpy of the same bytes;
* durable: until the generation is committed, beside ``torch.save`` and an fsync of its file;
* restored: a generation into live objects, every digest checked, beside
  ``torch.load(mmap=True)`` and ``load_state_dict``; both from the page cache.

Prints one JSON document with medians, all samples and ratios. World size one, CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist_ckpt
from dist_ckpt.storage import Arena


def build(num_params: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of about ``num_params`` in shapes of a transformer, its AdamW with state."""
    width = 768
    layers = max((num_params - 40_000 * width) // (12 * width * width), 1)
    shapes: list[tuple[int, ...]] = [(40_000, width)]
    for _ in range(layers):
        shapes += [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        shapes += [(width,), (width,)]
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def nudge(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change a little of the state, as an update would, without costing the time of one."""
    with torch.no_grad():
        next(model.parameters()).add_(1e-6)
    for state in optimizer.state.values():
        state["step"] += 1


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that ``work`` took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Memcpy:
    """Copies ``num_bytes`` between warm memory: the limit of any save that copies at all."""

    def __init__(self, num_bytes: int) -> None:
        self._source = np.ones(num_bytes, np.uint8)
        self._arena = Arena(num_bytes)
        self._arena.populate()
        self._target = self._arena.array[:num_bytes]
        self.secs: list[float] = []
        np.copyto(self._target, self._source)

    def measure(self) -> None:
        """Add one sample."""
        self.secs.append(timed(lambda: np.copyto(self._target, self._source)))


def our_saves(
    run: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    repeats: int,
    limit: Memcpy,
) -> tuple[list[float], list[float]]:
    """Return seconds that the loop was held by each save, and seconds until each was committed."""
    held = []
    with dist_ckpt.Checkpointer(
        run, model=model, optimizer=optimizer, every=1, keep_last=2, timeout_secs=300
    ) as ckpt:
        left = None
        for _ in ckpt.steps(until=repeats + 1):
            if left is not None:
                held.append(time.perf_counter() - left)
            time.sleep(4.0)  # the save before is verified and exported: each is measured alone
            nudge(model, optimizer)
            limit.measure()
            left = time.perf_counter()
    saved = [event for event in dist_ckpt.open_run(run).journal() if event["event"] == "saved"]
    durable = [event["blocked_secs"] + event["durable_secs"] for event in saved]
    # The first save also makes its layout; the last ends the run.
    return held[1:], durable[1:-1]


def torch_saves(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, repeats: int
) -> list[float]:
    """Return seconds of ``torch.save`` and fsync, each into a new file."""

    def save(path: Path) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    secs = []
    for number in range(repeats):
        path = folder / f"torch_{number}.pt"
        secs.append(timed(lambda path=path: save(path)))  # type: ignore[misc]
        if number:
            path.unlink()
    return secs


def restores(run: Path, file: Path, num_params: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of restoring into live objects, ours and torch's in turn, warm."""
    model, optimizer = build(num_params)
    # Their own objects: load_state_dict leaves the optimizer with pages of torch's mapped file,
    # which whoever writes there next would pay for.
    their_model, their_optimizer = build(num_params)
    latest = dist_ckpt.open_run(run).latest()
    if latest is None:
        raise SystemExit("no generation to restore")
    for path in [file, *sorted(latest.path.iterdir())]:
        path.read_bytes()  # into the page cache

    def ours() -> None:
        with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, export="never") as ckpt:
            if ckpt.resumed is None:
                raise SystemExit("nothing was resumed")
            secs["ours"].append(ckpt.resumed.secs)

    def theirs() -> None:
        state = torch.load(file, mmap=True, weights_only=True)
        their_model.load_state_dict(state["model"])
        their_optimizer.load_state_dict(state["optimizer"])

    secs: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(repeats):
        ours()
        secs["torch"].append(timed(theirs))
    return secs


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--params", type=int, default=124_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; a fresh folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dist_ckpt_bench_", dir=options.dir))
    try:
        model, optimizer = build(options.params)
        num_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
        limit = Memcpy(num_bytes)
        held, durable = our_saves(folder / "run", model, optimizer, options.repeats + 1, limit)
        copies = limit.secs[1:]
        del limit
        saved = torch_saves(folder, model, optimizer, options.repeats)
        del model, optimizer
        restored = restores(folder / "run", folder / "torch_0.pt", options.params, options.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    samples = {
        "memcpy": copies,
        "blocked": held,
        "durable": durable,
        "torch_save_fsync": saved,
        "restore": restored["ours"],
        "torch_load_mmap": restored["torch"],
    }
    medians = {name: statistics.median(secs) for name, secs in samples.items()}
    ratios = {
        "blocked / memcpy": medians["blocked"] / medians["memcpy"],
        "durable / torch.save + fsync": medians["durable"] / medians["torch_save_fsync"],
        "restore / torch.load(mmap)": medians["restore"] / medians["torch_load_mmap"],
    }
    report = {
        "bytes": num_bytes,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "medians_secs": {name: round(value, 4) for name, value in medians.items()},
        "samples_secs": {name: [round(s, 4) for s in secs] for name, secs in samples.items()},
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
