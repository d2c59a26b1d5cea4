"""torchsnapshot itself, of which we only write the format, restores our generations bit-equal."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt import read_bin
from helpers.trainers import final, train
from helpers.training import Options, Training, digest


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torchsnapshot_restores_a_generation_of_any_world_size_into_a_plain_model(
    ranks: int, tmp_path: Path
) -> None:
    from torchsnapshot import Snapshot, StateDict

    # 7 rows: uneven shards.
    options = Options(run_dir=str(tmp_path / "run"), out=str(tmp_path / "out"), width=7, until=5)
    train(options, ranks=ranks)
    snapshot: Any = Snapshot(str(tmp_path / "run/checkpoints/step_000005"))
    # One longer key, and a restore of the model alone would fail on the optimizer's tensors.
    assert {path.count("/") for path in snapshot.get_manifest()} == {1, 2}
    with contextlib.closing(Training(Options(run_dir="", out=str(tmp_path), width=7), 0, 1)) as new:
        model = new.model
    snapshot.restore({"model": model})
    found = {name: digest(value) for name, value in model.state_dict().items()}
    assert found == final(options)["model"]
    state = read_bin(tmp_path / "run/step_000005.bin")
    named = dict(model.named_parameters())
    assert _flat(named.values()) == state.weights.tobytes()
    for moment, saved in (("exp_avg", state.m), ("exp_avg_sq", state.v)):
        moments = StateDict(
            **{f"{name}/{moment}": torch.zeros_like(p) for name, p in named.items()}
        )
        snapshot.restore({"optimizer": moments})
        assert _flat(moments.values()) == saved.tobytes()


def _flat(tensors: Any) -> bytes:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().tobytes()
