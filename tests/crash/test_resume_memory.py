"""A run that fits into memory while it trains fits into it when it resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import dist_ckpt

torch.set_num_threads(1)
MIB = 2**20

def peak_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

def resident_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

model = torch.nn.ParameterList([torch.zeros(4 * MIB) for _ in range(int(sys.argv[2]))])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew here
before = resident_mib()
with dist_ckpt.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, signals=()) as ckpt:
    resumed = ckpt.resumed.step if ckpt.resumed else 0
    after = peak_mib()
    for step in ckpt.steps(until=1):
        for p in model:
            p.grad = torch.ones_like(p)
        optimizer.step()
print(resumed, before, after)
"""


def _run(folder: Path, num_tensors: int) -> tuple[int, float, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "run"), str(num_tensors)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    resumed, before, after = done.stdout.split()
    return int(resumed), float(before), float(after)


@pytest.mark.timeout(200)
def test_a_resume_needs_the_state_the_arena_and_little_more(tmp_path: Path) -> None:
    """Case 23: moments are made and read in place, and the arena is allocated."""
    weights_mib = 16 * 8
    assert _run(tmp_path, 8)[0] == 0
    resumed, before, after = _run(tmp_path, 8)
    assert resumed == 1
    moments_mib, arena_mib = 2 * weights_mib, 3 * weights_mib
    assert after - before > moments_mib, "the moments weren't read: nothing was measured"
    assert after - before < moments_mib + arena_mib + 128
