"""Comparing resume points and canonical files on disk, with each other and with live objects."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt import CanonicalState, Comparison, compare, read_bin, write_bin
from dist_ckpt.errors import CorruptFileError, NotFoundError, UsageError
from helpers.ranks import RankContext, run_ranks


class Tied(nn.Module):
    """A frozen embedding, a tied head, a buffer that moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(ids)))
        return out


class Arms:
    """A user's state with a tensor in it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"pulls": {1: 2}, "reward": torch.zeros(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def build(width: int = 4) -> dict[str, Any]:
    torch.manual_seed(1)
    random.seed(1)
    model = Tied(width)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra": {"arms": Arms()},
    }


def train(run: Path, until: int, change: Any = None, **settings: Any) -> dict[str, Any]:
    """A run has ``until`` steps; ``change(objects, step)`` ends each. Returns its objects."""
    objects = build()
    with dist_ckpt.Checkpointer(run, every=2, **objects, **settings) as ckpt:
        for step in ckpt.steps(until):
            objects["optimizer"].zero_grad()
            loss = objects["model"](torch.arange(5)).square().mean()
            loss.backward()
            objects["optimizer"].step()
            objects["scheduler"].step()
            if change is not None:
                change(objects, step)
            ckpt.record(loss=loss)
    return objects


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs of 4 steps, and one that differs from its third step on."""
    home = tmp_path_factory.mktemp("runs")
    train(home / "a", 4)
    train(home / "b", 4)

    def change(objects: dict[str, Any], step: int) -> None:
        if step == 3:
            with torch.no_grad():
                objects["model"].norm.bias[2] += 0.5
            objects["optimizer"].param_groups[0]["weight_decay"] = 0.5
            objects["extra"]["arms"].state["pulls"][1] = 3
            objects["extra"]["arms"].state["reward"][1] = 0.25
            random.random()

    train(home / "other", 4, change)
    return home


def paths(found: Comparison) -> list[str]:
    return [finding.path for finding in found.findings]


def test_two_equal_runs_agree_bit_for_bit_however_they_are_addressed(runs: Path) -> None:
    for address in (runs / "a", f"{runs / 'a'}@4", f"{runs / 'a'}@latest"):
        found = compare(str(address), runs / "b" / "checkpoints" / "step_000004", atol=0)
        assert found.agrees, str(found)
        assert found.max_abs == 0
        assert found.num_values > 3 * (5 * 4 + 4 + 4)
    generation = dist_ckpt.open_run(runs / "a").latest()
    assert compare(generation, runs / "b", atol=0).agrees


