"""A pivot of a stopped run, killed at each of its operations, and gone on with in both ways."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt
from dist_ckpt.errors import (
    CorruptFileError,
    JobError,
    LockedError,
    NotFoundError,
    NotRunningError,
    RankTimeoutError,
    UsageError,
)
from dist_ckpt.history import History, bookmark_history, read_journal, read_samples
from dist_ckpt.lifecycle import (
    REQUEST_FILE,
    carry_out_pivot,
    new_request,
    read_request,
    remove_request,
    write_request,
)
from dist_ckpt.runs import open_run, pivot_run, plan_pivot
from dist_ckpt.storage import RunLock, use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps
from helpers.pivoting import Training, wait_for
from helpers.power_cuts import Disk, cuts
from helpers.recording import Recorder
from helpers.reliability import record_fault
from helpers.run_dirs import call, snapshot_of

OLD = {"floors": {"docs": 1.0}}
NEW = {"floors": {"docs": 3.0}, "ceilings": {"code": 0.25}}
#: A kill before a sync leaves what a kill after the write before it leaves.
CHANGES = {"ftruncate", "mkdir", "pwrite", "rename", "unlink"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with settings, stopped at step 20, behind whose resume point a crash left losses."""
    run = tmp_path_factory.mktemp("base") / "andrea"
    run.mkdir()
    (run / "andrea.policy.json").write_text(json.dumps(OLD), encoding="utf-8")
    Training().train(run, 20)
    with (run / "andrea.loss.json").open("r+", encoding="utf-8") as file:
        text = file.read()
        file.seek(0)
        file.write(text.rstrip().removesuffix("]") + ",\n[21, 1.5]]")
    return run


def _copy(run: Path, folder: Path) -> Path:
    target = folder / "andrea"
    shutil.copytree(run, target)
    return target


@contextlib.contextmanager
def _locked(run: Path, host: str | None = None) -> Iterator[RunLock]:
    """Somebody has the run's lock and answers nothing; it may be released before the end."""
    lock = RunLock(run / "run.lock")
    lock.acquire({"host": host or os.uname().nodename})
    try:
        yield lock
    finally:
        lock.release()


def _events(run: Path, word: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run) if event["event"] == word]


def _check(run: Path, original: Path) -> None:
    """The pivot is done, once, and nothing is lost."""
    (pivot,) = _events(run, "pivot")
    assert (pivot["step"], pivot["policy"], pivot["previous"]) == (20, NEW, OLD)
    home = run / str(pivot["archive"])
    assert sorted(pivot["archived"]) == sorted(path.name for path in home.iterdir())
    for name in ("andrea.samples.json", "andrea.state.json"):
        assert (home / name).read_bytes() == (original / name).read_bytes()
    assert json.loads((home / "andrea.policy.json").read_text()) == OLD
    assert json.loads((run / "andrea.policy.json").read_text()) == NEW
    assert not (run / REQUEST_FILE).exists()
    assert [path.name for path in (run / "archive").glob("pivot_*")] == ["pivot_000020"]
    text = (original / "andrea.loss.json").read_text().rstrip().removesuffix("]")
    assert (run / "andrea.loss.json").read_text().startswith(text)


def _check_goes_on(run: Path, original: Path) -> None:
    """Weights and moments are bit-equal, the bandit knows its new settings and nothing else."""
    training, before = Training(), Training()
    with training.checkpointer(run) as ckpt:
        dist_ckpt.open_run(original).generation(20).load_into(
            model=before.model, optimizer=before.optimizer
        )
        assert ckpt.resumed is not None
        assert ckpt.resumed.step == 20
        assert training.state() == before.state()
        assert len(training.state()) == 12
        assert all(arm.pulls == 0 for arm in training.bandit.arms.values())
        assert training.bandit.settings.floors == {"docs": 3.0}
        for _ in ckpt.steps(22):
            _, loss = training.update()
            ckpt.record(loss=loss)
    assert [step for step, _ in dist_ckpt.open_run(run).loss()] == list(range(1, 23))
    assert read_samples(run) == []
    again = Training()
    with again.checkpointer(run):
        assert again.bandit.state_dict() == training.bandit.state_dict()


