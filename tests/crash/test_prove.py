"""`prove` on real trainings: a right one passes, each wrong one is caught, its cause named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt
from dist_ckpt.errors import IncompleteError, UsageError
from helpers.proving import ROOT, command_of, nursery, prove
from helpers.run_dirs import call, spawn

TINY = ["python", str(ROOT / "launch" / "single_gpu.py"), "--preset", "tiny", "--batch-size", "2"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


# -------------------------------------------------------------------------------------- the right


def test_a_right_script_is_proven_at_every_kind_of_cut(tmp_path: Path) -> None:
    proof, document = prove("right", tmp_path / "proof")
    assert document["all_checks_passed"] is True
    assert (document["positive"], document["negative_divergence_detected"]) == (True, True)
    assert document["parts"] == {
        "rng": "diverged",
        "data": "diverged",
        "optimizer": "diverged",
        "scheduler": "diverged",
        "scaler": "not used",
    }
    assert document["tolerance"] == {"atol": 0.0, "rtol": 0.0}
    assert document["max_abs"] == 0
    kinds = {kind for cut in document["cuts"] for kind in cut["kinds"]}
    assert kinds == {
        "mid-epoch",
        "end of an epoch",
        "right after the learning rate changed",
        "between two changes of the learning rate",
    }
    names = [scenario["name"] for scenario in document["scenarios"]]
    assert names[:5] == [
        "continuous", "cut-3", "resumed-3-to-5", "resumed-5-to-6", "resumed-6-to-10"
    ]  # fmt: skip
    assert len(names) == 5 + 4
    for name in names:
        assert dist_ckpt.open_run(proof.output / name).latest() is not None
        assert (proof.output / "logs" / f"{name}.log").stat().st_size > 0


def test_the_report_is_three_files_of_which_one_is_a_page(tmp_path: Path) -> None:
    prove("right", tmp_path / "proof", cuts=[4], until=6)
    summary = (tmp_path / "proof" / "summary.txt").read_text()
    assert summary.startswith("all_checks_passed: true\n")
    assert "bit for bit" in summary
    page = (tmp_path / "proof" / "CONFIRMATION.md").read_text()
    (versions,) = [line for line in page.splitlines() if line.startswith("- **Versions**")]
    assert versions.count("dist_ckpt ") == 1
    assert page.startswith("# Proof of resume: PASSED\n")
    assert len(page.splitlines()) < 40
    for word in ("**Command run**", "**Step found**: resumed at 4", "**Check**", "**Result**"):
        assert word in page


def test_a_constant_schedule_is_never_proven_and_that_alone_is_no_fault(tmp_path: Path) -> None:
    before = nursery().num_scenarios
    _, document = prove(
        "right", tmp_path / "proof", until=2, cuts=[1], leave_out=["rng", "scheduler"]
    )
    assert document["parts"] == {"rng": "diverged", "scheduler": "not proven"}
    assert document["all_checks_passed"] is True
    assert "never changed" in document["controls"][1]["reason"]
    assert nursery().num_scenarios - before == 5


def test_the_run_dir_option_of_the_command_is_rewritten_on_wish(tmp_path: Path) -> None:
    from dist_ckpt.proof import Plan, run_proof

    command = command_of("right", "--run", str(tmp_path / "own"))
    plan = Plan(command, until=2, cuts=[1], leave_out=["data"], run_arg="--run", timeout_secs=60)
    orders = []

    def launch(order: Any) -> int | None:
        orders.append(order)
        return nursery().launch(order)

    proof = run_proof(plan, launch=launch)
    assert proof.output == tmp_path / "own.proof-1"
    assert not (tmp_path / "own").exists()
    assert [order.command[-1] for order in orders] == [
        str(proof.output / scenario.name) for scenario in proof.scenarios
    ]
    assert run_proof(plan, launch=launch).output == tmp_path / "own.proof-2"


# -------------------------------------------------------------------------------------- the wrong


WRONG = {
    "seeds_again": ("draws of torch in step 4", "seeds or draws after the resume"),
    "leaves_scheduler_out": ("learning rate of step 7", "scheduler (StepLR); see scheduler="),
    "rewinds_data": ("place in the data before step 4", "moves its data between the resume"),
    "unsaved_generator": ("loss of step 4", "model.0.source (Generator); see generators="),
    "pending_gradients": ("state of model and optimizer after step 4", "Gradients that were"),
    "sets_weights": ("state of model before step 4", "changes model (model/3.bias)"),
    "never_seeds": ("draws of torch before step 1", "Two fresh starts"),
    "begins_anew": ("began at step 0, not at step 3", "doesn't resume"),
}


@pytest.mark.parametrize("script", WRONG)
def test_a_wrong_script_is_caught_and_its_cause_is_named(script: str, tmp_path: Path) -> None:
    proof, document = prove(script, tmp_path / "proof")
    assert not proof.passed
    assert (document["all_checks_passed"], document["positive"]) == (False, False)
    assert document["negative_divergence_detected"] is None
    assert document["parts"] == {}
    for words in WRONG[script]:
        assert words in document["cause"]
    assert "FAILED" in (tmp_path / "proof" / "CONFIRMATION.md").read_text()


def test_data_whose_state_says_nothing_fail_the_negative_control(tmp_path: Path) -> None:
    _, document = prove("counts_nothing", tmp_path / "proof", leave_out=["data", "optimizer"])
    assert (document["positive"], document["all_checks_passed"]) == (True, False)
    assert document["negative_divergence_detected"] is False
    assert document["parts"] == {"data": "not proven", "optimizer": "diverged"}
    assert "doesn't move with what is consumed" in (tmp_path / "proof/CONFIRMATION.md").read_text()


# -------------------------------------------------------------------------- what can't be completed


INCOMPLETE = {
    "fails": ("ended with status 1", "the disk of the data is gone"),
    "breaks": ("left after step", ""),
    "trains_twice": ("enters a Checkpointer twice", ""),
    "without_checkpointer": ("never entered a dist_ckpt.Checkpointer", "trained"),
}


@pytest.mark.parametrize("script", INCOMPLETE)
def test_a_scenario_that_cant_be_completed_is_told_with_its_last_lines(
    script: str, tmp_path: Path
) -> None:
    message, last = INCOMPLETE[script]
    with pytest.raises(IncompleteError, match=message) as caught:
        prove(script, tmp_path / "proof")
    assert caught.value.scenario == "continuous"
    assert last in "\n".join(caught.value.last_lines)
    assert not (tmp_path / "proof" / "verification.json").exists()
    assert (tmp_path / "proof" / "logs" / "continuous.log").exists()
    assert f"What was tried is left in {tmp_path / 'proof'}." in caught.value.next_step


def test_a_directory_that_exists_is_never_written_into(tmp_path: Path) -> None:
    called = call("prove", "-o", tmp_path, "--", *command_of("right"))
    assert (called.status, called.out) == (2, "")
    assert "never written over" in called.err
    assert list(tmp_path.iterdir()) == []


def test_cuts_outside_and_parts_that_arent_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--cut 6"):
        prove("right", tmp_path / "one", cuts=[6], until=6)
    assert not (tmp_path / "one").exists()  # known before anything is started
    with pytest.raises(UsageError, match="--leave-out policy") as caught:
        prove("right", tmp_path / "two", leave_out=["policy"], until=2)
    assert "scheduler" in caught.value.next_step


# ----------------------------------------------------------------------------- real fresh processes


def test_the_command_line_proves_the_default_script_in_fresh_processes(tmp_path: Path) -> None:
    done = spawn(
        "prove", "-o", tmp_path / "proof", "--until", "4", "--cut", "2", "--leave-out", "rng",
        "--json", "--", *TINY, "--run", tmp_path / "unused", env=ONE_THREAD,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["all_checks_passed"] is True
    assert document["parts"] == {"rng": "diverged"}
    assert document["world_size"] == 1
    assert document["path"] == str(tmp_path / "proof")
    assert not (tmp_path / "unused").exists()


def test_a_script_that_fails_is_status_2_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    done = spawn("prove", "-o", tmp_path / "proof", "--", *command_of("fails"), env=ONE_THREAD)
    assert (done.returncode, done.stdout) == (2, "")
    assert "  | RuntimeError: the disk of the data is gone\n" in done.stderr
    assert str(tmp_path / "proof" / "logs" / "continuous.log") in done.stderr


def test_a_script_that_takes_too_long_is_ended_and_status_2(tmp_path: Path) -> None:
    done = spawn("prove", "-o", tmp_path / "p", "--timeout", "4", "--", *command_of("sleeps"))
    assert done.returncode == 2
    assert "took longer than 4 s" in done.stderr
    assert "  | waiting for the data\n" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_proof_leaves_no_process_behind(tmp_path: Path, signum: int) -> None:
    log = tmp_path / "proof" / "logs" / "continuous.log"
    script = tmp_path / "sleeps.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = ["-m", "dist_ckpt", "prove", "-o", tmp_path / "proof", "--", "python", script]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ends = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < ends:
        time.sleep(0.05)
    child = int(log.read_text())
    process.send_signal(signum)
    assert process.wait(20) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_are_proven_with_the_launcher(tmp_path: Path) -> None:
    done = spawn(
        "prove", "--ranks", "2", "-o", tmp_path / "proof", "--until", "4", "--cut", "2",
        "--leave-out", "rng", "--leave-out", "data", "--", *TINY, "--run-dir", tmp_path / "unused",
        env=ONE_THREAD,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads((tmp_path / "proof" / "verification.json").read_bytes())
    assert (document["all_checks_passed"], document["world_size"]) == (True, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_ranks_are_proven_since_the_script_rehearses(tmp_path: Path) -> None:
    done = spawn(
        "prove", "--ranks", "3", "-o", tmp_path / "proof", "--until", "4", "--cut", "2",
        "--leave-out", "data", "--", *TINY, "--batch-size", "3", "--run-dir", tmp_path / "unused",
        env=ONE_THREAD,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


UNREHEARSED = """
import runpy, sys
import dist_ckpt
dist_ckpt.rehearse = lambda *args, **named: False
script = {script!r}
sys.path.insert(0, {folder!r})
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_new_buckets_of_ddp_on_three_ranks_are_named_and_not_blamed_on_the_resume(
    tmp_path: Path,
) -> None:
    script = ROOT / "launch" / "single_gpu.py"
    without = tmp_path / "without.py"
    without.write_text(UNREHEARSED.format(script=str(script), folder=str(script.parent)))
    done = spawn(
        "prove", "--ranks", "3", "-o", tmp_path / "proof", "--until", "4", "--cut", "2", "--json",
        "--", "python", without, *TINY[2:], "--batch-size", "3", "--run-dir", tmp_path / "unused",
        env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert "No fault of the resume: on 3 ranks DistributedDataParallel" in document["cause"]
    assert document["first_difference"]["step"] == 3