def test_what_differs_between_two_resume_points_is_found_by_name(runs: Path) -> None:
    found = compare(runs / "a", runs / "other")
    expected = [
        "model/norm.bias",
        "optimizers/groups/0/values/weight_decay",
        "ranks/0/values/extra.arms/pulls/[1]",
        "ranks/0/values/extra.arms/reward",
    ]
    assert set(expected) <= set(paths(found)), str(found)
    assert any(path.startswith("ranks/0/rng/python") for path in paths(found))
    assert "optimizer/norm.bias/exp_avg" in paths(found)
    assert "ties/model/head.weight" not in paths(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_two_steps_of_one_run_differ_in_step_weights_moments_and_schedule(runs: Path) -> None:
    found = compare(f"{runs / 'a'}@2", f"{runs / 'a'}@4")
    assert paths(found)[0] == "step"
    assert {"model/embed.weight", "optimizer/embed.weight/step"} <= set(paths(found))
    assert any(path.startswith("schedulers/scheduler/") for path in paths(found))


def test_canonical_files_are_compared_as_arrays_and_with_a_generation_by_name(runs: Path) -> None:
    a, b = runs / "a" / "step_000004.bin", runs / "b" / "step_000004.bin"
    assert compare(a, b, atol=0).agrees
    found = compare(a, runs / "other" / "step_000004.bin")
    assert paths(found) == ["weights", "m", "v"]
    for pair in ((a, runs / "b"), (runs / "b", a)):
        found = compare(*pair, atol=0)
        assert found.agrees, str(found)
        assert "nothing else was compared" in str(found)
    found = compare(a, runs / "other")
    (norm,) = [one for one in found.findings if one.path == "model/norm.bias"]
    assert norm.index == (2,)
    assert found.largest[0].path == "model/norm.bias"


def test_a_canonical_state_in_memory_and_files_of_other_sizes_are_told_apart(
    runs: Path, tmp_path: Path
) -> None:
    a = runs / "a" / "step_000004.bin"
    state = read_bin(a)
    assert compare(state, a, atol=0).agrees
    short = CanonicalState(state.step, state.weights[:-1], state.m[:-1], state.v[:-1])
    write_bin(tmp_path / "short.bin", short.step, short.weights, short.m, short.v)
    assert paths(compare(a, tmp_path / "short.bin")) == ["num_params"]
    assert paths(compare(tmp_path / "short.bin", runs / "a")) == ["num_params"]


def test_live_objects_are_compared_with_a_resume_point_and_a_canonical_file(
    runs: Path, tmp_path: Path
) -> None:
    objects = train(tmp_path / "live", 4)
    before = random.getstate()
    found = compare(objects, runs / "a", atol=0)
    assert found.agrees, str(found)
    assert random.getstate() == before
    assert compare(runs / "a" / "step_000004.bin", objects, atol=0).agrees
    del objects["scheduler"]
    found = compare(runs / "a", objects, atol=0)
    assert found.agrees, str(found)
    assert "scheduler was not compared" in str(found)
    with torch.no_grad():
        objects["model"].norm.running_mean[1] = 7
    objects["extra"]["arms"].state["reward"][0] = 1
    found = compare(runs / "a", objects)
    assert paths(found) == ["model/norm.running_mean", "ranks/0/values/extra.arms/reward"]


def test_another_structure_is_a_finding_not_an_error(runs: Path, tmp_path: Path) -> None:
    objects = build(width=6)
    found = compare(objects, runs / "a")
    kinds = {finding.path: str(finding.kind) for finding in found.findings}
    assert kinds["model/embed.weight"] == "shape"
    assert kinds["optimizer/embed.weight/exp_avg"] == "extra"


def test_a_value_that_is_not_finite_in_both_generations_is_reported(tmp_path: Path) -> None:
    def poison(objects: dict[str, Any], step: int) -> None:
        with torch.no_grad():
            objects["model"].frozen[step % 3] = float("nan")

    train(tmp_path / "a", 2, poison, export="never")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b", atol=0)
    assert paths(found) == ["model/frozen"]
    assert found.findings[0].num_values == 2


def test_a_generation_whose_bytes_were_changed_is_an_error_not_a_difference(
    runs: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(runs / "a" / "checkpoints" / "step_000004", tmp_path / "copy")
    assert compare(copy, runs / "b", atol=0).agrees  # under any name
    shard = copy / "rank_00000.shard"
    shard.chmod(0o600)
    raw = bytearray(shard.read_bytes())
    raw[40] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CorruptFileError):
        compare(copy, runs / "b")
    shard.write_bytes(raw[:-1])
    with pytest.raises(CorruptFileError):
        compare(copy, runs / "b")


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("a@3", NotFoundError, "no step 3"),
        ("a@new", UsageError, "isn't a number"),
        ("nowhere@2", NotFoundError, "no such path"),
        ("", NotFoundError, "holds no generation"),
    ],
)
def test_an_address_that_names_nothing_says_what_is_wrong(
    runs: Path, address: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        compare(f"{runs / address}", runs / "b")


def test_live_values_that_are_no_training_can_not_be_compared_with_a_file(runs: Path) -> None:
    with pytest.raises(UsageError, match="can't be compared with a generation"):
        compare({"model": {}}, runs / "a")


def save_on_ranks(ctx: RankContext, run: str, noise: float) -> None:
    """A generation of one step lies in ``run``; the ranks' buffers and random state differ."""
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(10 + ctx.rank)
    random.seed(10 + ctx.rank)
    np.random.seed(10 + ctx.rank)  # noqa: NPY002
    with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
        for _ in ckpt.steps(1):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            torch.as_tensor(norm.running_mean).fill_(ctx.rank * noise)
            random.seed(10 + ctx.rank * noise)


def test_other_world_sizes_compare_global_values_and_rank_0_buffers_the_rest_are_notes(
    tmp_path: Path,
) -> None:
    two, other, alone = (str(tmp_path / name) for name in ("two", "other", "alone"))
    for run, ranks, noise in ((two, 2, 1.0), (other, 2, 2.0), (alone, 1, 1.0)):
        results = run_ranks(ranks, save_on_ranks, run, noise, init=ranks > 1)
        assert all(result.returncode == 0 for result in results), results
    found = compare(two, alone, atol=0)
    assert found.agrees, str(found)
    assert "2 ranks against 1" in found.notes[0]
    assert compare(two, f"{alone}/step_000001.bin", atol=0).agrees
    # Where the world sizes are equal, what rank 1 alone has counts, too.
    assert compare(two, two, atol=0).agrees
    found = compare(two, other, atol=0)
    assert paths(found)[-1] == "ranks/1/buffers/model/1.running_mean"
    assert all(path.startswith("ranks/1/") for path in paths(found))
    assert "ranks/1/rng/python/1" in paths(found)


def compare_large(ctx: RankContext, home: str) -> list[int]:
    """Return the bytes compared and by how much the peak of this process's memory grew."""
    model = nn.Linear(4096, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("a", "b"):
        with dist_ckpt.Checkpointer(
            f"{home}/{name}", model=model, optimizer=optimizer, export="never"
        ) as ckpt:
            for _ in ckpt.steps(1):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
    del ckpt
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is held now
    before = peak_bytes()
    found = compare(f"{home}/a", f"{home}/b")
    assert {one.path for one in found.findings} >= {"model/weight", "optimizer/weight/exp_avg"}
    return [4 * found.num_values, peak_bytes() - before]


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def test_comparing_generations_takes_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    (result,) = run_ranks(1, compare_large, str(tmp_path), init=False)
    assert result.returncode == 0, result.stderr
    num_bytes, grown = result.value
    assert num_bytes > 90 << 20  # of each side
    assert grown < 100 << 20
