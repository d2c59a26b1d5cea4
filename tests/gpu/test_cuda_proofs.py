"""The proofs of tests/proofs on CUDA: resumed = uninterrupted ≠ with a part left out, by bits.

    pytest -m gpu tests/gpu -q

on a machine with a CUDA device; without one everything is skipped. One device is enough; the proofs
with several ranks share it (gloo). Planned for at most 4 minutes; not yet measured.

Expected: every test passes, and ``N passed`` is the last line. A failure says which of these it is:

* ``resumed.differs_from(whole) == []`` failed: the list names the first loss, rate or part (model,
  optimizer, scaler, draws …) that isn't the same. ``losses of step 6`` is the first step after the
  resume, a forward of what was restored: something wasn't restored. Only later steps: an operation
  isn't deterministic in spite of the settings below;
* ``the negative shows nothing``: the part that was left out doesn't matter on this device, so the
  proof proves nothing;
* an error of torch that names an operation without a deterministic implementation.

Settings, made for each test and put back: ``use_deterministic_algorithms``, no cuDNN benchmark, no
TF32, ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` (before CUDA starts: it's set when this is imported).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dist_ckpt
from helpers.ranks import RankContext, run_ranks
from helpers.scenes import OMIT, Outcome, Scene, play, prove

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
os.environ.setdefault(CUBLAS, ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ROWS = [(torch.sin(torch.arange(32.0) * (n + 1)), torch.tensor([n % 5 / 5.0])) for n in range(64)]
ADAMW = partial(torch.optim.AdamW, lr=0.01)
EMA: Any = get_ema_multi_avg_fn  # it has no types
RANKS_CUT, RANKS_UNTIL = 3, 6


def set_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    set_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def layers() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(32, 256),
        nn.BatchNorm1d(256),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 1),
    )
    return model.cuda()


def loss_of(model: nn.Module, data: Any) -> torch.Tensor:
    x, y = (part.cuda() for part in next(data))
    # Drawn on the device: CUDA's own random state has to come back too.
    loss: torch.Tensor = (model(x + 0.01 * torch.randn_like(x)) - y).square().mean()
    return loss


def scene(
    model: nn.Module | None = None,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = ADAMW,
    num_workers: int = 0,
    micro_batches: int = 1,
    after: Callable[[], object] = lambda: None,
    **more: Any,
) -> Scene:
    model = model or layers()
    optimizer = make(model.parameters())
    data = dist_ckpt.ResumableLoader(
        ROWS, batch_size=8, seed=3, num_workers=num_workers, pin_memory=True
    )

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for _ in range(micro_batches):
            loss = loss_of(model, data) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        after()
        return total

    return Scene(model, optimizer, update, {"data": data, "every": 2, **more}, close=data.close)


# One process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["rng", "data", "optimizer"])
def test_a_part_that_is_left_out_shows(tmp_path: Path, part: str) -> None:
    prove(tmp_path, scene, left_out=part, shows_in="losses")


@pytest.mark.parametrize(
    "flags", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}], ids=str
)
def test_ways_of_stepping(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Saves overlap the next step's forward and backward where the pre-step hook allows it."""
    make = partial(torch.optim.AdamW, lr=0.01, **flags)
    prove(tmp_path, partial(scene, make=make), left_out="optimizer", shows_in="losses")


def scaled(dtype: torch.dtype) -> Scene:
    made = scene()
    model, optimizer, data = made.model, made.optimizer, made.more["data"]
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)

    def update() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = loss_of(model, data)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss

    made.update, made.more["scaler"] = update, scaler
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_a_grad_scaler_whose_scale_moves(tmp_path: Path, dtype: torch.dtype) -> None:
    """Case 17."""
    prove(tmp_path, partial(scaled, dtype), left_out="scaler", shows_in="scaler")


def test_two_workers_and_none_after_the_resume(tmp_path: Path) -> None:
    build = partial(scene, num_workers=2)
    prove(tmp_path, build, resume=scene, left_out="data", shows_in="losses")


def test_accumulated_gradients(tmp_path: Path) -> None:
    prove(tmp_path, partial(scene, micro_batches=3), left_out="rng", shows_in="losses")


def scheduled() -> Scene:
    made = scene()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, T_max=10)
    update = made.update

    def stepped() -> torch.Tensor:
        loss = update()
        scheduler.step()
        return loss

    made.update, made.more["scheduler"] = stepped, scheduler
    return made


def test_a_scheduler(tmp_path: Path) -> None:
    prove(tmp_path, scheduled, left_out="scheduler", shows_in="rates")


def averaged() -> Scene:
    model = layers()
    mean = AveragedModel(model, multi_avg_fn=EMA(0.9), use_buffers=True)
    return scene(model, after=lambda: mean.update_parameters(model), extra={"mean": mean})


def test_an_averaged_model(tmp_path: Path) -> None:
    prove(tmp_path, averaged, left_out="extra", shows_in="extra.mean")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_model(tmp_path: Path, backend: str) -> None:
    def build() -> Scene:
        compiled: Any = torch.compile(layers(), backend=backend)
        return scene(compiled)

    try:
        prove(tmp_path, build, left_out="optimizer", shows_in="losses")
    finally:
        torch.compiler.reset()


# Several ranks on one device -------------------------------------------------------------------


def ddp(*, rehearsed: bool) -> Scene:
    wrapped = DistributedDataParallel(layers())
    torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())
    made = scene(wrapped)
    data = made.more["data"]
    if rehearsed:
        made.before_loop = lambda: dist_ckpt.rehearse(
            wrapped, lambda: loss_of(wrapped, data), data=data
        )
    return made


def body_ddp(ctx: RankContext, folder: str, rehearsed: bool) -> dict[str, list[str]]:
    set_deterministic()
    build = partial(ddp, rehearsed=rehearsed)
    whole = play(Path(folder) / "whole" / "run", build, RANKS_UNTIL)
    run = Path(folder) / "cut" / "run"
    play(run, build, RANKS_CUT)
    resumed = play(run, build, RANKS_UNTIL, seed=20)
    os.environ[OMIT] = "rng"
    negative = play(run, build, RANKS_UNTIL, seed=20, resume=RANKS_CUT)
    del os.environ[OMIT]
    differ = Outcome.differs_from
    return {"resumed": differ(resumed, whole), "negative": differ(negative, whole)}


@pytest.mark.parametrize(("num_ranks", "rehearsed"), [(2, False), (3, True)])
def test_ddp(tmp_path: Path, num_ranks: int, rehearsed: bool) -> None:
    """Case 33. With three ranks each start is rehearsed; two need none."""
    env = {CUBLAS: os.environ[CUBLAS]}
    for result in run_ranks(
        num_ranks, body_ddp, str(tmp_path), rehearsed, env=env, fresh=True, timeout=90.0
    ):
        assert result.returncode == 0, result.stderr
        assert result.value["resumed"] == []
        assert result.value["negative"] != []
