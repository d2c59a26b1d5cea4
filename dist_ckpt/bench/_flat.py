"""What mustn't grow with a run: a step without a save, history, listings, memory. Layer 7.

Small figures are medians of many; each is told with what it is measured beside.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt import storage
from dist_ckpt.bench._ours import DistCkpt
from dist_ckpt.bench._plan import Case
from dist_ckpt.bench._state import build_state
from dist_ckpt.generations import GenerationStore, StoredGenerations
from dist_ckpt.history import LossFile
from dist_ckpt.runs import open_run
from dist_ckpt.service import Checkpointer

__all__ = ["measure_flat"]

_NUM_STEPS = 2_000
_NUM_LOSSES = 200_000
_WINDOW = 10_000
_NUM_GENERATIONS = 2_000
#: Below this size a listing or a history of the full length would be most of a quick run.
_QUICK_BYTES = 1 << 26


def measure_flat(case: Case, repeats: int, folder: Path) -> dict[str, Any]:
    """Return figure → samples; the same on every rank; collective."""
    shorter = 20 if case.num_bytes < _QUICK_BYTES else 1
    figures = _service(folder, _NUM_STEPS // shorter)
    if dist.get_world_size() > 1:
        return {"figures": figures}
    figures |= _losses(folder, repeats, _NUM_LOSSES // shorter)
    figures |= _listing(folder, repeats, _NUM_GENERATIONS // shorter)
    figures |= _memory(folder, case.num_bytes)
    return {"figures": figures}


def _service(folder: Path, num_steps: int) -> dict[str, Any]:
    """Measure what the boundary costs where nothing is saved, and beside it one all_reduce."""
    torch.manual_seed(0)  # replicas start equal
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    bare: list[float] = []
    recorded: list[float] = []
    loss = torch.tensor(0.5)
    with Checkpointer(
        folder / "service", model=model, optimizer=optimizer, every=1 << 30, signals=()
    ) as ckpt:
        left = None
        for step in ckpt.steps(until=1 << 30):
            now = time.perf_counter()
            if left is not None:
                (bare if step <= num_steps + 1 else recorded).append(now - left)
            if step > 2 * num_steps:
                break
            if step > num_steps:
                ckpt.record(loss=loss)
            left = time.perf_counter()
    box = torch.tensor([0])
    reduces = [_timed(lambda: dist.all_reduce(box)) for _ in range(num_steps)]
    return {
        "step": [statistics.median(bare)],
        "step with a loss": [statistics.median(recorded)],
        "all_reduce": [statistics.median(reduces)],
    }


def _losses(folder: Path, repeats: int, num_losses: int) -> dict[str, Any]:
    """Measure appends at the beginning and at the end of a long run, and opening it."""
    path = folder / "long.loss.json"
    window = min(_WINDOW, num_losses // 4)
    with_closing = LossFile.open(path)
    ends = {}
    for start in range(0, num_losses, window):
        began = time.perf_counter()
        for step in range(start, start + window):
            with_closing.append(step + 1, 1.0 / (step + 1))
        ends[start] = (time.perf_counter() - began) / window
    with_closing.close()
    opens = []
    for _ in range(repeats):
        began = time.perf_counter()
        file = LossFile.open(path)
        opens.append(time.perf_counter() - began)
        file.close()
    return {
        "losses opened": opens,
        "first appends": [ends[0]],
        "last appends": [ends[max(ends)]],
        "num losses": [num_losses],
    }


def _listing(folder: Path, repeats: int, num_generations: int) -> dict[str, Any]:
    """Measure the whole process of ``dist-ckpt ls`` on many generations, and on a tenth."""
    run = folder / "listed"
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(run, model=model, optimizer=optimizer, every=1, signals=()) as ckpt:
        for _ in ckpt.steps(until=1):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
    figures: dict[str, Any] = {"num generations": [num_generations]}
    command = [sys.executable, "-m", "dist_ckpt", "ls", str(run)]

    def listed() -> float:
        return _timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))

    figures["ls of one"] = [listed() for _ in range(repeats)]
    _multiply(run, num_generations)
    figures["ls"] = [listed() for _ in range(repeats)]
    return figures


def _multiply(run: Path, num_generations: int) -> None:
    """Have so many committed, verified generations, the first one under other steps."""
    store = GenerationStore(run)
    point = StoredGenerations(run).manifest(1)
    first = store.path(1)
    index = (first / ".snapshot_metadata").read_bytes()
    with storage.use_ops(_NoSync()):
        for step in range(2, num_generations + 1):
            temporary = store.prepare(step, "0" * 8)
            for name in point.files:
                os.link(first / name, temporary / name)
            store.commit(temporary, replace(point, step=step), index)
            store.mark_verified(step, "copied")


class _NoSync(storage.Ops):
    """The system without its syncs: what is made here needn't outlive a power cut."""

    def fsync(self, fd: int) -> None:
        del fd


def _memory(folder: Path, num_bytes: int) -> dict[str, Any]:
    """Measure peak memory above what training holds anyway, bytes written, and a first resume."""
    state = build_state("adamw", num_bytes)
    before = _resident()
    ours = DistCkpt(state, folder)
    _forget_peak()
    written = _written()
    ours.save(0)()
    ours.settle()
    saving = _peak() - before - state.num_bytes
    figures: dict[str, Any] = {
        "state bytes": [state.num_bytes],
        "save above the arena bytes": [saving],
        "bytes written": [_written() - written],
        "bytes stored": [_stored(folder / "ours")],
    }
    ours.close()
    before = _resident()
    _forget_peak()
    generation = open_run(folder / "ours").latest()
    if generation is not None:
        generation.load_into(model=state.model, optimizer=state.optimizer)
    figures["resume above the state bytes"] = [_peak() - before]
    return figures


def _stored(run: Path) -> int:
    """Return the bytes of all files of a run, each inode once: a link costs nothing."""
    found = {p.stat().st_ino: p.stat().st_size for p in run.rglob("*") if p.is_file()}
    return sum(found.values())


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _written() -> int:
    """Return the bytes that this process has sent to devices."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
