"""Two jobs in one directory, commands beside a live run, other people's files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.errors import StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.reliability import record_fault
from helpers.run_dirs import call, killed_run, options_of, snapshot_of
from helpers.sweeping import attempt, make_base
from helpers.trainers import Job, check_epochs, final, train
from helpers.training import Options

NOBODY = 65534


def _options(folder: Path, **changes: Any) -> Options:
    options = Options(run_dir=str(folder / "run"), out=str(folder / "out"), until=12, every=4)
    return replace(options, **changes)


def test_of_jobs_that_start_at_the_same_instant_one_trains_and_the_others_name_it(
    tmp_path: Path,
) -> None:
    quiet = _options(tmp_path / "quiet")
    train(quiet)
    options = _options(tmp_path / "raced", step_secs=0.15)
    others = [replace(options, out=f"{options.out}{number}") for number in range(4)]
    jobs = [Job(other) for other in others]
    try:
        statuses = [job.wait()[0] for job in jobs]
        assert sorted(statuses) == [0, 1, 1, 1], [job.stderr() for job in jobs]
        winner = statuses.index(0)
        for number, job in enumerate(jobs):
            if number != winner:
                assert "LockedError" in job.stderr()
                assert f"pid {jobs[winner].pid()}" in job.stderr()
                assert job.step() == -1
    finally:
        for job in jobs:
            job.__exit__(None, None, None)
    assert final(others[winner]) == final(quiet)
    (started,) = [e for e in read_journal(options.run_dir) if e["event"] == "attempt_started"]
    assert started["pid"] == jobs[winner].pid()
    record_fault("Two at once", "four jobs started in one directory", 3, "refused by name")


def test_commands_beside_a_live_run_disturb_nothing_and_tell_no_nonsense(tmp_path: Path) -> None:
    options = _options(tmp_path / "live", until=10**6, step_secs=0.02, settings={"keep_last": 2})
    run = Path(options.run_dir)
    done = 0
    with Job(options) as job:
        for first in (9, 30):
            job.wait_for_step(first)
            for command in ("ls", "status", "show", "verify", "loss"):
                called = call(command, run, "--json")
                assert called.status == 0, (command, called.out, called.err)
            assert call("prune", run, "-n").status == 0
            called = call("fork", run, tmp_path / "fork")
            assert called.status == 2, (called.out, called.err)
            assert f"pid {job.pid()}" in called.err
            done += 7
        assert job.poll() is None
        job.send(signal.SIGTERM)
        assert job.wait() == [0], job.stderr()
    assert not (tmp_path / "fork").exists()
    check_epochs(options)
    last = final(options)["step"]
    assert GenerationStore(run).steps()[-1] == last
    assert call("verify", run).status == 0
    quiet = _options(tmp_path / "quiet", until=last)
    train(quiet)
    assert {**final(quiet), "stopped": "SIGTERM"} == final(options)
    record_fault("Two at once", "a command beside a live run", done, "the run ends as if alone")


def test_after_a_reboot_a_process_with_the_old_number_holds_nothing(tmp_path: Path) -> None:
    """Case 53: what was written into the lock outlives its holder; its pid lives as another."""
    run = killed_run(tmp_path)
    facts = json.loads((run / "run.json").read_text())
    for name in ("run.json", "run.lock"):
        path = run / name
        node = json.loads(path.read_text())
        assert node["pid"] == facts["pid"]
        path.write_text(json.dumps(node | {"pid": os.getpid(), "start_time": 1}))
    assert call("status", run, "--json").json["state"] == "dead"
    called = call("stop", run)
    assert called.status == 2, called.err
    options = options_of(run)
    train(options)
    assert call("verify", run).status == 0
    record_fault("Two at once", "a lock whose holder's pid is another process now", 1, "it is free")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may pass through."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    folder = Path(tempfile.mkdtemp(prefix="dist_ckpt-public-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def _nobody() -> Iterator[None]:
    """Inside, this process is another user's and has no rights of root's."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_another_users_run_is_refused_by_name_and_stays_as_it_is(public: Path) -> None:
    run = make_base(public)
    for path in (run, *run.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, f"{path} is for others too"
    commands = ("ls", "status", "verify", "prune")
    for command in commands:
        assert call(command, run).status == 0  # and has imported what it needs
    before = snapshot_of(run)
    for command in commands:
        with _nobody():
            called = call(command, run)
        assert called.status == 2, called.out
        assert "EACCES" in called.err
        assert "permission" in called.err
    with _nobody():
        result = attempt(run)
    assert isinstance(result.error, StorageError)
    assert "EACCES" in str(result.error)
    assert snapshot_of(run) == before
    record_fault("Two at once", "another user's run directory", 4, "refused, says who may")


def test_a_run_that_may_only_be_read_can_be_looked_at(public: Path) -> None:
    run = make_base(public)
    commands = ("ls", "status", "show", "verify", "loss")
    for command in commands:
        assert call(command, run).status == 0  # and has imported what it needs
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for command in commands:
        with _nobody():
            called = call(command, run)
        assert called.status == 0, (command, called.err)
    with _nobody():
        result = attempt(run)
    assert isinstance(result.error, StorageError)
    assert "EACCES" in str(result.error)
    record_fault("Two at once", "a run directory that may only be read", 6, "read, never written")
