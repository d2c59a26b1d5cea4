"""DistributedDataParallel on real ranks: resumed = uninterrupted ≠ with a part left out.

With three ranks and more the first backward of a process sums in another order than all later ones;
`dist_ckpt.rehearse` at every start makes that no step of the training.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist_ckpt
from dist_ckpt.errors import DistCkptError
from dist_ckpt.history import read_journal
from helpers.ranks import RankContext, run_ranks
from helpers.scenes import OMIT, Outcome, Scene, play

CUT, UNTIL = 3, 6
ROWS = [(torch.sin(torch.arange(6.0) * (n + 1)), torch.tensor([n % 5 / 5.0])) for n in range(24)]


def ddp(*, rehearsed: bool, exact_loss: bool = False, **settings: Any) -> Scene:
    """A model whose batch norm and dropout differ by rank, so that gradients do."""
    model = nn.Sequential(
        nn.Linear(6, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    wrapped = DistributedDataParallel(model, **settings)
    torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    data = dist_ckpt.ResumableLoader(ROWS, batch_size=12, seed=3)

    def loss_of_batch() -> torch.Tensor:
        x, y = next(data)
        loss: torch.Tensor = (wrapped(x) - y).square().mean()
        return loss

    def update() -> torch.Tensor:
        before = sum(p.detach().double().square().sum() for p in model.parameters())
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # float32 often rounds a difference in last bits away.
        return torch.as_tensor(before) if exact_loss else loss

    def rehearse() -> None:
        if rehearsed:
            done = dist_ckpt.rehearse(wrapped, loss_of_batch, data=data)
            expected = not settings.get("find_unused_parameters")
            assert done == expected, "it says whether there was something to rehearse"

    return Scene(wrapped, optimizer, update, {"data": data}, rehearse, data.close)


def compare(folder: Path, *, monkey: pytest.MonkeyPatch, **scene: Any) -> dict[str, list[str]]:
    """Return how a resumed run, and one without its random state, differ from one without a cut."""
    build = partial(ddp, **scene)
    whole = play(folder / "whole" / "run", build, UNTIL)
    run = folder / "cut" / "run"
    play(run, build, CUT)
    resumed = play(run, build, UNTIL, seed=20)
    monkey.setenv(OMIT, "rng")
    negative = play(run, build, UNTIL, seed=20, resume=CUT)
    monkey.delenv(OMIT)
    differ = Outcome.differs_from
    return {"resumed": differ(resumed, whole), "negative": differ(negative, whole)}


def body_proofs(ctx: RankContext, folder: str, scenes: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as monkey:
        return {
            name: compare(Path(folder) / name, monkey=monkey, **scene)
            for name, scene in scenes.items()
        }


def test_two_ranks_need_no_rehearsal(tmp_path: Path) -> None:
    """Case 33: each rank's own dropout and buffers come back. Two values have one sum."""
    for result in run_ranks(2, body_proofs, str(tmp_path), {"plain": {"rehearsed": False}}):
        assert result.returncode == 0, result.stderr
        assert result.value["plain"]["resumed"] == []
        assert result.value["plain"]["negative"] != []


def test_three_ranks_are_bit_equal_where_each_start_is_rehearsed(tmp_path: Path) -> None:
    scenes = {
        "without": {"rehearsed": False},
        "rehearsed": {"rehearsed": True},
        "static": {"rehearsed": True, "static_graph": True},
        "view": {"rehearsed": True, "gradient_as_bucket_view": True},
        "unused": {"rehearsed": True, "find_unused_parameters": True},
    }
    for result in run_ranks(3, body_proofs, str(tmp_path), scenes, timeout=100.0):
        assert result.returncode == 0, result.stderr
        for name, found in result.value.items():
            differences = found["resumed"]
            if name == "without":
                assert "model" in differences, "the reason for rehearsals is gone: say so in docs"
            else:
                assert differences == [], name
            assert found["negative"] != []


# What a rehearsal leaves -----------------------------------------------------------------------


