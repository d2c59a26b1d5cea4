"""Two jobs in one directory, commands beside a live run, other people's files."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.reliability import record_fault
from helpers.run_dirs import call, killed_run, options_of, spawn
from helpers.trainers import ROOT, Job, check_epochs, final, train
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
    quiet = _options(tmp_path / "quiet", until=60)
    train(quiet)
    options = _options(tmp_path / "live", until=60, step_secs=0.05, settings={"keep_last": 2})
    run = Path(options.run_dir)
    looks: list[tuple[str, ...]] = [("ls",), ("status",), ("show",), ("verify",), ("loss",)]
    done = 0
    with Job(options) as job:
        job.wait_for_step(9)
        while job.poll() is None and job.step() < 50:
            for command, *more in looks:
                called = call(command, run, *more, "--json")
                assert called.status == 0, (command, called.out, called.err)
                done += 1
            number = job.step()
            forked = call("fork", run, tmp_path / f"fork{number}")
            assert forked.status == 0, forked.err
            assert call("prune", run, "-n").status == 0
            for refused in (("rewind", f"{run}@4"), ("undelete", run, "4")):
                called = call(*refused)
                assert called.status == 2, (refused, called.out, called.err)
            done += 4
        assert job.wait() == [0], job.stderr()
    assert done >= 9
    assert final(options) == final(quiet)
    check_epochs(options)
    store = GenerationStore(run)
    assert store.steps() == [56, 60]
    for forked_run in tmp_path.glob("fork*"):
        assert call("verify", forked_run).status == 0
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


def _as_nobody(*arguments: str | Path, **named: Any) -> Any:
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = spawn(*arguments, **who, **named)
    if "No module named" in done.stderr:
        pytest.skip("nobody may not read this checkout or its environment")
    return done


TRAINING = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]
import torch, dist_ckpt
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
with dist_ckpt.Checkpointer(sys.argv[1], model=model, optimizer=optimizer):
    raise SystemExit(3)
"""


def test_another_users_run_is_refused_by_name_and_stays_as_it_is(public: Path) -> None:
    options = _options(public, until=4)
    train(options)
    run = Path(options.run_dir)
    for path in (run, *run.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, f"{path} is for others too"
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))
    for command in ("ls", "status", "verify"):
        done = _as_nobody(command, run)
        assert done.returncode == 2, done.stderr
        assert "EACCES" in done.stderr
        assert re.search(r"owns|permission", done.stderr)
        assert "Traceback" not in done.stderr
    done = _as_nobody(run, code=TRAINING)
    assert done.returncode == 1
    assert "dist_ckpt.errors.StorageError" in done.stderr
    assert "EACCES" in done.stderr
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    record_fault("Two at once", "another user's run directory", 4, "refused, says who may")


def test_a_run_that_may_only_be_read_can_be_looked_at(public: Path) -> None:
    options = _options(public, until=4)
    train(options)
    run = Path(options.run_dir)
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for command in ("ls", "status", "show", "verify", "loss"):
        done = _as_nobody(command, run)
        assert done.returncode == 0, (command, done.stderr)
    done = _as_nobody(run, code=TRAINING)
    assert done.returncode == 1
    assert "dist_ckpt.errors.StorageError" in done.stderr
    assert "EACCES" in done.stderr
    record_fault("Two at once", "a run directory that may only be read", 6, "read, never written")
