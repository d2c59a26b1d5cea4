"""What a run tells its supervisor, and when; and what it takes from a supervisor's file."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dist_ckpt
from dist_ckpt import notify
from dist_ckpt.history import read_journal
from dist_ckpt.service import _notices
from dist_ckpt.service._deadline import measured_save_secs, stop_deadline
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps


@pytest.fixture
def supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[dict[str, str]]]]:
    """Return what was told since the last call; the looks at moving bytes are frequent."""
    receiver = notify.NotifyReceiver(tmp_path / "notify")
    heard: list[dict[str, str]] = []
    over = threading.Event()

    def listen() -> None:  # as a supervisor does: the kernel's queue is short
        while not over.wait(0.005):
            heard.extend(receiver.take())

    def told() -> list[dict[str, str]]:
        time.sleep(0.05)
        found, heard[:] = heard[:], []
        return found

    listener = threading.Thread(target=listen)
    listener.start()
    monkeypatch.setenv("NOTIFY_SOCKET", str(receiver.path))
    monkeypatch.setattr(_notices, "_LOOK_SECS", 0.02)
    monkeypatch.setattr(_notices, "_ALIVE_SECS", 0.0)
    yield told
    over.set()
    listener.join()
    receiver.close()


def _train(
    run_dir: Path,
    until: int,
    *,
    stop_at: int | None = None,
    end_at: int | None = None,
    **settings: object,
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    named: dict[str, object] = {"every": 2, **settings}
    with dist_ckpt.Checkpointer(run_dir, model=model, optimizer=optimizer, **named) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(until):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            ckpt.record(loss=1.0)
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == end_at:
                ckpt.stop()


def test_ready_comes_after_the_resume_then_each_boundary_and_commit_and_the_stop_last(
    supervisor: Callable[[], list[dict[str, str]]], tmp_path: Path
) -> None:
    _train(tmp_path / "run", 2)
    first = supervisor()
    assert [m["STATUS"] for m in first if "READY" in m] == ["training from step 0"]
    _train(tmp_path / "run", 9, stop_at=5)
    told = supervisor()
    told = [message for message in told if "EXTEND_TIMEOUT_USEC" not in message]
    words = [" ".join(sorted(message)) for message in told]
    assert words[0] == "STATUS WATCHDOG"
    assert words[1] == "READY STATUS WATCHDOG"
    assert told[1]["STATUS"] == "resumed from step 2, verified"
    assert words.count("WATCHDOG") == 4  # the start's boundary, and those of 3, 4 and 5
    stop = words.index("STATUS STOPPING")
    assert told[stop]["STATUS"] == "stopping: writing step 5"
    assert words[stop:].count("WATCHDOG") == 0
    assert told[-1] == {"STATUS": "last committed: step 5"}
    assert {"STATUS": "last committed: step 4"} in told


def test_more_time_is_asked_for_while_bytes_move_and_not_while_they_hang(
    supervisor: Callable[[], list[dict[str, str]]], tmp_path: Path
) -> None:
    _train(tmp_path / "run", 2)
    supervisor()

    def extensions(fault: Fault, until: int) -> int:
        with use_ops(FaultyOps(fault)):
            _train(tmp_path / "run", 99, stop_at=until, every=100)
        told = supervisor()
        stop = next(i for i, message in enumerate(told) if "STOPPING" in message)
        assert all("EXTEND_TIMEOUT_USEC" not in message for message in told[:stop])
        found = [m["EXTEND_TIMEOUT_USEC"] for m in told if "EXTEND_TIMEOUT_USEC" in m]
        assert set(found) <= {"30000000"}
        return len(found)

    slow = Fault("pwrite", "*/.tmp-*", times=None, delay_secs=0.1)
    assert extensions(slow, 4) >= 3  # shard, state and index at least
    hangs = Fault("pwrite", "*.shard", delay_secs=2.0)
    assert extensions(hangs, 6) <= 30  # of 100 looks: what moved before and after


def test_only_the_first_rank_of_a_host_speaks_but_each_says_that_bytes_move(
    supervisor: Callable[[], list[dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with use_ops(FaultyOps(Fault("pwrite", "*/.tmp-*", times=None, delay_secs=0.1))):
        _train(tmp_path / "run", 99, stop_at=2, every=100)
    told = supervisor()
    assert told
    assert {name for message in told for name in message} == {"EXTEND_TIMEOUT_USEC"}


def test_a_run_that_ends_by_itself_is_not_said_to_stop_since_its_script_may_go_on(
    supervisor: Callable[[], list[dict[str, str]]], tmp_path: Path
) -> None:
    """systemd kills what doesn't end soon after STOPPING."""
    _train(tmp_path / "run", 3)
    _train(tmp_path / "run", 9, end_at=5)
    told = supervisor()
    assert {"STATUS": "last committed: step 5"} in told
    assert [message for message in told if "STOPPING" in message] == []


