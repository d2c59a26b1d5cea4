"""``make demo``: that it can fail, and that it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import demo
import dist_ckpt


def a_finished_run(path: Path, *, flip: str | None = None, losses_from: int = 1) -> Path:
    path.mkdir()
    arrays = {name: np.linspace(1, 2, 100, dtype=np.float32) for name in ("weights", "m", "v")}
    if flip is not None:
        arrays[flip].view(np.int32)[50] ^= 1
    dist_ckpt.write_bin(path / f"step_{demo.STEPS:06}.bin", demo.STEPS, **arrays)
    losses = [[step, 1.0 / step] for step in range(losses_from, demo.STEPS + 1)]
    (path / f"{path.name}.loss.json").write_text(json.dumps(losses))
    return path


def test_equal_runs_pass_the_comparison(tmp_path: Path) -> None:
    one, other = a_finished_run(tmp_path / "one"), a_finished_run(tmp_path / "other")
    assert demo.must_be_bit_equal(one, other) == 100


@pytest.mark.parametrize("part", ["weights", "m", "v"])
def test_one_flipped_bit_fails_the_demo(tmp_path: Path, part: str) -> None:
    one, other = a_finished_run(tmp_path / "one", flip=part), a_finished_run(tmp_path / "other")
    with pytest.raises(demo.DemoError, match=f"1 of 100 numbers differ in {part}"):
        demo.must_be_bit_equal(one, other)


def test_a_missing_loss_fails_the_demo(tmp_path: Path) -> None:
    one, other = a_finished_run(tmp_path / "one", losses_from=2), a_finished_run(tmp_path / "other")
    with pytest.raises(demo.DemoError, match="199 steps"):
        demo.must_be_bit_equal(one, other)


def test_each_demo_takes_a_fresh_directory(tmp_path: Path) -> None:
    (tmp_path / "demo-1").mkdir()
    assert demo.fresh_run(tmp_path) == tmp_path / "demo-2"
    assert demo.fresh_run(tmp_path) == tmp_path / "demo-3"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_ends_with_0_and_says_what_it_saw(tmp_path: Path) -> None:
    command = [sys.executable, str(demo.ROOT / "launch" / "demo.py"), "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("SIGUSR1", "SIGTERM", "SIGKILL", "equal bit for bit", "1 rank", "step_000225.bin"):
        assert word in done.stdout.partition("It survived")[2]
