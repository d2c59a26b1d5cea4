"""Buffers that come up or change while a model trains: kept, or warned of once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.capture import Captured
from dist_ckpt.capture._drift import _digest
from dist_ckpt.errors import MismatchError
from helpers.capturing import prepare, restore, save


class Centred(nn.Module):
    """Takes a moving mean off what a layer gives."""

    mean: Any

    def __init__(self, mean: torch.Tensor | None, *, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", mean, persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layer(x)
        here = out.detach().mean(0)
        self.mean = here if self.mean is None else self.mean * 0.9 + here * 0.1
        return out - self.mean


class Cached(nn.Module):
    """Computes what it needs when it needs it first."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.keep = persistent
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(4), persistent=self.keep)
        out: torch.Tensor = self.layer(x) * self.scale
        return out


def train(run: Path, until: int, net: Any) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    with dist_ckpt.Checkpointer(run, model=net, optimizer=optimizer, every=1, signals=()) as ckpt:
        for step in ckpt.steps(until):
            optimizer.zero_grad()
            net(torch.ones(2, 4) * step).square().mean().backward()
            optimizer.step()
    return net


def notes(run: Path) -> list[tuple[int, str]]:
    return [
        (event["step"], event["text"])
        for event in dist_ckpt.open_run(run).journal()
        if event["event"] == "note" and "model/" in event["text"]
    ]


def test_a_buffer_that_is_none_at_first_is_resumed_bit_equal(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "a", 6, Centred(None))
    train(tmp_path / "b", 3, Centred(None))
    resumed = train(tmp_path / "b", 6, Centred(None))
    assert torch.equal(resumed.layer.weight, unbroken.layer.weight)
    assert torch.equal(resumed.mean, unbroken.mean)
    assert notes(tmp_path / "b") == []


def test_a_buffer_made_for_a_restore_is_none_again_for_the_next() -> None:
    def captured_of(net: nn.Module) -> Captured:
        return Captured(net, torch.optim.SGD(net.parameters(), lr=0.1))

    having, lacking = (
        save(captured_of(Centred(torch.arange(4.0)))),
        save(captured_of(Centred(None))),
    )
    net: Any = Centred(None)
    live = captured_of(net)
    assert prepare(live, having)["model/mean"].data_ptr() == net.mean.data_ptr()
    restore(live, lacking)
    assert save(live) == lacking
    restore(live, having)
    assert net.mean.tolist() == [0.0, 1.0, 2.0, 3.0]
    other = Centred(None)
    other.layer = nn.Linear(3, 4)
    with pytest.raises(MismatchError, match=r"model/layer\.weight"):
        prepare(captured_of(other), having)
    assert other.mean is None


def test_what_was_one_tensor_fills_all_the_buffers_that_are_none() -> None:
    def pair() -> tuple[Any, Captured]:
        net = nn.Sequential(Centred(None), Centred(None))
        return net, Captured(net, torch.optim.SGD(net.parameters(), lr=0.1))

    net, live = pair()
    net[0].mean = net[1].mean = torch.arange(4.0)
    saved = save(live)
    other, live = pair()
    specs, shared = saved.specs, json.loads(saved.shared)
    live.prepare(specs, saved.stateless, shared, tied={"model/1.mean": "model/0.mean"})
    assert other[0].mean is other[1].mean is not None


def test_statistics_of_a_norm_that_keeps_none_here_are_a_mismatch() -> None:
    def norm(tracks: bool) -> Captured:
        net = nn.BatchNorm1d(3, track_running_stats=tracks)
        return Captured(net, torch.optim.SGD(net.parameters(), lr=0.1))

    with pytest.raises(MismatchError, match="running_mean"):
        prepare(norm(False), save(norm(True)))

    class Averaging(nn.BatchNorm1d):
        def __init__(self, average: torch.Tensor | None) -> None:
            super().__init__(3)
            self.register_buffer("average", average)

    def averaging(average: torch.Tensor | None) -> Captured:
        net = Averaging(average)
        return Captured(net, torch.optim.SGD(net.parameters(), lr=0.1))

    assert "model/average" in prepare(averaging(None), save(averaging(torch.ones(3))))


def test_a_transient_buffer_that_changes_is_warned_of_once_an_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = train(tmp_path / "a", 6, Centred(torch.zeros(4), persistent=False))
    caplog.clear()
    train(tmp_path / "b", 3, Centred(torch.zeros(4), persistent=False))
    assert caplog.text.count("model/mean: not saved") == 1
    resumed = train(tmp_path / "b", 6, Centred(torch.zeros(4), persistent=False))
    assert not torch.equal(resumed.layer.weight, unbroken.layer.weight)  # what it warns of
    found = notes(tmp_path / "b")
    assert [step for step, _ in found] == [1, 4]
    assert all("persistent=False" in text and "`extra`" in text for _, text in found)


def test_a_name_that_comes_up_in_training_is_warned_of_at_the_first_save(tmp_path: Path) -> None:
    train(tmp_path / "a", 3, Cached(persistent=True))
    assert [(step, text.partition(":")[0]) for step, text in notes(tmp_path / "a")] == [
        (1, "model/scale")
    ]
    with pytest.raises(MismatchError, match="model/scale"):  # what it warns of
        train(tmp_path / "a", 6, Cached(persistent=True))
    train(tmp_path / "b", 3, Cached(persistent=False))
    assert ["model/scale: not saved" in text for _, text in notes(tmp_path / "b")] == [True]


def test_nothing_is_said_of_buffers_that_stay_as_they_are(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net.register_buffer("mask", torch.ones(300, 300).tril(), persistent=False)
    net.register_buffer("wide", torch.ones(1).expand(1 << 40), persistent=False)
    net.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
    train(tmp_path / "run", 2, net)
    assert notes(tmp_path / "run") == []


def test_what_is_looked_at_tells_values_shapes_and_dtypes_apart() -> None:
    large = torch.zeros(1000, 300)
    tensors = [
        large, large + 1, large.T, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16),
        torch.tensor(0.0), torch.tensor(float("nan")), torch.zeros(0, 3), torch.zeros(2).bool(),
        torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj() * 1j,
    ]  # fmt: skip
    assert len({_digest(tensor) for tensor in tensors}) == len(tensors)
    for odd in (nn.UninitializedBuffer(), torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
        assert _digest(odd) == _digest(odd)
    assert [_digest(tensor.clone()) for tensor in tensors] == [_digest(t) for t in tensors]
