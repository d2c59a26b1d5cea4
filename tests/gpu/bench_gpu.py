"""What a save costs training on one GPU, beside DCP's and torch.save. Within 4 minutes.

    python tests/gpu/bench_gpu.py [--params 124000000] [--steps 40] [--dir DIR]

Prints one JSON document: medians and samples, in seconds, of

* blocked, with and without overlap: from the end of a body to the beginning of the next, the device
  synchronised at the former only, as a training that doesn't save would have it;
* a step while a save is in flight, and a step without, both ended by a synchronisation;
* DCP ``async_save`` with its pinned memory, and ``torch.save`` with fsync: until the call returns;
* the copy from the device into pinned memory: its share of the limit is limit / blocked without
  overlap.

Not a test: nothing here is collected. It has never been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import dist_ckpt
from dist_ckpt.bench._limits import pinned_copy_secs
from dist_ckpt.bench._state import build_state
from dist_ckpt.capture import Captured

QUIET_STEPS = 6


class Work:
    """A step on the device that takes a while and changes every parameter."""

    def __init__(self, num_bytes: int) -> None:
        state = build_state("adamw", num_bytes)
        self.model: nn.Module = state.model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.matrix = torch.randn(4096, 4096, device="cuda")

    def step(self) -> None:
        """Queue one step; doesn't wait for it."""
        value = self.matrix
        for _ in range(20):
            value = value @ self.matrix / 64
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()

    def step_and_wait(self) -> None:
        """Make one step to its end."""
        self.step()
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of ``work``, begun on an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def saves(work: Work, run: Path, num_steps: int, *, overlap: bool) -> dict[str, list[float]]:
    """Return blocked times, and times of steps with and without a save in flight."""
    found: dict[str, list[float]] = {"blocked": [], "step in flight": [], "step": []}
    every = 2 * QUIET_STEPS
    with contextlib.ExitStack() as stack:
        if not overlap:
            stack.enter_context(_without_overlap())
        ckpt = stack.enter_context(
            dist_ckpt.Checkpointer(
                run,
                model=work.model,
                optimizer=work.optimizer,
                every=every,
                export="never",
                keep_last=1,
                signals=(),
            )
        )
        left: float | None = None
        for step in ckpt.steps(until=num_steps * every):
            at = (step - 1) % every
            if left is not None and at == 0 and step > every + 1:  # the first makes the arena
                found["blocked"].append(time.perf_counter() - left)
            work.step()
            secs = timed(work.step_and_wait)
            if step > every + 1:
                found["step in flight" if at == 0 else "step"].append(secs)
            torch.cuda.synchronize()
            left = time.perf_counter()
    return found


@contextlib.contextmanager
def _without_overlap() -> Iterator[None]:
    """Have a model of which nobody can say that only its optimizer changes it."""
    with mock.patch.object(Captured, "only_steps_change_weights", return_value=False):
        yield


def state_of(work: Work) -> dict[str, Any]:
    """Return the state as scripts save it."""
    return {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}


def peers(work: Work, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return how long each peer holds the training loop."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    found: dict[str, list[float]] = {"DCP async_save, pinned": [], "torch.save + fsync": []}
    stager = DefaultStager(StagingOptions(True, False, False, True))
    for number in range(repeats + 1):
        path = folder / f"dcp_{number}"
        futures: list[Any] = []

        def dcp_save(path: Path = path, futures: list[Any] = futures) -> None:
            futures.append(async_save(state_of(work), checkpoint_id=path, async_stager=stager))

        secs = timed(dcp_save)
        futures[0].result()
        shutil.rmtree(path)
        if number:
            found["DCP async_save, pinned"].append(secs)

        def torch_save(path: Path = folder / f"{number}.pt") -> None:
            with path.open("wb") as file:
                torch.save(state_of(work), file)
                file.flush()
                os.fsync(file.fileno())

        secs = timed(torch_save)
        (folder / f"{number}.pt").unlink()
        if number:
            found["torch.save + fsync"].append(secs)
    stager.close()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--params", type=int, default=124_000_000)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("There is no CUDA device.\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=options.dir))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1
    )
    try:
        work = Work(12 * options.params)
        num_bytes = 12 * sum(parameter.numel() for parameter in work.model.parameters())
        samples: dict[str, list[float]] = {}
        for overlap in (True, False):
            name = "overlap" if overlap else "no overlap"
            found = saves(work, folder / name.replace(" ", "_"), options.saves, overlap=overlap)
            samples |= {f"{name}: {key}": secs for key, secs in found.items()}
        samples |= peers(work, folder, options.saves)
        samples["pinned copy"] = [pinned_copy_secs(num_bytes) or 0.0 for _ in range(5)]
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(secs) for name, secs in samples.items() if secs}
    ratios = {
        "step in flight / step": medians["overlap: step in flight"] / medians["overlap: step"],
        "D2H share of the pinned limit": medians["pinned copy"] / medians["no overlap: blocked"],
    }
    report = {"device": torch.cuda.get_device_name(), "bytes": num_bytes, "ratios": ratios}
    report |= {"medians_secs": medians, "samples_secs": samples}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