class Counting(nn.Module):
    """Keeps what a forward changes in every place where a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(3, 4, max_norm=0.1)  # a forward scales its weights
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.norm(self.line(x)) + self.table(torch.tensor(1))
        return found

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def body_rehearses(ctx: RankContext) -> Any:
    torch.manual_seed(1)
    model = Counting()
    wrapped = DistributedDataParallel(model)
    data = dist_ckpt.ResumableLoader(ROWS, batch_size=12, seed=3)
    next(data)
    own = np.random.default_rng(7)

    def loss() -> torch.Tensor:
        noise = random.random() + np.random.random() + own.random()  # noqa: NPY002
        total: torch.Tensor = wrapped(next(data)[0] + torch.rand(6) + noise).sum()
        return total

    def everything() -> Any:
        return copy.deepcopy(
            {
                "model": {name: t.tolist() for name, t in [*model.named_parameters()]},
                "buffers": {name: t.tolist() for name, t in [*model.named_buffers()]},
                "calls": model.calls,
                "data": data.state_dict(),
                "python": random.getstate(),
                "numpy": repr(np.random.get_state(legacy=False)),  # noqa: NPY002
                "torch": torch.get_rng_state().tolist(),
                "own": own.bit_generator.state,
                "grads": [p.grad for p in model.parameters()],
            }
        )

    before = everything()
    for parameter in model.parameters():  # as a save before the loop leaves them
        parameter.grad = torch.zeros_like(parameter)
    first = dist_ckpt.rehearse(wrapped, loss, data=data, generators={"own": own})
    assert everything() == before
    assert before["grads"] == [None] * len(before["grads"])
    again = dist_ckpt.rehearse(wrapped, loss, data=data, generators={"own": own})
    told = {}
    other = DistributedDataParallel(nn.Linear(6, 1))
    for name, wrong in {"elsewhere": lambda: model(torch.rand(5, 6)).sum()}.items():
        try:
            dist_ckpt.rehearse(other, wrong)
        except DistCkptError as error:
            told[name] = str(error)
    other(torch.rand(2, 6)).sum().backward()
    try:
        dist_ckpt.rehearse(other, loss)
    except DistCkptError as error:
        told["late"] = str(error)
    data.close()
    return {"first": first, "again": again, "told": told}


def test_a_rehearsal_leaves_nothing_behind_and_tells_what_was_not_one() -> None:
    for result in run_ranks(3, body_rehearses):
        assert result.returncode == 0, result.stderr
        assert (result.value["first"], result.value["again"]) == (True, False)
        assert "didn't reach" in result.value["told"]["elsewhere"]
        assert "has a gradient already" in result.value["told"]["late"]


def test_a_model_without_ddp_needs_no_rehearsal_and_its_loss_is_not_called() -> None:
    def fail() -> torch.Tensor:
        raise AssertionError("called")

    assert dist_ckpt.rehearse(nn.Linear(2, 2), fail) is False


# The replay audit ------------------------------------------------------------------------------


def body_crashes(ctx: RankContext, folder: str) -> None:
    for name in ("without", "with"):
        build = partial(ddp, rehearsed=name == "with", exact_loss=True)
        run = Path(folder) / name / "run"
        with pytest.raises(RuntimeError, match="crashed"):
            play(run, partial(crashing, build, UNTIL), UNTIL, every=CUT)
        play(run, build, UNTIL, seed=20, every=CUT)


def crashing(build: Callable[[], Scene], step: int) -> Scene:
    """A scene whose update number ``step`` raises."""
    scene = build()
    update, left = scene.update, iter(range(step - 1))

    def updates() -> torch.Tensor:
        if next(left, None) is None:
            raise RuntimeError("crashed")
        return update()

    scene.update = updates
    return scene


def test_the_replay_audit_names_the_order_of_sums_as_the_cause(tmp_path: Path) -> None:
    """Step 3 was saved, steps 4 and 5 were lost; 4 needs only a forward pass of what was saved."""
    results = run_ranks(3, body_crashes, str(tmp_path))
    assert [result.returncode for result in results] == [0, 0, 0], results[0].stderr
    without, rehearsed = (
        {event["event"]: event for event in read_journal(tmp_path / name / "run")}
        for name in ("without", "with")
    )
    replayed = without["replayed"]
    assert (replayed["first_step"], replayed["first_difference"]) == (CUT + 1, CUT + 2)
    assert "3 ranks of DistributedDataParallel" in replayed["likely_cause"]
    assert without["replay_differs"]["likely_cause"] == replayed["likely_cause"]
    assert results[0].stderr.count("Likely cause: 3 ranks") == 1
    replayed = rehearsed["replayed"]
    assert (replayed["agreed"], replayed["of"], replayed["likely_cause"]) == (2, 2, None)
    assert "replay_differs" not in rehearsed
