"""Ways to end and faults of the moment: nothing good is condemned, nothing is left open."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import (
    NotFoundError,
    NoUsableGenerationError,
    SaveFailedError,
    StorageError,
    UsageError,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History, read_journal, read_loss
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Call, Fault, FaultyOps
from helpers.ranks import RankContext, run_ranks
from helpers.tiny import train_tiny


def _events(run: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run) if item["event"] == event]


def test_a_fault_of_the_moment_while_reading_back_condemns_no_generation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(Fault("open", "*.shard", nth=2, error="EMFILE"))
    with use_ops(ops):
        train_tiny(run, 2)
    assert ops.struck == 1
    store = GenerationStore(run)
    assert store.steps() == [2]
    assert store.verified_at(2) is None
    assert "EMFILE" in _events(run, "verify_left")[0]["reasons"]["0"]
    assert not store.archive.exists()
    train_tiny(run, 2)
    assert store.verified_at(2) is not None
    assert store.bin_path(2).exists()


def test_a_mark_that_cannot_be_written_leaves_the_generation_to_the_next_start(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(Fault("open", "*/.verified.json.tmp", error="ENOSPC"))
    with use_ops(ops):
        train_tiny(run, 2)  # its end, the last save, is no failure
    assert ops.struck == 1
    store = GenerationStore(run)
    assert (store.steps(), store.verified_at(2)) == ([2], None)
    assert not _events(run, "save_failed")
    (left,) = _events(run, "verify_left")
    assert left["step"] == 2
    assert "ENOSPC" in left["reasons"]["0"]
    train_tiny(run, 2)
    assert store.verified_at(2) is not None
    assert store.bin_path(2).exists()


def test_an_error_after_the_commit_is_journalled_with_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(
        Fault("preadv", "*step_000002/*.shard", error="EIO"),
        Fault("mkdir", "*/archive", error="ENOSPC"),  # where it is to be set aside
    )
    with use_ops(ops), pytest.raises(StorageError, match="ENOSPC"):
        train_tiny(run, 2)
    assert ops.struck == 2
    assert [event["step"] for event in _events(run, "save_failed")] == [2]


def test_a_device_that_cannot_give_the_newest_point_costs_that_point_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_tiny(run, 4, keep_last=None)
    ops = FaultyOps(Fault("pread*", "*step_000004/*.shard", error="EIO", times=None))
    with use_ops(ops):
        resumed = train_tiny(run, 5).resumed
    assert ops.struck > 0
    assert resumed is not None
    assert resumed.step == 2
    assert [skipped.step for skipped in resumed.skipped] == [4]
    assert (run / "archive" / "faulty_000004" / "step_000004").is_dir()


class _ReadBackFaults(FaultyOps):
    """Strikes on the background thread alone: the restore before it reads the same files."""

    def _due(self, call: Call) -> list[Fault]:
        return super()._due(call) if call.thread == "dist_ckpt-saver" else []


def test_a_save_before_the_loop_of_a_point_that_was_faulty_has_its_random_state(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    draws: list[float] = []

    def draw(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        draws.append(torch.rand(1).item())

    train_tiny(tmp_path / "whole", 5, body=draw)
    train_tiny(run, 4, body=draw)
    directory = run / "checkpoints" / "step_000004"
    directory.chmod(0o755)
    (directory / "verified.json").unlink()  # as a stop short of time leaves it
    ops = _ReadBackFaults(Fault("pread*", "*step_000004/*", error="EIO"))
    model = torch.nn.Linear(2, 1)
    with (
        use_ops(ops),
        dist_ckpt.Checkpointer(
            run, model=model, optimizer=torch.optim.AdamW(model.parameters()), every=2
        ) as ckpt,
    ):
        ends = time.monotonic() + 20.0
        while not _events(run, "save_failed"):  # told once the read-back has come to its end
            assert time.monotonic() < ends
            time.sleep(0.01)
        ckpt.save()
    assert ops.struck == 1
    assert _events(run, "faulty")[0]["step"] == 4
    assert GenerationStore(run).steps() == [2, 4]
    train_tiny(run, 5, body=draw)
    assert draws[-1] == draws[4], "random state is that of step 4, not of the program's start"


def test_a_stop_does_not_wait_until_the_save_before_is_read_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(Fault("pread*", "*step_000002/*", delay_secs=3.0))
    sent: list[float] = []

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            while not ops.strikes:  # the read-back of step 2 has begun
                time.sleep(0.01)
            sent.append(time.time())
            os.kill(os.getpid(), signal.SIGTERM)

    with use_ops(ops):
        ckpt = train_tiny(run, 9, body=body, deadline_secs=60)
    assert ckpt.stopped == "SIGTERM"
    order = [(e["event"], e["step"]) for e in read_journal(run) if e["step"] in {2, 3}]
    assert order.index(("verify_left", 2)) < order.index(("saved", 3))
    assert ("verified", 2) not in order
    assert ("verified", 3) in order
    train_tiny(run, 3)
    assert GenerationStore(run).verified_at(2) is not None


def test_a_name_that_the_metrics_need_is_refused_at_once_and_ends_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            with pytest.raises(UsageError, match="'cut'"):
                ckpt.record(cut=1.0)

    train_tiny(run, 4, body=body)
    assert GenerationStore(run).steps() == [2, 4]


def test_leaving_by_exit_0_does_not_hide_that_the_last_save_failed(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fsync", "*.shard", error="EIO"))

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            sys.exit(0)

    with use_ops(ops), pytest.raises(SaveFailedError, match="Step 2"):
        train_tiny(tmp_path / "run", 9, body=body)
    assert ops.struck == 1
    with pytest.raises(SystemExit) as left:
        train_tiny(tmp_path / "other", 9, body=body)
    assert left.value.code == 0


def test_ctrl_c_while_the_end_is_waited_for_leaves_nothing_open(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    ops = FaultyOps(Fault("fsync", "*.shard", delay_secs=2.0))

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            raise KeyError("three")

    watched = (signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C is Python's own
    with use_ops(ops), pytest.raises(KeyboardInterrupt):
        train_tiny(run, 9, body=body, signals=watched)
    assert ops.struck == 1
    assert [signal.getsignal(number) for number in watched] == before
    for thread in threading.enumerate():
        if thread.name == "dist_ckpt-saver":
            thread.join(20)
    assert train_tiny(run, 4).step == 4  # the lock is free again


def test_going_back_to_a_point_that_an_unfinished_rewind_took_away_is_refused(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    train_tiny(run, 8, keep_last=None)
    with History(run, run.name, 2) as history:
        history.journal.append("rewind_started", step=2)
    with pytest.raises(NotFoundError, match="step 6 to go back to"):
        train_tiny(run, 9, resume=6)
    assert GenerationStore(run).steps() == [2]


def test_a_run_whose_only_points_were_set_aside_does_not_begin_anew_by_itself(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    train_tiny(run, 2)
    GenerationStore(run).set_aside(2, "faulty_000002")
    with pytest.raises(NoUsableGenerationError, match="faulty_000002"):
        train_tiny(run, 4)
    assert train_tiny(run, 2, accept=("fresh_start",)).resumed is None


def test_resume_never_is_for_the_first_attempt_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tiny(tmp_path / "run", 2, resume="never")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train_tiny(tmp_path / "run", 4, resume="never").resumed is not None


def test_poll_does_not_cut_evaluations_short_for_a_signal_that_waits(tmp_path: Path) -> None:
    polled = []

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        polled.append(ckpt.poll())

    train_tiny(tmp_path / "run", 4, every=4, body=body, sigusr1="boundary")
    assert polled == [False] * 4
    assert [e["step"] for e in _events(tmp_path / "run", "signal")] == [4]


def test_a_bin_that_could_not_be_made_is_made_by_a_later_start_though_newer_ones_exist(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    ops = FaultyOps(Fault("link", "*step_000002*", error="EIO"))
    with use_ops(ops):
        train_tiny(run, 4, keep_last=None)
    store = GenerationStore(run)
    if ops.struck:
        assert not store.bin_path(2).exists()
    assert ops.struck == 1
    assert store.bin_path(4).exists()
    train_tiny(run, 4, keep_last=None)
    assert store.bin_path(2).exists()


def body_mean(ctx: RankContext, run: str, how: str) -> str:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, Any] = {"every": 2, "timeout_secs": 20, "reduce": "mean"}
    try:
        with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, **settings) as ckpt:
            for step in ckpt.steps(4):
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
                if how == "all" or ctx.rank == 0:
                    ckpt.record(loss=float(step + 10 * ctx.rank))
                if how == "raise" and step == 3 and ctx.rank == 1:
                    raise KeyError("my own error")
    except Exception as error:  # noqa: BLE001 - what is raised is what is looked for
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize(("how", "added"), [("all", 5.0), ("one", 0.0)])
def test_the_mean_is_of_the_ranks_that_recorded(how: str, added: float, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = run_ranks(2, body_mean, str(run), how)
    assert [result.value for result in results] == ["ended", "ended"]
    assert read_loss(run) == [(step, step + added) for step in range(1, 5)]


def test_an_error_of_one_rank_under_the_mean_is_that_error(tmp_path: Path) -> None:
    results = run_ranks(2, body_mean, str(tmp_path / "run"), "raise")
    assert "my own error" in str(results[1].value)
    assert "Error" in str(results[0].value)


SCRIPT = """
import os, sys
import torch, dist_ckpt
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
with dist_ckpt.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every=2) as ckpt:
    for step in ckpt.steps(9):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        if step == 4 and "chdir" in sys.argv:
            os.chdir("/")
        if step == 4 and "fork" in sys.argv:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitpid(child, 0)[1] == 7 << 8
