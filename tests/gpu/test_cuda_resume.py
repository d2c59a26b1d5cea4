"""On a real GPU: saves that overlap training hold one instant, and a resumed run is bit-equal.

``pytest -m gpu tests/gpu`` on a machine with a CUDA device. The proofs are in test_cuda_proofs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt
from dist_ckpt.history import read_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def build(seed: int, **flags: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(512, 64)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)


def train(run: Path, until: int, seed: int, **flags: Any) -> dict[int, np.ndarray[Any, Any]]:
    """Train to ``until``; return step → weights as they were at that boundary."""
    model, optimizer = build(seed, **flags)
    scaler = torch.amp.GradScaler("cuda")
    seen = {}
    with dist_ckpt.Checkpointer(
        run, model=model, optimizer=optimizer, scaler=scaler, every=2, keep_last=None
    ) as ckpt:
        for step in ckpt.steps(until=until):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(256, 64, device="cuda")).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            ckpt.record(loss=loss)
            seen[step] = np.concatenate(
                [p.detach().float().cpu().numpy().ravel() for p in model.parameters()]
            )
    return seen


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_overlapped_saves_hold_the_boundary_and_a_resumed_run_is_bit_equal(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    seen = train(tmp_path / "whole", 12, seed=1, **flags)
    for step in range(2, 13, 2):
        state = dist_ckpt.read_bin(tmp_path / "whole" / f"step_{step:06d}.bin")
        assert (state.weights == seen[step]).all(), step
    train(tmp_path / "cut", 5, seed=1, **flags)
    train(tmp_path / "cut", 12, seed=2, **flags)
    whole, cut = (tmp_path / name / "step_000012.bin" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    events = [e["event"] for e in dist_ckpt.open_run(tmp_path / "whole").journal()]
    assert "save_failed" not in events


def test_a_recorded_loss_is_logged_without_waiting_for_the_step_after_it(tmp_path: Path) -> None:
    model, optimizer = build(1)
    behind: list[Any] = []
    with dist_ckpt.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ckpt:
        for step in ckpt.steps(until=3):
            if step == 3:  # the boundary of step 2 has logged step 1
                assert not behind[0].query(), "what step 2 has queued is still running"
            ckpt.record(loss=torch.full((), float(step), device="cuda"), lr=0.1)
            if step == 2:
                torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # seconds
                behind.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                behind[0].record()
    assert read_loss(tmp_path / "run") == [(1, 1.0), (2, 2.0), (3, 3.0)]
