"""Storage that fails at one operation of an attempt, at each in turn: nothing is lost or left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.service import _last_save
from dist_ckpt.storage import use_ops
from helpers import sweeping
from helpers.faulty_ops import Call, Fault, FaultyOps, RecordingOps
from helpers.reliability import record_fault
from helpers.sweeping import Broken, Result, Site, attempt, copy_run, judge, judge_next
from helpers.trainers import Job, final, generations
from helpers.training import Options


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_last_save, "_FIRST_PAUSE_SECS", 0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweeping.make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def unbroken(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, RecordingOps]:
    run = copy_run(base, tmp_path_factory.mktemp("whole") / "it")
    ops = RecordingOps()
    result = attempt(run, ops)
    assert (result.error, result.leaks) == (None, [])
    ops.calls = [
        Call(call.op, call.path.replace(str(run), "/RUN"), call.args) for call in ops.calls
    ]
    return result, ops


def _dice() -> random.Random:
    """The same sample each time; set the variable for another one."""
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    return random.Random(seed)


def _once(base: Path, folder: Path, whole: Result, site: Site, kind: str) -> list[str] | None:
    """Return what is wrong after a fault at a site; None where it wasn't come to."""
    run = copy_run(base, folder)
    ops = sweeping.once(run, site, kind)
    result = attempt(run, ops)
    if not ops.struck:
        return None
    assert ops.struck == 1
    wrong = []
    if site.op in {"fsync", "fdatasync"}:
        wrong += sweeping.retried_syncs(ops.calls, ops.strikes[0])
    # What was renamed to be removed stays where the rename may not be durable: with its name back
    # after a power cut it has to be whole.
    in_removal = site.op in {"unlink", "rmdir", "listdir", "lstat", "stat"}
    in_removal |= site.path == "/checkpoints" and site.op in {"open", "fsync", "close"}
    wrong += judge(run, result, whole, kind, removals_fail=in_removal)
    return wrong + judge_next(run, attempt(run), whole)


def _sweep_once(
    base: Path, folder: Path, unbroken: tuple[Result, RecordingOps], most: int | None
) -> None:
    whole, ops = unbroken
    plans = [
        (site, kind)
        for site in sweeping.find_sites(ops.calls, Path("/RUN"))
        for kind in sweeping.KINDS.get(site.op, ("EIO",))
    ]
    if most is not None:
        plans = _dice().sample(plans, most)
    struck: Counter[str] = Counter()
    faults, missed = [], 0
    for site, kind in plans:
        wrong = _once(base, folder / "it", whole, site, kind)
        if wrong is None:
            missed += 1  # an operation that two threads make in one order or the other, or not
            continue
        struck[f"{kind} at {site.op}"] += 1
        faults += [f"{kind} at {site}: {text}" for text in wrong]
    print(f"{struck.total()} faults of {len(struck)} kinds struck, {missed} weren't come to")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])
    assert missed <= len(plans) // 20
    for what, times in sorted(struck.items()):
        record_fault("Storage", f"{what}, once, at each call in turn", times, "training goes on")


@pytest.mark.timeout(300)
def test_an_operation_that_fails_once_costs_no_point_no_loss_and_leaves_nothing(
    base: Path, unbroken: tuple[Result, RecordingOps], tmp_path: Path
) -> None:
    """Cases 4 and 44: a sample of all operations; an opening that fails ends with an error."""
    _sweep_once(base, tmp_path, unbroken, 30)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_operation_that_fails_once_costs_no_point_no_loss_and_leaves_nothing(
    base: Path, unbroken: tuple[Result, RecordingOps], tmp_path: Path
) -> None:
    _sweep_once(base, tmp_path, unbroken, None)


