"""``dist-ckpt save`` and ``stop`` with live processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.announce import process_start_time
from dist_ckpt.history import read_journal
from dist_ckpt.runs import open_run
from dist_ckpt.storage import RunLock
from helpers.faulty_ops import Fault
from helpers.run_dirs import Called, call, ended_run, killed_run, options_of
from helpers.trainers import ROOT, Job


def live(run_dir: Path, **changes: Any) -> Job:
    facts = {"until": 100_000, "every": 100_000, "step_secs": 0.01, **changes}
    return Job(options_of(run_dir, **facts))


def hold(run_dir: Path, **facts: Any) -> RunLock:
    """This process holds the lock of a run, as ``run.json`` says or not."""
    path = run_dir / "run.json"
    told = json.loads(path.read_text()) | facts
    path.unlink()
    path.write_text(json.dumps(told))
    lock = RunLock(run_dir / "run.lock")
    # A lock's holder names a command only where one of ours moves things there, and nobody trains.
    lock.acquire({key: value for key, value in told.items() if key != "command"})
    return lock


def test_save_returns_when_the_generation_is_committed_and_training_goes_on(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir) as job:
        job.wait_for_step(3)
        for _ in range(3):
            before = job.step()
            called = call("save", run_dir, "--json")
            assert called.status == 0
            step = called.json["step"]
            assert called.json["pid"] == job.pid()
            assert step >= before - 1
            assert (run_dir / f"checkpoints/step_{step:06d}/resume_point.json").exists()
            assert "SIGUSR1" in open_run(run_dir).generation(step).manifest.reasons
        job.wait_for_step(step + 3)
        assert call("save", run_dir).out.startswith("live: step ")


def test_nothing_is_said_to_be_saved_before_a_slow_disk_has_it(tmp_path: Path) -> None:
    """Case 45: what is said to be saved is there, under its final name."""
    run_dir = tmp_path / "live"
    slow = Fault("fsync", "*.shard", delay_secs=0.7)
    options = options_of(run_dir, until=100_000, every=100_000, step_secs=0.01)
    with Job(options, faults={0: [slow]}) as job:
        job.wait_for_step(3)
        called = call("save", run_dir, "--json")
        assert (called.status, len(job.strikes())) == (0, 1)
        assert called.json["secs"] > 0.7
        assert (run_dir / f"checkpoints/step_{called.json['step']:06d}").is_dir()


def test_stop_returns_when_the_process_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir) as job:
        job.wait_for_step(3)
        called = _while_reaping(job, "stop", run_dir, "--json")
        assert called.status == 0
        assert process_start_time(job.pid()) is None
        assert job.wait() == [0]
    latest = open_run(run_dir).latest()
    assert latest is not None
    assert (latest.step, called.json["event"]) == (called.json["step"], "attempt_stopped")
    assert call("status", run_dir, "--json").json["state"] == "stopped"


def _while_reaping(job: Job, *arguments: str | Path) -> Called:
    called: list[Called] = []
    thread = threading.Thread(target=lambda: called.append(call(*arguments)))
    thread.start()
    while thread.is_alive():
        job.poll()
        thread.join(0.02)
    return called[0]


def test_a_run_that_does_not_run_cannot_be_asked(tmp_path: Path) -> None:
    for run_dir in (ended_run(tmp_path, "a"), killed_run(tmp_path, "b")):
        for command in ("save", "stop"):
            called = call(command, run_dir, "--json")
            assert (called.status, called.json["error"]["id"]) == (2, "not-running")
            assert "nobody holds run.lock" in called.json["error"]["message"]


def test_a_lock_that_names_nobody_is_no_training(tmp_path: Path) -> None:
    """A command that frees a full disk holds it so."""
    run_dir = killed_run(tmp_path)
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"command": "prune"})
    (run_dir / "run.lock").write_text("")
    assert call("status", run_dir, "--json").json["state"] == "dead"
    called = call("save", run_dir, "--json")
    lock.release()
    assert (called.status, called.json["error"]["id"]) == (2, "not-running")
    assert "held by somebody who isn't named" in called.json["error"]["message"]


def test_a_training_whose_lock_names_nobody_can_be_asked(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir) as job:
        job.wait_for_step(3)
        (run_dir / "run.lock").write_text("")
        assert call("status", run_dir, "--json").json["state"] == "running"
        assert _while_reaping(job, "stop", run_dir).status == 0


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start_time(sleeper.pid)
    lock = hold(run_dir, pid=sleeper.pid, start_time=start)
    try:
        for command in ("save", "stop"):
            called = call(command, run_dir)
            assert called.status == 2
            assert "doesn't handle SIG" in called.err
        assert sleeper.poll() is None
    finally:
        lock.release()
        sleeper.kill()
        sleeper.communicate()


def test_a_run_on_another_host_is_asked_there(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    lock = hold(run_dir, pid=os.getpid(), host="elsewhere.example")
    try:
        called = call("save", run_dir)
    finally:
        lock.release()
    assert called.status == 2
    assert "Ask on elsewhere.example" in called.err


def test_a_pid_that_was_used_again_is_not_signalled(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _frame: got.append(signum))
    lock = hold(run_dir, pid=os.getpid(), start_time=1)
    try:
        assert call("save", run_dir).status == 2
    finally:
        lock.release()
        signal.signal(signal.SIGUSR1, before)
    assert got == []


def test_no_answer_in_time_is_status_2_and_says_that_it_may_come(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir, settings={"sigusr1": "boundary"}) as job:
        job.wait_for_step(3)
        called = call("save", run_dir, "--timeout", "0.3", "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "rank-timeout")
    assert "may still" in called.json["error"]["message"]


def test_a_run_that_dies_while_it_is_asked_is_said_to_have_died(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir, step_secs=30.0) as job:
        job.wait_for_step(1)
        timer = threading.Timer(0.3, job.send, [signal.SIGKILL])
        timer.start()
        called = _while_reaping(job, "save", run_dir, "--json")
        timer.join()
    assert (called.status, called.json["error"]["id"]) == (2, "not-running")
    assert "killed, or crashed" in called.json["error"]["message"]


def test_a_run_that_ends_before_it_answers_has_answered_by_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "live"
    with live(run_dir, until=40, settings={"sigusr1": "boundary"}) as job:
        job.wait_for_step(3)
        called = _while_reaping(job, "save", run_dir, "--json")
    assert (called.status, called.json["step"]) == (0, 40)


def test_a_save_that_fails_is_told_with_its_cause(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    fault = Fault("pwrite", "*.shard", error="ENOSPC")
    options = options_of(run_dir, until=100_000, every=100_000, step_secs=0.01)
    with Job(options, faults={0: [fault]}) as job:
        job.wait_for_step(3)
        called = call("save", run_dir, "--json")
        assert job.strikes()
    assert (called.status, called.json["error"]["id"]) == (2, "save-failed")
    assert "could not save" in called.json["error"]["message"]


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_time_limit_that_is_none_is_refused(tmp_path: Path, timeout: str) -> None:
    called = call("save", ended_run(tmp_path), "--timeout", timeout, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "setting")


def test_under_the_launcher_asking_rank_0_is_enough(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    options = options_of(run_dir, until=100_000, every=100_000, step_secs=0.01)
    Path(options.out).mkdir()
    script = ROOT / "tests/helpers/training.py"
    words = ["run", "--nproc-per-node=2", script, json.dumps(vars(options))]
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "dist_ckpt", *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + 60
        while not _logged(run_dir) and time.monotonic() < end:
            time.sleep(0.05)
        assert call("status", run_dir, "--json").json["world_size"] == 2
        saved = call("save", run_dir, "--json")
        assert saved.status == 0, saved.out
        stopped = call("stop", run_dir, "--json")
        assert stopped.status == 0, stopped.out
        assert launcher.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert stopped.json["step"] > saved.json["step"]
    latest = open_run(run_dir).latest()
    assert latest is not None
    assert (latest.step, latest.manifest.world_size) == (stopped.json["step"], 2)
    assert call("verify", run_dir).status == 0
    assert [e["event"] for e in read_journal(run_dir)].count("attempt_stopped") == 1


def _logged(run_dir: Path) -> bool:
    path = run_dir / f"{run_dir.name}.loss.json"
    return path.exists() and path.stat().st_size > 10