"""


def _script(tmp_path: Path, *words: str, stderr: Any = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "run", *words],
        cwd=tmp_path,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("how", ["a reader that has ended", "a full disk", "closed"])
def test_a_notice_that_nobody_takes_costs_no_save_and_ends_nothing(
    how: str, tmp_path: Path
) -> None:
    if how == "a full disk":
        with Path("/dev/full").open("wb") as full, _script(tmp_path, stderr=full) as job:
            status = job.wait(60)
    elif how == "closed":
        command = 'exec "$0" -c "$1" run 2>&-'
        job = subprocess.Popen(
            ["/bin/sh", "-c", command, sys.executable, SCRIPT],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        status = job.wait(60)
    else:
        reading, writing = os.pipe()
        os.close(reading)
        job = _script(tmp_path, stderr=writing)
        os.close(writing)
        status = job.wait(60)
    # Python itself reports a stderr that can't be flushed at its end by 120.
    assert status in {0, 120}
    run = tmp_path / "run"
    assert [e["step"] for e in _events(run, "saved")] == [2, 4, 6, 8, 9]
    assert _events(run, "save_failed") == []
    assert _events(run, "attempt_ended") != []


@pytest.mark.parametrize("what", ["chdir", "fork"])
def test_a_script_that_moves_or_forks_keeps_its_run(what: str, tmp_path: Path) -> None:
    with _script(tmp_path, what, stderr=subprocess.PIPE) as job:
        _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told.decode()
    assert [e["step"] for e in _events(tmp_path / "run", "saved")] == [2, 4, 6, 8, 9]


def test_a_file_where_a_generation_belongs_blocks_no_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_tiny(run, 4)
    (run / "checkpoints" / "step_000006").touch()
    resumed = train_tiny(run, 5).resumed
    assert resumed is not None
    assert resumed.step == 4
    assert (run / "archive" / "faulty_000006" / "step_000006").is_file()


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_tiny(run, 4)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(NoUsableGenerationError, match="the journal tells of step 4"):
        train_tiny(run, 6)
    assert train_tiny(run, 6, accept=("fresh_start",)).resumed is None


@pytest.mark.parametrize("name", ["", "/"])
def test_a_run_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="the run's name"):
        train_tiny(Path(name) if name else "", 2)  # type: ignore[arg-type]


def test_the_longest_limits_that_are_taken_end_a_run_as_any(tmp_path: Path) -> None:
    assert train_tiny(tmp_path / "run", 2, timeout_secs=1e9, deadline_secs=1e9).step == 2
