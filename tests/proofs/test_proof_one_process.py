"""What a training may hold besides a model and an optimizer comes back, in one process.

Each proof: resumed = uninterrupted, by bits, in losses, rates, state and the next draws; and with
one part left out it isn't.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import dist_ckpt
from helpers.scenes import Scene, prove

ROWS = [(torch.sin(torch.arange(6.0) * (n + 1)), torch.tensor([n % 5 / 5.0])) for n in range(24)]


EMA: Any = get_ema_multi_avg_fn  # it has no types


def layers(norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), norm or nn.Identity(), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1)
    )


def batches(num_workers: int = 0) -> dist_ckpt.ResumableLoader:
    return dist_ckpt.ResumableLoader(ROWS, batch_size=4, seed=3, num_workers=num_workers)


def loss_of(model: nn.Module, data: Any) -> torch.Tensor:
    x, y = next(data)
    loss: torch.Tensor = (model(x) - y).square().mean()
    return loss


def plain(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    num_workers: int = 0,
    after: Callable[[], object] = lambda: None,
    **more: Any,
) -> Scene:
    """A scene whose update is a forward, a backward and a step, then ``after``."""
    model = model or layers()
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.03)
    data = batches(num_workers)

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after()
        return loss

    return Scene(model, optimizer, update, {"data": data, **more}, close=data.close)


# Parts -----------------------------------------------------------------------------------------


def scaled() -> Scene:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    data = batches()

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, data)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Scene(model, optimizer, update, {"data": data, "scaler": scaler}, close=data.close)


def test_autocast_and_a_grad_scaler_whose_scale_moves(tmp_path: Path) -> None:
    """Case 17: the scale goes on where it was."""
    prove(tmp_path, scaled, left_out="scaler", shows_in="scaler")


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 1), (2, 2), (0, 2), (2, 1)], ids=str)
def test_the_loaders_workers_in_any_number_and_another_after_the_resume(
    tmp_path: Path, before: int, after: int
) -> None:
    """Case 36."""
    build, resume = partial(plain, num_workers=before), partial(plain, num_workers=after)
    prove(tmp_path, build, resume=resume, left_out="data", shows_in="losses")


def accumulating() -> Scene:
    scene = plain()
    model, optimizer, data = scene.model, scene.optimizer, scene.more["data"]

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(3):
            loss = loss_of(model, data) / 3
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        return total

    scene.update = update
    return scene


def test_gradients_accumulated_over_batches(tmp_path: Path) -> None:
    prove(tmp_path, accumulating, left_out="rng", shows_in="losses")


def grouped() -> Scene:
    model = layers()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.03, "betas": (0.8, 0.99)},
        {"params": [], "lr": 0.5, "weight_decay": 0.25},
        {"params": list(model[4].parameters()), "lr": 0.01, "amsgrad": True},
    ]
    optimizer = torch.optim.AdamW(groups)

    def decay() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    return plain(model, optimizer, after=decay)


def test_several_parameter_groups_one_of_them_empty(tmp_path: Path) -> None:
    """Case 40."""
    prove(tmp_path, grouped, left_out="optimizer", shows_in="rates")


@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving average", "cumulative"])
def test_batch_norms_running_statistics(tmp_path: Path, momentum: float | None) -> None:
    def build() -> Scene:
        return plain(layers(nn.BatchNorm1d(8, momentum=momentum)))

    def reset(scene: Scene) -> None:
        norm = scene.model.get_submodule("1")
        assert isinstance(norm, nn.BatchNorm1d)
        norm.reset_running_stats()

    prove(tmp_path, build, spoil=reset, shows_in="model")


def averaged(kind: str) -> Scene:
    model = layers(nn.BatchNorm1d(8))
    average: Any = EMA(0.9) if kind == "ema" else None
    mean = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    return plain(model, after=lambda: mean.update_parameters(model), extra={"mean": mean})


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_models(tmp_path: Path, kind: str) -> None:
    prove(tmp_path, partial(averaged, kind), left_out="extra", shows_in="extra.mean")


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_model(tmp_path: Path, backend: str) -> None:
    def build() -> Scene:
        compiled: Any = torch.compile(layers(nn.BatchNorm1d(8)), backend=backend)
        return plain(compiled)

    try:
        prove(tmp_path, build, left_out="optimizer", shows_in="losses")
    finally:
        torch.compiler.reset()


# Schedulers ------------------------------------------------------------------------------------

Make = Callable[[torch.optim.Optimizer], Any]
S = torch.optim.lr_scheduler

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 1 - step / 20),
    "StepLR": lambda o: S.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, milestones=[2, 6, 8], gamma=0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, factor=0.5, total_iters=7),
    "LinearLR": lambda o: S.LinearLR(o, start_factor=0.1, total_iters=8),
    "ExponentialLR": lambda o: S.ExponentialLR(o, gamma=0.9),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=3), S.ExponentialLR(o, 0.8)], milestones=[6]
    ),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, T_max=10),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.LinearLR(o, 0.1, total_iters=8), S.StepLR(o, step_size=2)]
    ),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=2, factor=0.5),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.001, 0.1, step_size_up=4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, T_0=4),
    "OneCycleLR": lambda o: S.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "PolynomialLR": lambda o: S.PolynomialLR(o, total_iters=12, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=8),
}


def test_every_scheduler_class_of_torch_is_proven() -> None:
    there = {name for name in S.__all__ if name != "LRScheduler"}  # the base of the others
    assert there | {"SWALR"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_a_scheduler(tmp_path: Path, name: str) -> None:
    """Case 18: the rates of all steps after the resume are those of the run without a cut."""

    def build() -> Scene:
        model = layers()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        scheduler = SCHEDULERS[name](optimizer)
        # A plateau needs a metric; one that never improves.
        step = partial(scheduler.step, 1.0) if name == "ReduceLROnPlateau" else scheduler.step
        return plain(model, optimizer, after=step, scheduler=scheduler)

    # An exponential decay needs nothing but the rate itself, which the optimizer's groups hold.
    shows_in = "scheduler" if name == "ExponentialLR" else "rates"
    prove(tmp_path, build, left_out="scheduler", shows_in=shows_in)


# Foreign loaders -------------------------------------------------------------------------------


class Endless:
    """What a user writes around torchdata's loader: the stream goes on over epochs."""

    def __init__(self, generator: torch.Generator | None) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = StatefulDataLoader(ROWS, batch_size=4, shuffle=True, generator=generator)
        self.batches: Any = None

    def __next__(self) -> Any:
        while True:
            if self.batches is None:
                self.batches = iter(self.loader)
            for batch in self.batches:
                return batch
            self.batches = None

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        # Now, not at the first batch: it draws, and random state is restored after this.
        self.batches = iter(self.loader)


@pytest.mark.parametrize("with_generator", [False, True], ids=["no generator", "its generator"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdatas_stateful_loader(tmp_path: Path, with_generator: bool) -> None:
    """It fetches in the main process; 9 updates are one and a half epochs."""

    def build() -> Scene:
        generator = torch.Generator().manual_seed(5) if with_generator else None
        scene, data = plain(), Endless(generator)
        scene.close()
        # A generator that is given to the loader is the program's: the loader doesn't keep it.
        scene.more = {"data": data, "generators": {"loader": generator} if generator else None}

        def update() -> torch.Tensor:
            scene.optimizer.zero_grad()
            loss = loss_of(scene.model, data)
            loss.backward()  # type: ignore[no-untyped-call]
            scene.optimizer.step()
            return loss

        scene.update = update
        return scene

    prove(tmp_path, build, left_out="data", shows_in="losses")