def _sweep_lasting(
    base: Path, folder: Path, unbroken: tuple[Result, RecordingOps], kind: str, most: int | None
) -> None:
    whole, ops = unbroken
    instants = range(sum(sweeping.is_refused(call, kind) for call in ops.calls) - 2)
    chosen = instants if most is None else sorted(_dice().sample(instants, most))
    faults, struck = [], 0
    for nth in chosen:
        run = copy_run(base, folder / "it")
        broken = Broken(kind, nth)
        result = attempt(run, broken)
        assert broken.struck, f"nothing was refused from change {nth} on"
        struck += 1
        fails = kind in {"EROFS", "EIO"}
        wrong = judge(run, result, whole, kind, removals_fail=fails)
        wrong += judge_next(run, attempt(run), whole)
        faults += [f"{kind} from change {nth} on: {text}" for text in wrong]
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])
    record_fault(
        "Storage",
        f"{kind} for good, from each change on in turn",
        struck,
        "training goes on, the last save says what failed",
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sweeping.LASTING)
def test_a_disk_that_fails_for_good_at_any_instant_ends_no_training_and_loses_no_point(
    kind: str, base: Path, unbroken: tuple[Result, RecordingOps], tmp_path: Path
) -> None:
    """Cases 4 and 44: full, over its quota, read-only, dead."""
    _sweep_lasting(base, tmp_path, unbroken, kind, 4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", sweeping.LASTING)
def test_a_disk_that_fails_for_good_at_every_instant_ends_no_training_and_loses_no_point(
    kind: str, base: Path, unbroken: tuple[Result, RecordingOps], tmp_path: Path
) -> None:
    _sweep_lasting(base, tmp_path, unbroken, kind, None)


def test_a_disk_that_refuses_to_read_is_not_taken_for_another_directory(
    base: Path, tmp_path: Path
) -> None:
    run = copy_run(base, tmp_path / "it")
    ops = sweeping.once(run, Site("preadv", "/run.json", 2), "EIO")
    result = attempt(run, ops)
    assert ops.struck == 1
    assert isinstance(result.error, StorageError)
    assert "Could not read" in str(result.error)
    assert "[EIO]" in str(result.error)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("sync_secs", "step_secs"),
    [(3.0, 0.01), pytest.param(60.0, 0.4, marks=pytest.mark.slow)],
)
def test_a_sync_that_takes_many_steps_holds_up_no_step_until_the_next_save(
    sync_secs: float, step_secs: float, ranks: int, tmp_path: Path
) -> None:
    """Case 30."""
    options = Options(
        run_dir=str(tmp_path / "run"),
        out=str(tmp_path / "out"),
        until=10**6,
        every=300,
        step_secs=step_secs,
        settings={"deadline_secs": 60.0 + sync_secs, "keep_last": None},
        limit_secs=20.0 + sync_secs,
    )
    slow = Fault("fsync", "*.shard", delay_secs=sync_secs)
    victim = ranks - 1
    with Job(options, ranks=ranks, faults={victim: [slow]}) as job:
        job.wait_for_step(3)
        job.send(signal.SIGUSR1)
        job.wait_until(lambda: job.strikes(victim))
        step = job.step()
        job.wait_for_step(step + 10)
        assert generations(options) == [], "the save was over before ten steps were"
        job.wait_until(lambda: generations(options), timeout_secs=60.0 + sync_secs)
        job.send(signal.SIGTERM)
        assert job.wait(60.0 + sync_secs) == [0] * ranks, job.stderr()
    (answer, last) = generations(options)
    assert answer <= step < last == final(options)["step"]
    record_fault(
        "Storage",
        f"an fsync that takes {sync_secs:g} s beside steps of {step_secs:g} s, {ranks} rank(s)",
        1,
        "steps go on",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_every_sync_is_slow_none_is_made_by_the_thread_that_trains(tmp_path: Path) -> None:
    """Case 30: of files and directories, saves by the cadence; the steps go on beside all of them.

    A step waits for syncs at most where the save before isn't committed yet.
    """
    run, every = tmp_path / "run", 100
    ops = FaultyOps(*(Fault(op, "*", times=None, delay_secs=0.5) for op in ("fsync", "fdatasync")))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    made: list[int] = []
    num_beside = 0
    with (
        use_ops(ops),
        dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, every=every) as ckpt,
    ):
        store = GenerationStore(run)
        for step in ckpt.steps(2 * every + 50):
            made.append(ops.struck)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            ckpt.record(loss=1.0)
            time.sleep(0.1)
            num_beside += step > every and every not in store.steps()
    assert store.steps() == [every, 2 * every, 2 * every + 50]
    # From the first body to the last: before and behind them nothing trains.
    struck = ops.strikes[made[0] : made[-1]]
    assert [call for call in struck if call.thread == threading.main_thread().name] == []
    folders = [call for call in struck if call.path.endswith("/checkpoints")]
    assert len(struck) > 10
    assert folders
    assert num_beside > 10, "no step was made beside the syncs of a save"
    what = "every sync of a file or a directory takes 0.5 s"
    record_fault("Storage", what, len(struck), "none of them on the thread that trains")