def test_a_supervisor_that_is_gone_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    _train(tmp_path / "run", 3)
    assert [g.step for g in dist_ckpt.open_run(tmp_path / "run").generations()] == [2, 3]


# What a supervisor's file says ------------------------------------------------------------------


def test_the_deadline_beside_the_supervisors_own_limit_counts_and_nonsense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_DEADLINE_SECS", "soon")
    with pytest.raises(ValueError, match="DIST_CKPT_DEADLINE_SECS='soon'"):
        _train(tmp_path / "run", 1)
    monkeypatch.setenv("DIST_CKPT_DEADLINE_SECS", "240")
    monkeypatch.setenv("DIST_CKPT_STOP_EXIT_CODE", "256")
    with pytest.raises(ValueError, match="DIST_CKPT_STOP_EXIT_CODE='256'"):
        _train(tmp_path / "run", 1)


def test_a_stop_ends_by_the_end_of_the_job_where_that_is_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def left() -> float:
        return stop_deadline(100.0, 10.0) - time.monotonic()

    assert left() == pytest.approx(90, abs=1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 40))
    assert left() == pytest.approx(40, abs=1)
    monkeypatch.setenv("DIST_CKPT_END_TIME", str(time.time() + 1000))
    assert left() == pytest.approx(90, abs=1)
    monkeypatch.setenv("DIST_CKPT_END_TIME", "")  # not known to who set it
    assert left() == pytest.approx(40, abs=1)


def test_a_save_that_does_not_fit_the_deadline_is_warned_of_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    with use_ops(FaultyOps(Fault("pwrite", "*.shard", times=None, delay_secs=0.2))):
        _train(run_dir, 4)
    _train(run_dir, 4)
    assert "a save takes" not in caplog.text
    monkeypatch.setenv("DIST_CKPT_DEADLINE_SECS", "0.3")
    _train(run_dir, 4)
    assert "a save takes 0." in caplog.text
    (event,) = [e for e in read_journal(run_dir) if e["event"] == "tight_deadline"]
    assert event["deadline_secs"] == 0.3
    assert 0.2 <= event["save_secs"] < 10


def test_the_measure_is_the_median_of_the_last_saves() -> None:
    saves = [
        {"event": "saved", "durable_secs": secs, "blocked_secs": 0.5}
        for secs in (90.0, 1.0, 50.0, 2.0, 3.0, 4.0)
    ]
    assert measured_save_secs([*saves, {"event": "verified"}]) == 3.5
    assert measured_save_secs([]) is None


# Slurm ------------------------------------------------------------------------------------------


def test_a_restart_that_torchrun_does_not_count_goes_on_where_its_rewind_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has joined: the same launch begins again."""
    run_dir = tmp_path / "run"
    _train(run_dir, 6)
    for launch in ("first", "first", "second"):
        monkeypatch.setenv("DIST_CKPT_LAUNCH_ID", launch)
        _train(run_dir, 8, resume=4)
    resumed = [e["step"] for e in read_journal(run_dir) if e["event"] == "resumed"]
    assert resumed == [4, 8, 4]


def test_a_job_that_slurm_started_again_goes_on_where_its_rewind_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    _train(run_dir, 6)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    _train(run_dir, 8, resume=4)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    _train(run_dir, 10, resume=4)
    _train(tmp_path / "other", 2, resume="never")
    _train(tmp_path / "other", 4, resume="never")
    events = read_journal(run_dir)
    assert [e["step"] for e in events if e["event"] == "resumed"] == [4, 8]
    started = [e["scheduler"] for e in events if e["event"] == "attempt_started"]
    assert started == [
        None,
        {"name": "slurm", "job": "4711", "restarts": 0},
        {"name": "slurm", "job": "4711", "restarts": 2},
    ]
