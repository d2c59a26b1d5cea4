"""What the launcher ends with, and how it refuses a command line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from dist_ckpt.announce import Announcement, request_stop, write_json
from dist_ckpt.launcher import _agent, launch, main
from dist_ckpt.launcher._agent import _Progress, _use_our_agent
from dist_ckpt.launcher._agent import _reason as reason
from dist_ckpt.launcher._ending import exit_status
from dist_ckpt.launcher._names import RESULT_NAME, UNMET_STATUS
from dist_ckpt.launcher._options import _FLAGS, _SHORT_FLAGS
from helpers.launching import ROOT, WORKER, Launched, processes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start launchers whose remains are gone after the test."""
    started: list[Launched] = []

    def make(*args: str | Path) -> Launched:
        started.append(Launched(tmp_path, *args))
        return started[-1]

    yield make
    for one in started:
        one.close()


def test_a_stop_exit_code_is_passed_on_and_the_job_is_not_restarted(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    """Case 56: a scheduler that requeues on non-zero sees the status that the script asked for."""
    job = start(
        *("--nproc-per-node=2", "--max-restarts=3", WORKER, "--out", tmp_path / "out"),
        *("--exit-code", "75", "--late-rank", "1"),  # torchrun ends rank 1 when it sees rank 0's 75
    )
    job.wait_for("ready")
    job.send(signal.SIGTERM)

    assert job.status() == 75, job.stderr
    assert job.count(0, "stopping") == 1
    assert job.count(0, "1 ready") == 0


def test_a_stop_of_the_ranks_themselves_with_an_exit_code_is_not_restarted_either(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start("--max-restarts=3", WORKER, "--out", tmp_path / "out", "--exit-code", "75")
    job.wait_for("ready", ranks=(0,))
    os.kill(int(job.value(0, "pid")), signal.SIGTERM)  # as `dist-ckpt stop RUN` does

    assert job.status() == 75, job.stderr
    assert job.count(0, "1 ready") == 0


def test_a_failing_worker_gives_a_status_and_a_message_that_names_the_rank(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start("--nproc-per-node=2", WORKER, "--out", tmp_path / "out", "--fail-at", "5")
    launch_id = ""
    job.wait_for("launch", ranks=(0,))
    launch_id = job.value(0, "launch")

    assert job.status() not in {0, 2}, job.stderr

    assert "rank 1: status 3" in job.stderr
    assert "Traceback" not in job.stderr
    assert processes_of(launch_id) == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "No script was given"),
        (["--nproc-per-node=2"], "No script was given"),
        (["no/such/train.py"], "no/such/train.py"),
        (["--grace", "soon", "train.py"], "'soon'"),
        (["--announce-wait"], "--announce-wait needs"),
    ],
)
def test_a_wrong_command_line_is_status_2_and_one_line(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--no-such-option=1", "--nnodes=many"])
def test_an_option_that_torchrun_refuses_is_status_2_and_two_lines_at_most(
    option: str, start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(option, WORKER, "--out", tmp_path / "out")
    assert job.status() == 2, job.stderr
    assert 1 <= job.stderr.count("\n") <= 2


def test_a_node_that_meets_nobody_says_so_in_one_line_and_has_a_status_of_its_own(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    job = start(
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x"),
        *("--rdzv-conf=is_host=0,read_timeout=1", WORKER, "--out", tmp_path / "out"),
    )
    assert job.status() == 69, job.stderr
    assert "Traceback" not in job.stderr
    (line,) = [one for one in job.stderr.splitlines() if one.startswith("dist-ckpt run: ")]
    assert "trying to connect to (127.0.0.1, 1)). Start the launcher on each of them" in line
    assert job.count(0, "ready") == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousTimeoutError(), "(not all of them came in time)"),
        (RendezvousClosedError(), "(the others have ended)"),
        (DistNetworkError("no route\nframe #0"), "(no route)"),
    ],
)
def test_why_nodes_did_not_meet_is_told_in_words(
    error: Exception,
    said: str,
    fail: Callable[[Exception, _Progress], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fail(error, _Progress()) == UNMET_STATUS
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Exception, _Progress], int]:
    """Have torchrun end with an error, and return the agent's status."""

    def run(error: Exception, progress: _Progress) -> int:
        def meet(_options: object) -> None:
            raise error

        monkeypatch.setattr("torch.distributed.run.run", meet)
        return _agent._run_torchrun(["--nnodes=2", "x.py"], tmp_path, progress)

    monkeypatch.setattr(_agent, "_use_our_agent", lambda *_: None)
    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.errors.record", lambda run: run)
    return run


