"""What saves cost: bytes written and stored, host memory, and nothing that grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.generations import GenerationStore
from dist_ckpt.storage import use_ops
from helpers.boxes import in_memory
from helpers.faulty_ops import RecordingOps

ROOT = Path(__file__).resolve().parents[2]

_CHILD = """
import json, os, resource, sys, threading
import torch
import dist_ckpt

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def levels():
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), rss(), files()]

def files():
    return sum(len(names) for _, _, names in os.walk(run))

torch.set_num_threads(1)
run, width, every, until = sys.argv[1], *map(int, sys.argv[2:])
model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

def update():
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    return 1.0

def trainers_own():
    # What a trainer takes without any checkpoints: an update of all there is.
    other = torch.nn.Linear(width, width, bias=False)
    its = torch.optim.AdamW(other.parameters(), lr=0.001)
    other.weight.grad = torch.full_like(other.weight, 0.01)
    its.step()
    return peak()

own = trainers_own()
found = []
with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, every=every) as ckpt:
    for step in ckpt.steps(until):
        ckpt.record(loss=update())
        if step % 10 == 0:
            found.append(levels())
print(json.dumps({"own": own, "peak": peak(), "levels": found}))
"""


def _child(run: Path, width: int, every: int, until: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(run), str(width), str(every), str(until)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_checkpoint_with_its_bin_writes_and_stores_the_state_once(tmp_path: Path) -> None:
    """At world size one: at most 1.02 times the bytes of the state."""
    run = tmp_path / "run"
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ops = RecordingOps()
    with use_ops(ops):
        with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
            for _ in ckpt.steps(1):
                optimizer.step()
                ckpt.record(loss=1.0)
        calls = ops.of("pwrite")
    tensors = [
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    state_bytes = sum(tensor.nbytes for tensor in tensors)
    assert (run / "step_000001.bin").stat().st_size > 6 * 2**20
    written = sum(int(call.args[0]) for call in calls)
    assert state_bytes < written <= 1.02 * state_bytes
    files = {path.stat().st_ino: path.stat() for path in run.rglob("*") if path.is_file()}
    assert sum(stat.st_size for stat in files.values()) <= 1.02 * state_bytes
    assert sum(stat.st_blocks * 512 for stat in files.values()) <= 1.02 * state_bytes


def _save_often(run: Path, num_saves: int, settled: int) -> None:
    """So many saves by one process; what it holds doesn't grow once it is settled.

    Args:
        run: The run directory.
        num_saves: One a step.
        settled: How many readings, one in ten steps, are made before that.
    """
    found = _child(run, width=256 if num_saves < 1000 else 32, every=1, until=num_saves)["levels"]
    assert len(found) == num_saves // 10
    descriptors = [fds for fds, _, _, _ in found[2:]]
    # A save in flight has files open.
    assert max(descriptors[-5:]) - max(descriptors[:5]) <= 2
    assert len({threads for _, threads, _, _ in found[2:]}) == 1
    resident = [rss for _, _, rss, _ in found]
    print(f"resident {resident[settled] >> 10} KiB, at the end {resident[-1] >> 10} KiB")
    assert max(resident[-5:]) - max(resident[settled : settled + 5]) < 4 * 2**20
    # Those of the kept generations, and of one that is being made or removed.
    files = [number for _, _, _, number in found]
    print(f"files {files[settled]}, at the end {files[-1]}")
    assert max(files[-5:]) - max(files[settled : settled + 5]) <= 12
    assert GenerationStore(run).steps()[-1] == num_saves
    assert len(GenerationStore(run).steps()) == 3


def test_200_saves_leave_descriptors_threads_and_memory_level(tmp_path: Path) -> None:
    """Case 43, small: 2,000 saves are the soak's."""
    _save_often(tmp_path / "run", 200, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_2000_saves_leave_descriptors_threads_memory_and_files_level() -> None:
    """Case 43."""
    with in_memory() as folder:
        _save_often(folder / "run", 2000, 20)


def test_host_memory_above_the_trainers_own_is_the_arena_and_little_more(tmp_path: Path) -> None:
    """And case 23: a resume needs the state and one buffer, not twice the state."""
    width = 4096
    state_bytes = 12 * width * width
    arena_bytes = state_bytes + 2**20
    # Its own: what was measured, with the weights of two models, of which one is gone again.
    first = _child(tmp_path / "run", width, every=1, until=2)
    weights = 4 * width * width
    above = first["peak"] - (first["own"] - weights)
    print(f"state {state_bytes >> 20} MB, above the trainer's own {above >> 20} MB")
    assert above <= arena_bytes + 128 * 10**6
    again = _child(tmp_path / "run", width, every=1, until=4)
    above = again["peak"] - (again["own"] - weights)
    print(f"resumed: above {above >> 20} MB")
    assert above <= arena_bytes + 128 * 10**6
