"""On a real GPU: what changes before the optimizer's step, several devices, offloaded state.

``pytest -m gpu tests/gpu``; those with two devices are left out where there is one. The same on
streams that only count is in tests/unit/test_staging_overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

#: Large enough that a copy is under way while the next body begins: 64 MB a layer.
WIDTH = 4096
Weights = dict[str, torch.Tensor]


class Averaging(nn.Module):
    """MoCo: the key encoder follows the query encoder in forward, before the optimizer's step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, device=device)
        self.key = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(query, 0.1)
        out: torch.Tensor = (self.query(x) - self.key(x)).square().mean()
        return out


def train(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], torch.Tensor],
    *,
    until: int = 8,
    before: Callable[[int], object] = lambda _step: None,
) -> dict[int, Weights]:
    """Train; return step → weights as they were at that boundary."""
    seen = {}
    with dist_ckpt.Checkpointer(
        run, model=model, optimizer=optimizer, every=2, keep_last=None
    ) as ckpt:
        for step in ckpt.steps(until=until):
            before(step)
            loss = loss_of()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ckpt.record(loss=loss)
            seen[step] = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return seen


def check_boundaries(run: Path, seen: dict[int, Weights]) -> list[int]:
    """Each generation holds the weights of its boundary; return their steps."""
    generations = list(dist_ckpt.open_run(run).generations())
    for generation in generations:
        for name, weight in seen[generation.step].items():
            assert torch.equal(generation.tensor(name), weight), (generation.step, name)
    return sorted(generation.step for generation in generations)


@pytest.mark.parametrize("has_all", [False, True], ids=["its own", "all parameters"])
def test_an_encoder_that_changes_in_forward_is_saved_as_it_was_at_the_boundary(
    tmp_path: Path, has_all: bool
) -> None:
    torch.manual_seed(1)
    model = Averaging("cuda")
    given = model if has_all else model.query
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(16, WIDTH, device="cuda")
    seen = train(tmp_path / "run", model, optimizer, lambda: model(inputs))
    assert check_boundaries(tmp_path / "run", seen) == [2, 4, 6, 8]
    events = [e["event"] for e in dist_ckpt.open_run(tmp_path / "run").journal()]
    assert "save_failed" not in events, "the query encoder overlaps still"


def test_weights_swapped_for_an_evaluation_are_never_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(16, WIDTH, device="cuda")
    average = [torch.zeros_like(p) for p in model.parameters()]

    def evaluate(step: int) -> None:
        if step == 3:
            kept = [p.detach().clone() for p in model.parameters()]
            for values in (average, kept):
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), values, strict=True):
                        parameter.copy_(value)
                    model(inputs)

    def loss() -> torch.Tensor:
        out: torch.Tensor = model(inputs).square().mean()
        return out

    with pytest.warns(UserWarning, match="was changed before the optimizer's step"):
        seen = train(tmp_path / "run", model, optimizer, loss, before=evaluate)
    assert check_boundaries(tmp_path / "run", seen) == [3, 4, 6, 8]


def build_elsewhere(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 8))
    model.to("cuda:1")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_a_model_on_another_device_than_the_current_one_goes_on_bit_equal(tmp_path: Path) -> None:
    """Copies from it are waited for, and its random state is kept."""

    def play(run: Path, until: int, seed: int) -> dict[int, Weights]:
        model, optimizer = build_elsewhere(seed)

        def loss() -> torch.Tensor:
            out: torch.Tensor = model(torch.randn(16, WIDTH, device="cuda:1")).square().mean()
            return out

        return train(run, model, optimizer, loss, until=until)

    assert torch.cuda.current_device() == 0
    whole = play(tmp_path / "whole", 8, 1)
    assert check_boundaries(tmp_path / "whole", whole) == [2, 4, 6, 8]
    play(tmp_path / "cut", 5, 1)
    resumed = play(tmp_path / "cut", 8, 2)
    for name, weight in whole[8].items():
        assert torch.equal(resumed[8][name], weight), name


class HostMomentum(torch.optim.Optimizer):
    """Keeps the momentum on the host for parameters on the device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, device="cpu")
                state["momentum"].mul_(0.9).add_(parameter.grad.cpu())
                parameter.sub_(state["momentum"].to(parameter.device), alpha=group["lr"])


def test_momentum_on_the_host_is_restored_there(tmp_path: Path) -> None:
    inputs = torch.randn(4, 8, device="cuda")

    def play(until: int, seed: int) -> Weights:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8).cuda()
        optimizer = HostMomentum(model.parameters())

        def loss() -> torch.Tensor:
            out: torch.Tensor = model(inputs).square().mean()
            return out

        def look(step: int) -> None:
            for state in optimizer.state.values() if step > 1 else ():
                assert state["momentum"].device.type == "cpu"

        run = tmp_path / "run"
        return train(run, model, optimizer, loss, until=until, before=look)[until]

    play(3, 1)
    play(5, 2)
