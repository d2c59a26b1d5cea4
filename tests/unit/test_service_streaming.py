"""Where there is no memory for an arena, saves stream from the live tensors, block, and say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dist_ckpt

SCRIPT = """
import resource, sys
import torch, dist_ckpt

def train(run, limit):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2000, 6000), torch.nn.BatchNorm1d(6000),
                                torch.nn.Linear(6000, 2000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(4, 2000)
    for parameter in model.parameters():  # gradients before the limit: only the arena is refused
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if limit:
        pages = int(open("/proc/self/statm").read().split()[0])
        size = pages * resource.getpagesize() + (224 << 20)  # the arena would be 288 MB
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, every=2) as ckpt:
        for step in ckpt.steps(until=3):
            optimizer.zero_grad(set_to_none=False)
            model(data).square().mean().backward()
            optimizer.step()

train(sys.argv[1], limit=False)
train(sys.argv[2], limit=True)
"""


def test_a_save_without_memory_for_the_arena_streams_the_same_bytes_and_says_so(
    tmp_path: Path,
) -> None:
    roomy, short = tmp_path / "roomy", tmp_path / "short"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(roomy), str(short)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "saves block training" in line]
    assert len(said) == 1, done.stderr
    assert "[dist-ckpt short]" in said[0]
    for step in (2, 3):
        files = [run / f"step_{step:06d}.bin" for run in (roomy, short)]
        assert files[0].read_bytes() == files[1].read_bytes()
        generation = dist_ckpt.open_run(short).generations()[step - 2]
        generation.verify()
        assert generation.verified_at is not None
        states = [run / f"checkpoints/step_{step:06d}/rank_00000.state" for run in (roomy, short)]
        buffers = [path.read_bytes()[:48_000] for path in states]
        assert buffers[0] == buffers[1]