def test_a_stopped_run_pivots_and_goes_on_with_a_fresh_policy(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    plan = plan_pivot(open_run(run), NEW)
    assert (plan.step, plan.is_live, plan.restarts) == (20, False, False)
    assert plan.moved == ("andrea.samples.json", "andrea.state.json")
    assert not (run / "archive").exists()
    done = pivot_run(open_run(run), NEW)
    assert (done.pivot.step, done.restarted) == (20, False)
    assert shlex.split(done.command or "")[-1] == sys.orig_argv[-1]  # what trained: this process
    assert [step for step, _ in dist_ckpt.open_run(run).loss()] == list(range(1, 21))
    _check(run, stopped)
    # Cut off behind its last step, or asked for twice: there is nothing more to do.
    assert pivot_run(open_run(run), NEW).pivot == done.pivot
    _check(run, stopped)
    _check_goes_on(run, stopped)
    _check(run, stopped)


def _killed_at(run: Path, op: str, nth: int, settings: dict[str, Any] = NEW) -> None:
    child = os.fork()
    if child == 0:
        try:
            with use_ops(FaultyOps(Fault(op, nth=nth, kill=True))):
                pivot_run(open_run(run), settings)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_pivot_killed_at_any_operation_is_done_by_running_it_again_or_by_the_next_start(
    stopped: Path, tmp_path: Path
) -> None:
    ops = RecordingOps()
    with use_ops(ops):
        pivot_run(open_run(_copy(stopped, tmp_path / "whole")), NEW)
    changes = [call.op for call in ops.calls if call.op in CHANGES]
    assert len(changes) > 15
    undone = 0
    for place in range(len(changes)):
        op, nth = changes[place], changes[: place + 1].count(changes[place])
        run = _copy(stopped, tmp_path / str(place))
        _killed_at(run, op, nth)
        wanted = read_request(run) is not None
        if wanted and place % 2:
            _check_goes_on(run, stopped)  # the next start goes on with it
        else:
            undone += not wanted and not _events(run, "pivot")
            pivot_run(open_run(run), NEW)
        _check(run, stopped)
        shutil.rmtree(run)
    assert undone < 12  # where it was killed before there was a request


def test_without_settings_those_that_there_are_stay_and_the_policy_is_fresh(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    done = pivot_run(open_run(run), None)
    assert (done.pivot.policy, done.pivot.previous) == (OLD, OLD)
    training = Training()
    with training.checkpointer(run):
        assert all(arm.pulls == 0 for arm in training.bandit.arms.values())
        assert training.bandit.settings.floors == {"docs": 1.0}


def test_another_pivot_while_one_is_half_done_comes_after_it(stopped: Path, tmp_path: Path) -> None:
    run = _copy(stopped, tmp_path)
    first = {"floors": {"docs": 2.0}}
    _killed_at(run, "rename", 3, first)
    half = read_request(run)
    assert half is not None
    assert half.begun is not None
    assert _events(run, "pivot") == []
    pivot_run(open_run(run), NEW)
    story = [(event["policy"], event["previous"]) for event in _events(run, "pivot")]
    assert story == [(first, OLD), (NEW, first)]
    assert read_request(run) is None


def test_a_half_done_pivot_is_waited_for_while_somebody_else_has_the_lock(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    first = {"floors": {"docs": 2.0}}
    _killed_at(run, "rename", 3, first)
    with _locked(run):
        half = (run / REQUEST_FILE).read_bytes()
        with pytest.raises((RankTimeoutError, LockedError)):
            pivot_run(open_run(run), NEW, timeout_secs=0.3)
        assert (run / REQUEST_FILE).read_bytes() == half
    pivot_run(open_run(run), NEW)
    assert [event["policy"] for event in _events(run, "pivot")] == [first, NEW]


def test_a_pivot_that_another_process_has_begun_is_gone_on_with_from_there(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    with _locked(run) as lock, ThreadPoolExecutor() as pool:
        waiting = pool.submit(pivot_run, open_run(run), NEW, timeout_secs=60.0)
        wait_for(run / REQUEST_FILE)
        request = read_request(run)
        assert request is not None
        # As a worker does before it resumes, until its disk fails: the settings are new.
        ops = FaultyOps(Fault("pwrite", path="*.journal.jsonl", error="EIO"))
        with use_ops(ops), pytest.raises(OSError, match="journal"):
            carry_out_pivot(run, "andrea", 2, request)
        assert ops.struck == 1
        assert json.loads((run / "andrea.policy.json").read_text()) == NEW
        lock.release()
        waiting.result(30)
    _check(run, stopped)


def test_a_rewind_that_was_cut_off_ends_before_the_pivot(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    Training().train(run, 25)
    with History(run, "andrea", 1) as history:
        mark: dict[str, Any] = {**bookmark_history(history)}
        history.journal.append("rewind_started", step=20, home="rewind_to_000020", **mark)
    done = pivot_run(open_run(run), None)
    assert done.pivot.step == 20
    words = [event["event"] for event in read_journal(run)]
    assert words.index("rewound") < words.index("pivot")
    assert open_run(run).store.steps() == [20]
    assert (run / "archive" / "rewind_to_000020" / "step_000025").is_dir()


def test_a_run_without_a_generation_is_refused_and_nothing_is_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    training = Training()
    with training.checkpointer(run):
        pass
    with pytest.raises(NotFoundError, match="no generation to go on from"):
        pivot_run(open_run(run), NEW)
    assert read_request(run) is None


def test_settings_for_a_run_without_a_policy_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    training = Training()
    with dist_ckpt.Checkpointer(run, model=training.model, optimizer=training.optimizer) as ckpt:
        for _ in ckpt.steps(3):
            training.update()
    with pytest.raises(UsageError, match="keeps no policy"):
        pivot_run(open_run(run), NEW)
    assert pivot_run(open_run(run), None).pivot.step == 3


class Counter:
    """A policy without settings."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_settings_for_a_policy_that_takes_none_are_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    run = tmp_path / "andrea"
    training = Training()
    with dist_ckpt.Checkpointer(
        run, model=training.model, optimizer=training.optimizer, policy=Counter()
    ) as ckpt:
        for _ in ckpt.steps(3):
            training.update()
    before = snapshot_of(run)
    (tmp_path / "new.json").write_text(json.dumps(NEW))
    called = call("pivot", run, "--policy", tmp_path / "new.json")
    assert called.status == 2
    assert "keeps a policy that takes no settings" in called.err
    assert call("pivot", run, "--policy", tmp_path / "new.json", "-n").status == 2
    assert snapshot_of(run) == before
    assert pivot_run(open_run(run), None).pivot.step == 3


@pytest.mark.parametrize("settings", [{"a": float("nan")}, {(1, 2): "a"}, {"a": {1, 2}}])
def test_settings_that_no_file_can_hold_are_refused_before_anything_changes(
    settings: Any, stopped: Path
) -> None:
    before = snapshot_of(stopped)
    with pytest.raises(UsageError, match="aren't one JSON object"):
        pivot_run(open_run(stopped), settings)
    assert snapshot_of(stopped) == before


def test_a_request_of_somebody_else_is_refused_by_name(stopped: Path, tmp_path: Path) -> None:
    run = _copy(stopped, tmp_path)
    for text in ("{}", "[", '{"when": "now", "then": "pivot"}'):
        (run / REQUEST_FILE).write_text(text, encoding="utf-8")
        with pytest.raises(CorruptFileError, match=r"request\.json"):
            pivot_run(open_run(run), NEW)
    body = json.loads(json.dumps({"when": "boundary", "then": "pivot", "id": "x", "time": 1}))
    body |= {"policy": None, "begun": {"step": 1, "archive": "../x", "before": None}}
    (run / REQUEST_FILE).write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(CorruptFileError, match="archive"):
        read_request(run)


@pytest.mark.parametrize(("wish", "what"), [(NEW, "replaced"), (None, "withdrawn")])
def test_a_pivot_whose_place_another_took_says_so_and_changes_nothing(
    stopped: Path, tmp_path: Path, wish: dict[str, Any] | None, what: str
) -> None:
    run = _copy(stopped, tmp_path)
    # As of somebody who trains, and comes to no boundary.
    with _locked(run), ThreadPoolExecutor() as pool:
        first = pool.submit(pivot_run, open_run(run), OLD, timeout_secs=60.0)
        wait_for(run / REQUEST_FILE)
        assert not first.done()
        if wish is None:
            remove_request(run)
        else:
            write_request(run, new_request(wish))
        with pytest.raises(JobError, match=what):
            first.result(30)
    assert _events(run, "pivot") == []
    standing = read_request(run)
    assert (standing and standing.policy) == wish
    if wish is not None:
        pivot_run(open_run(run), NEW)
        _check(run, stopped)


def test_a_locked_run_that_nobody_can_be_asked_of_is_waited_for_and_left_alone(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    with _locked(run), pytest.raises((RankTimeoutError, LockedError)):
        pivot_run(open_run(run), NEW, timeout_secs=0.5)
    assert _events(run, "pivot") == []
    facts = json.loads((run / "run.json").read_text()) | {"host": "elsewhere"}
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    with _locked(run, "elsewhere"), pytest.raises(NotRunningError, match="another host"):
        pivot_run(open_run(run), NEW)


def test_a_power_cut_at_any_instant_of_a_pivot_loses_nothing_and_it_is_done_again(
    stopped: Path, memory: Path
) -> None:
    """Names and bytes that weren't synced lost, kept, half or zeros; then the command again."""
    root = memory / "root"
    root.mkdir()
    _copy(stopped, root)
    for name in ("checkpoints", "step_000020.bin", "step_000020.bin.sha256"):
        _keep_out(root / "andrea" / name, memory / "aside")
    recorder = Recorder(root)
    disk = Disk.read(root)
    _keep_in(memory / "aside", root / "andrea")
    with use_ops(recorder):
        pivot_run(open_run(root / "andrea"), NEW)
    seen: set[bytes] = set()
    for number, event in enumerate(recorder.events):
        disk.do(event)
        for state in cuts(disk, random.Random(number), at_most=6):
            if state.fingerprint() in seen:
                continue
            seen.add(state.fingerprint())
            scratch = memory / "scratch"
            scratch.mkdir()
            state.lay(scratch)
            _keep_in(memory / "aside", scratch / "andrea")
            try:
                pivot_run(open_run(scratch / "andrea"), NEW)
                _check(scratch / "andrea", stopped)
            except Exception as error:
                error.add_note(f"cut after operation {number}: {event.op} {event.text}")
                raise
            shutil.rmtree(scratch)
    assert len(seen) > 60
    what = "pivot: any state that one may leave, by the rule"
    record_fault("Power cut", what, len(seen), "done by the same command again")


def _keep_out(path: Path, aside: Path) -> None:
    """Generations aren't touched by a pivot, and needn't be laid out again in each state."""
    aside.mkdir(exist_ok=True)
    path.rename(aside / path.name)


def _keep_in(aside: Path, run: Path) -> None:
    shutil.copytree(aside, run, dirs_exist_ok=True)


def test_a_fork_of_the_newest_generation_follows_a_pivot_that_no_save_has_followed(
    stopped: Path, tmp_path: Path
) -> None:
    run, branch = _copy(stopped, tmp_path), tmp_path / "branch"
    Training().train(run, 40)
    pivot_run(open_run(run), NEW)
    (pivot,) = _events(run, "pivot")
    for words in (("-n",), (), ()):
        called = call("fork", f"{run}@40", branch, *words)
        assert called.status == 0, called.err
        assert "starts fresh, with the settings of the pivot" in called.out
    with (fresh := Training()).checkpointer(branch) as ckpt:
        assert ckpt.resumed is not None
        assert ckpt.resumed.step == 40
        assert all(arm.pulls == 0 for arm in fresh.bandit.arms.values())
        assert fresh.bandit.settings.floors == {"docs": 3.0}
    (forked,) = _events(branch, "forked")
    assert (forked["policy"], forked["pivot"]) == (True, pivot["id"])


def test_a_fork_of_an_earlier_generation_or_with_a_save_behind_the_pivot_is_as_of_its_step(
    stopped: Path, tmp_path: Path
) -> None:
    run = _copy(stopped, tmp_path)
    Training().train(run, 40)
    pivot_run(open_run(run), NEW)
    # By its own path too, which alone says nothing of what is newer.
    for number, name in enumerate([f"{run}@20", f"{run}/checkpoints/step_000020"]):
        branch = tmp_path / f"early-{number}"
        called = call("fork", name, branch, "--json")
        assert (called.status, called.json["pivot"]) == (0, None)
        assert json.loads((branch / f"{branch.name}.policy.json").read_text()) == OLD
        assert not (branch / f"{branch.name}.state.json").exists()
    (after := Training()).train(run, 41)
    assert call("fork", run, tmp_path / "late", "--json").json["pivot"] is None
    with (same := Training()).checkpointer(tmp_path / "late"):
        assert same.bandit.state_dict() == after.bandit.state_dict()
        assert same.bandit.settings.floors == {"docs": 3.0}