def test_nodes_that_lost_each_other_had_met_and_at_a_stop_it_is_no_news(
    fail: Callable[[Exception, _Progress], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = RendezvousConnectionError("the store is gone")
    assert fail(error, _Progress(started=True)) == UNMET_STATUS
    assert capsys.readouterr().err.endswith("lost each other (the store is gone).\n")
    assert fail(error, _Progress(started=True, stopping=True)) == 1
    request_stop(tmp_path)  # not seen before the store went
    assert fail(error, _Progress()) == 1
    assert capsys.readouterr().err == ""


def test_a_port_that_is_in_use_is_told_as_such_and_no_matter_of_other_nodes(
    fail: Callable[[Exception, _Progress], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistNetworkError) as found:
            TCPStore("127.0.0.1", port, is_master=True)
    wrapped = RendezvousConnectionError("See inner exception for details.")
    wrapped.__cause__ = found.value
    for error in (found.value, wrapped):  # as the static rendezvous raises it, and c10d as host
        assert fail(error, _Progress()) == 2
        told = capsys.readouterr().err
        assert told.startswith("dist-ckpt run: the rendezvous' port is in use here (The ")
        assert f"port: {port}" in told
        assert "Choose another port (--master-port" in told
        assert told.count("\n") == 1


def test_nodes_that_do_not_meet_again_count_for_more_than_how_the_workers_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / RESULT_NAME).write_text('{"exit_codes": {"0": 1}}')
    assert exit_status(tmp_path, 1, stopping=False) == 1
    assert exit_status(tmp_path, UNMET_STATUS, stopping=False) == UNMET_STATUS
    assert exit_status(tmp_path, UNMET_STATUS, stopping=True) == 1


def test_workers_that_were_stopped_for_a_restart_do_not_make_a_success_of_nodes_that_parted(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        record = Announcement(rank, 4711 + rank, 1, 0, 2, ready=False, stopped=True)
        write_json(tmp_path / f"rank_{rank}.json", asdict(record))
    (tmp_path / RESULT_NAME).write_text('{"exit_codes": {"0": 0, "1": 0}}')
    assert exit_status(tmp_path, UNMET_STATUS, stopping=False) == UNMET_STATUS
    # Where the job itself was stopped its agent says 1, and the workers' end is the job's.
    assert exit_status(tmp_path, 1, stopping=False) == 0


def test_a_job_without_ranks_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_agent, "_use_our_agent", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        _agent._run_torchrun(["--nproc-per-node", "0", "x.py"], tmp_path, _Progress())
    assert "--nproc-per-node 0 starts no rank" in capsys.readouterr().err


def test_a_refusal_of_torchrun_without_words_says_where_it_is() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    with pytest.raises(AssertionError) as refused:
        WorkerSpec(role="any", local_world_size=0, rdzv_handler=None)  # type: ignore[arg-type]
    assert str(refused.value) == ""
    assert re.match(r"it says no more than line \d+ of .*/api\.py\. Look", reason(refused.value))


def test_every_option_of_torchrun_that_takes_no_value_is_known() -> None:
    """The launcher looks for the script without torch: what it takes for a value isn't one."""
    from torch.distributed.run import get_args_parser

    alone = {
        option
        for action in get_args_parser()._actions
        if action.nargs == 0 and action.dest != "help"
        for option in action.option_strings
    }
    known = {f"--{name}" for name in _FLAGS} | set(_SHORT_FLAGS)
    assert {option.replace("_", "-") for option in alone} == known


@pytest.mark.parametrize("missing", ["LocalElasticAgent", "_monitor_workers"])
def test_a_torch_without_the_agent_that_is_needed_is_refused_by_its_version(
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch.distributed.launcher import api

    class Agent:
        def _start_workers(self) -> None: ...
        def _shutdown(self) -> None: ...

    if missing == "LocalElasticAgent":
        monkeypatch.delattr(api, missing)
    else:
        monkeypatch.setattr(api, "LocalElasticAgent", Agent)
    with pytest.raises(SystemExit, match="2"):
        _use_our_agent(tmp_path, _Progress())
    told = capsys.readouterr().err
    assert f"torch {torch.__version__}" in told
    assert "_monitor_workers" in told
    assert "plain torchrun" in told


def test_help_is_short_and_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc-per-node=2", "--help"]) == 0
    text = capsys.readouterr().out
    assert "differs from torchrun" in text
    assert len(text.splitlines()) < 30


def test_launch_without_a_script_is_refused() -> None:
    with pytest.raises(ValueError, match="No script"):
        launch([], [])


def test_the_launcher_does_not_import_torch() -> None:
    # It takes seconds, in which a signal would kill the launcher.
    code = "import sys, dist_ckpt.launcher; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
