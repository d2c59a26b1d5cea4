"""The user's command as each scenario runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.errors import IncompleteError, SettingError, UsageError
from dist_ckpt.proof import Order, Plan, _launch, run_proof
from dist_ckpt.proof._command import for_ranks, resolve_command, run_option, with_run_dir
from dist_ckpt.proof._launch import last_lines, run_process


def test_a_bare_python_is_the_one_that_judges() -> None:
    for word in ("python", "python3", "python3.12"):
        assert resolve_command([word, "a.py"]) == [sys.executable, "a.py"]
    by_path = [sys.executable, "a.py"]
    assert resolve_command(by_path) == by_path
    assert resolve_command(["dist-ckpt", "run"]) == [sys.executable, "-m", "dist_ckpt", "run"]


def test_a_script_that_isnt_executable_gets_an_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert resolve_command([str(script)]) == [sys.executable, str(script)]
    script.chmod(0o700)
    assert resolve_command([str(script)]) == [str(script)]


def test_no_command_is_refused() -> None:
    with pytest.raises(UsageError, match="no command"):
        resolve_command([])


def test_a_command_that_isnt_there_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command no-such-command"):
        run_proof(Plan(["no-such-command"], tmp_path / "proof"))
    assert not (tmp_path / "proof").exists()


def test_the_last_lines_are_the_scripts_and_not_torchruns_report_on_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "one\nValueError: two\n\n"
        "E1130 07:21:28.1 18 torch/distributed/elastic/multiprocessing/api.py:1] failed\n====\n"
    )
    assert last_lines(log) == ["one", "ValueError: two"]
    assert last_lines(tmp_path / "none") == []


def test_a_scenario_that_not_even_sigkill_ends_is_told_of_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stuck in the kernel: here it just isn't sent a signal."""
    sent: list[int] = []
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "killpg", lambda _pid, signum: sent.append(signum))
    monkeypatch.setattr(_launch, "_END_SECS", 0.05)
    monkeypatch.setattr(_launch, "_GONE_SECS", 0.05)
    order = Order(("sleep", "60"), {}, tmp_path / "log", timeout_secs=0.05)
    with pytest.raises(IncompleteError, match="not gone after SIGKILL"):
        run_process(order)
    assert started[0].poll() is None
    started[0].kill()
    started[0].wait(20)
    assert sent == [signal.SIGINT, signal.SIGINT, signal.SIGKILL]


def test_ranks_are_started_by_the_launcher() -> None:
    launcher = [sys.executable, "-m", "dist_ckpt", "run", "--nproc-per-node=2"]
    script = [sys.executable, "a.py", "--lr", "1"]
    assert for_ranks(script, None, "python") == script
    assert for_ranks(script, 2, "python") == [*launcher, "a.py", "--lr", "1"]
    module = [sys.executable, "-m", "train"]
    assert for_ranks(module, 2, "python") == [*launcher, "--no-python", *module]


@pytest.mark.parametrize("first", ["torchrun", "/usr/bin/torchrun", "dist-ckpt"])
def test_ranks_of_a_command_that_is_a_launcher_are_refused(first: str) -> None:
    with pytest.raises(UsageError, match="starts ranks by itself"):
        for_ranks([first, "a.py"], 2, first)


def test_the_option_of_the_run_directory_is_found_and_rewritten() -> None:
    words = ["a.py", "--run", "x", "--run", "y", "--lr=1"]
    assert run_option(words, "--run") == "y"
    changed = with_run_dir(words, "--run", Path("/new"))
    assert changed == ["a.py", "--run", "x", "--run", "/new", "--lr=1"]
    assert with_run_dir(["a.py", "--run=x"], "--run", Path("/new")) == ["a.py", "--run=/new"]
    assert with_run_dir(words, None, Path("/new")) == words
    for missing in (["a.py"], ["a.py", "--run"], ["a.py", "--runs", "x"]):
        with pytest.raises(UsageError, match="no option --run"):
            run_option(missing, "--run")


def test_what_no_training_can_leave_out_is_refused_before_anything_runs() -> None:
    for part in ("nonsense", "model", "generators.mine", ""):
        with pytest.raises(UsageError, match="isn't a part of any training") as refused:
            Plan(["a.py"], leave_out=["rng", part])
        assert refused.value.next_step == (
            "There are: rng, data, optimizer, scheduler, scaler, policy, extra.NAME."
        )
    Plan(["a.py"], leave_out=["rng", "extra.ema", "policy", "scheduler.main"])


def test_a_plan_that_cant_be_meant_is_refused() -> None:
    for changes in ({"ranks": 0}, {"until": 1}, {"timeout_secs": 0.0}):
        with pytest.raises(SettingError):
            Plan(["a.py"], **changes)
