"""Announcements: who may be signalled, and who may not. And the pure part of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dist_ckpt.announce import (
    AGENT_PID_ENV,
    announce,
    announcement_lock,
    any_lost_a_peer,
    any_stopped,
    is_orphaned,
    name_launcher,
    process_alive,
    process_start_time,
    read_announcements,
    request_stop,
    withdraw,
)
from dist_ckpt.launcher._options import names_a_file, parse_options, plan_torchrun_args
from dist_ckpt.launcher._processes import send_signal

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def launch_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a worker whose launcher's directory is this one."""
    monkeypatch.setenv("DIST_CKPT_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    return tmp_path


def test_announcing_without_a_launcher_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST_CKPT_LAUNCH_DIR", raising=False)
    assert announce(0) is False
    withdraw(0)


def test_announcing_to_a_launcher_that_is_gone_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_LAUNCH_DIR", str(tmp_path / "gone"))
    assert announce(0) is False
    withdraw(0, stopped=True)


def test_a_process_is_orphaned_when_launcher_or_agent_died_unless_they_were_asked_to_stop(
    launch_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIST_CKPT_LAUNCH_DIR")
    assert not is_orphaned()  # without our launcher
    monkeypatch.setenv("DIST_CKPT_LAUNCH_DIR", str(launch_dir))
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setenv(AGENT_PID_ENV, str(agent.pid))
    name_launcher(launch_dir)
    assert not is_orphaned()
    agent.kill()
    agent.wait()
    assert is_orphaned()
    monkeypatch.setenv(AGENT_PID_ENV, str(os.getppid()))
    assert not is_orphaned()
    record = launch_dir / "launcher.json"
    launcher = json.loads(record.read_text())
    record.write_text(json.dumps({**launcher, "start_time": 1}))
    assert is_orphaned()
    record.unlink()  # as by an agent that cleans up for a launcher that was killed
    assert is_orphaned()
    request_stop(launch_dir)
    assert not is_orphaned()


def test_a_rank_that_lost_a_peer_says_so_and_does_not_count_as_stopped(launch_dir: Path) -> None:
    announce(0)
    withdraw(0, lost_a_peer=True)
    assert any_lost_a_peer(launch_dir, {os.getpid()})
    assert not any_lost_a_peer(launch_dir, {1})
    assert not any_stopped(launch_dir, {os.getpid()})


def test_an_announcement_says_who_in_which_attempt_and_a_withdrawal_that_it_is_over(
    launch_dir: Path,
) -> None:
    assert announce(3) is True
    (record,) = read_announcements(launch_dir)
    assert (record.rank, record.pid, record.attempt, record.local_world_size) == (
        3,
        os.getpid(),
        2,
        4,
    )
    assert record.ready
    assert process_alive(record.pid, record.start_time)

    withdraw(3, stopped=True)

    (record,) = read_announcements(launch_dir)
    assert not record.ready
    assert record.stopped
    assert any_stopped(launch_dir, {os.getpid()})
    assert not any_stopped(launch_dir, {os.getppid()})
    announce(3)  # a second Checkpointer of the same script
    assert read_announcements(launch_dir)[0].ready


def test_a_child_that_inherited_the_environment_does_not_take_the_ranks_place(
    launch_dir: Path,
) -> None:
    announce(0)
    code = "from dist_ckpt.announce import *; import sys; a = announce(0); withdraw(0); sys.exit(a)"
    subprocess.run([sys.executable, "-c", code], check=True)
    (record,) = read_announcements(launch_dir)
    assert record.pid == os.getpid()
    assert record.ready


def test_a_recycled_pid_a_zombie_and_a_torn_record_are_nobody(launch_dir: Path) -> None:
    announce(0)
    (mine,) = read_announcements(launch_dir)
    assert not process_alive(mine.pid, mine.start_time + 1)
    assert send_signal(mine.pid, mine.start_time + 1, signal.SIGKILL) is False

    path = launch_dir / "rank_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "start_time": 1}))
    assert read_announcements(launch_dir) == []
    path.write_text('{"rank": 0, "pid"')
    assert read_announcements(launch_dir) == []

    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert process_start_time(child.pid) is None
    child.wait()


def test_a_withdrawal_waits_while_a_signal_is_being_sent_but_not_for_ever(launch_dir: Path) -> None:
    announce(0)
    done = threading.Event()

    def leave() -> None:
        withdraw(0)
        done.set()

    thread = threading.Thread(target=leave)
    with announcement_lock(launch_dir):
        thread.start()
        assert not done.wait(0.2)
        started = time.monotonic()
        assert done.wait(5.0)  # a launcher stopped by a debugger must not keep the rank here
        assert time.monotonic() - started > 0.2
    thread.join()
    assert not read_announcements(launch_dir)[0].ready


@pytest.mark.parametrize(
    ("argv", "torchrun_args", "script_args"),
    [
        (["a.py", "--grace", "1"], [], ["a.py", "--grace", "1"]),
        (["--nproc-per-node", "2", "a.py"], ["--nproc-per-node", "2"], ["a.py"]),
        (
            ["--nproc_per_node=2", "-m", "pkg.mod", "-x"],
            ["--nproc_per_node=2", "-m"],
            ["pkg.mod", "-x"],
        ),
        (["-r", "3", "-t3", "a.py"], ["-r", "3", "-t3"], ["a.py"]),
        (
            ["--standalone", "--no_python", "ls", "-l"],
            ["--standalone", "--no_python"],
            ["ls", "-l"],
        ),
        (
            ["--virtual", "--rdzv-conf", "a=1,b=2", "a.py"],
            ["--virtual", "--rdzv-conf", "a=1,b=2"],
            ["a.py"],
        ),
        (["--option-of-tomorrow", "v", "a.py"], ["--option-of-tomorrow", "v"], ["a.py"]),
        (["--grace", "9", "--role", "x", "--", "a.py", "--"], ["--role", "x"], ["a.py", "--"]),
    ],
)
def test_a_command_line_is_split_where_the_script_begins(
    argv: list[str], torchrun_args: list[str], script_args: list[str]
) -> None:
    options = parse_options(argv)
    assert list(options.torchrun_args) == torchrun_args
    assert list(options.script_args) == script_args


def test_the_launchers_own_options_are_taken_out() -> None:
    options = parse_options(["--grace=7", "--tee", "3", "--announce-wait", "0.5", "a.py"])
    assert (options.grace_secs, options.announce_wait_secs) == (7.0, 0.5)
    assert options.torchrun_args == ("--tee", "3")


def test_a_job_without_a_rendezvous_is_standalone_and_one_with_it_is_left_alone() -> None:
    alone = [["-r", "3"], ["--nnodes=1", "--nproc-per-node=2"], []]
    for args in alone:
        assert plan_torchrun_args(args, {}) == ["--standalone", *args]
    for args in (
        ["--nnodes", "1:2"],
        ["--standalone"],
        ["--rdzv_backend=c10d"],
        ["--rdzv-end", "host:1"],
        ["--master-port", "1"],
        ["--node-rank=1"],
    ):
        assert plan_torchrun_args(args, {}) == args
    assert plan_torchrun_args([], {"PET_NNODES": "2"}) == []
    assert plan_torchrun_args([], {"PET_RDZV_ENDPOINT": "host:1"}) == []


def test_modules_and_commands_need_no_file() -> None:
    assert names_a_file(["--nproc-per-node=2"])
    assert not names_a_file(["-m"])
    assert not names_a_file(["--no-python"])
