"""Killed at each operation of a save, with slow or damaged storage: one point is always whole."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.faulty_ops import Call, Fault
from helpers.reliability import record_fault
from helpers.sweeping import Site, find_sites
from helpers.trainers import Job, check_epochs, consumed, final, generations, temporary, train
from helpers.training import Options

KILLED = -signal.SIGKILL
CHANGES = {
    *("fallocate", "fchmod", "fdatasync", "fsync", "ftruncate", "link", "mkdir", "open"),
    *("pwrite", "rename", "rmdir", "unlink"),
}


def _options(folder: Path, until: int, **settings: object) -> Options:
    return Options(
        run_dir=str(folder / "run"),
        out=str(folder / "out"),
        until=until,
        every=4,
        settings=dict(settings),
    )


def _copy(options: Options, folder: Path, until: int) -> Options:
    """Return options for a copy of a run and of what the script wrote so far."""
    shutil.copytree(options.run_dir, folder / "run")
    shutil.copytree(options.out, folder / "out")
    return replace(
        options, run_dir=str(folder / "run"), out=str(folder / "out"), until=until, every=4
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A run with generations of steps 4, 8 and 12."""
    options = _options(tmp_path_factory.mktemp("base"), 12)
    train(options)
    return options


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A run that nothing happened to, of 16 steps."""
    options = _options(tmp_path_factory.mktemp("whole"), 16)
    train(options)
    return options


def _check_whole(options: Options) -> list[int]:
    """Each generation that has its name reads back, every byte; return their steps."""
    store = GenerationStore(Path(options.run_dir))
    for step in store.steps():
        store.verify(store.manifest(step))
    return store.steps()


def _events(options: Options, event: str) -> list[dict[str, object]]:
    return [item for item in read_journal(options.run_dir) if item["event"] == event]


# Damage ----------------------------------------------------------------------------------------


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        data[len(data) // 2] ^= 1
    kept = {"empty": b"", "halve": data[: len(data) // 2], "flip": data, "zero": bytes(len(data))}
    if how != "drop":
        path.write_bytes(bytes(kept[how]))


@pytest.mark.parametrize("how", ["empty", "halve", "zero", "flip", "drop"])
@pytest.mark.parametrize(
    "name", ["rank_00000.shard", "rank_00000.state", "resume_point.json", ".snapshot_metadata"]
)
def test_two_damaged_generations_are_skipped_said_and_set_aside(
    name: str, how: str, base: Options, whole: Options, tmp_path: Path
) -> None:
    """Case 1: the newest usable one is resumed, what was skipped and why is journalled."""
    options = _copy(base, tmp_path, 16)
    for step in (8, 12):
        _damage(Path(options.run_dir) / f"checkpoints/step_{step:06d}" / name, how)
    job = train(options)
    assert [event["step"] for event in _events(options, "resumed")] == [4]
    skipped = _events(options, "skipped")
    assert [event["step"] for event in skipped] == [12, 8]
    assert all(event["reason"] for event in skipped)
    for step in (8, 12):
        assert f"step {step} can't be used" in job.stderr()
        aside = Path(options.run_dir) / "archive" / f"faulty_{step:06d}" / f"step_{step:06d}"
        assert aside.is_dir()
    assert final(options) == final(whole)
    assert consumed(options) == consumed(whole)
    assert _check_whole(options) == [8, 12, 16]
    record_fault("Bad bytes", f"{name}: {how}, in the two newest points", 2, "skipped and said")


@pytest.mark.parametrize("how", ["empty", "halve", "zero", "flip", "drop"])
def test_a_damaged_verified_json_makes_a_generation_unverified_not_unusable(
    how: str, base: Options, tmp_path: Path
) -> None:
    """Case 1, the file that is written last."""
    options = _copy(base, tmp_path, 12)
    _damage(Path(options.run_dir) / "checkpoints/step_000012/verified.json", how)
    train(options)
    assert [event["step"] for event in _events(options, "resumed")] == [12]
    assert _events(options, "verified")[-1]["step"] == 12
    assert GenerationStore(Path(options.run_dir)).verified_at(12) is not None


def test_a_generation_that_lacks_the_shard_of_one_rank_is_skipped(tmp_path: Path) -> None:
    """Case 3: the highest number is no proof of anything."""
    options = _options(tmp_path, 8)
    train(options, ranks=2)
    (Path(options.run_dir) / "checkpoints/step_000008/rank_00001.shard").unlink()
    train(replace(options, until=9), ranks=2)
    assert [event["step"] for event in _events(options, "resumed")] == [4]
    (skipped,) = _events(options, "skipped")
    assert skipped["step"] == 8
    assert "rank_00001.shard is missing" in str(skipped["reason"])


def test_without_any_usable_generation_the_job_ends_and_says_what_it_found(
    base: Options, tmp_path: Path
) -> None:
    """Case 1: it never starts anew by itself, over a run of 12 steps."""
    options = _copy(base, tmp_path, 16)
    for step in (4, 8, 12):
        _damage(Path(options.run_dir) / f"checkpoints/step_{step:06d}/rank_00000.shard", "empty")
    with Job(options) as job:
        assert job.wait() == [1]
        assert "None of the 3 generations" in job.stderr()
        assert "step_000012.bin is whole: `dist-ckpt import " in job.stderr()
    assert generations(options) == [4, 8, 12]


# Kills -----------------------------------------------------------------------------------------


def _changes(base: Options, folder: Path) -> list[Site]:
    """Return which operations of an attempt from step 12 to 16 change something on the disk."""
    options = replace(_copy(base, folder, 16), settings={"keep_last": 1})
    every_call = Fault("*", "*/run*", times=None)
    strikes = train(options, faults={0: [every_call]}).strikes()
    calls = [Call(strike["call"]["op"], strike["call"]["path"]) for strike in strikes]
    sites = find_sites(calls, Path(options.run_dir))
    return [site for site in sites if site.op in CHANGES]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stride", [1])
def test_killed_at_every_operation_there_is_a_usable_generation(
    stride: int, base: Options, tmp_path: Path
) -> None:
    _sweep(base, tmp_path, stride)


@pytest.mark.parametrize("stride", [30])
def test_killed_at_any_operation_with_keep_last_1_there_is_a_usable_generation(
    stride: int, base: Options, tmp_path: Path
) -> None:
    """Cases 2 and 31: each step of saving, committing, verifying, exporting and retiring."""
    _sweep(base, tmp_path, stride)


def _kill_at(site: Site, base: Options, folder: Path) -> Options | None:
    """Return a run whose attempt was killed there; None where it never came to that operation."""
    options = replace(_copy(base, folder, 16), settings={"keep_last": 1})
    fault = replace(site.fault(Path(options.run_dir), "EIO"), error=None, kill=True)
    with Job(options, faults={0: [fault]}) as job:
        status = job.wait()
        if not job.strikes():
            assert status == [0], job.stderr()
            shutil.rmtree(folder)
            return None
        assert status == [KILLED]
        assert len(job.strikes()) == 1
    return options


def _sweep(base: Options, tmp_path: Path, stride: int) -> None:
    changes = _changes(base, tmp_path / "count")
    unbroken = _copy(base, tmp_path / "unbroken", 16)
    train(unbroken)
    chosen = changes[time.time_ns() % stride :: stride]
    struck: list[Site] = []
    for site in chosen:
        folder = tmp_path / "kill"
        # Two threads make them, so an attempt may happen to make one less.
        options = _kill_at(site, base, folder) or _kill_at(site, base, folder)
        if options is None:
            continue
        struck.append(site)
        assert _check_whole(options), f"nothing is left after a kill at {site}"
        train(options)
        assert final(options) == final(unbroken), site
        assert temporary(options) == []
        assert _check_whole(options) == [16]
        shutil.rmtree(folder)
    missed = [site for site in chosen if site not in struck]
    print(f"killed at {len(struck)} of {len(changes)} operations, not come to: {missed}")
    assert len(missed) <= 1 + len(chosen) // 50
    assert len({site.op for site in struck}) > (6 if stride == 1 else 1)
    what = "SIGKILL at operations of an attempt, keep_last=1"
    record_fault("Kill", what, len(struck), "one is left")


@pytest.mark.parametrize("short_bytes", [512, 4096, 12288, 65536])
def test_killed_within_a_write_the_final_name_is_always_whole(
    short_bytes: int, tmp_path: Path
) -> None:
    """Case 2: SIGKILL at many byte counts."""
    options = replace(_options(tmp_path, 12), width=1024)
    faults = [
        Fault("pwrite", "*.shard", nth=2, short_bytes=short_bytes),
        Fault("pwrite", "*.shard", nth=3, kill=True),
    ]
    with Job(options, faults={0: faults}) as job:
        assert job.wait() == [KILLED]
        assert len(job.strikes()) == 2
    assert _check_whole(options) == [4]
    assert len(temporary(options)) == 1
    job = train(options)
    assert temporary(options) == []
    assert "left by an interrupted save" in job.stderr()
    assert _check_whole(options) == [4, 8, 12]


def test_a_slow_writer_killed_in_mid_save_leaves_the_previous_point_intact(tmp_path: Path) -> None:
    """Case 30: the grace of whoever stops the job is over before the save is."""
    options = replace(_options(tmp_path, 8), step_secs=0.01)
    slow = Fault("pwrite", "*.shard", nth=2, times=None, delay_secs=30.0)
    with Job(options, faults={0: [slow]}) as job:
        job.wait_until(job.strikes)
        job.send(signal.SIGTERM)
        time.sleep(0.1)
        assert job.poll() is None
        job.send(signal.SIGKILL)
        assert job.wait() == [KILLED]
    assert _check_whole(options) == [4]
    train(replace(options, step_secs=0.0))
    check_epochs(options)
    assert _check_whole(options) == [4, 8]


# Resumes ---------------------------------------------------------------------------------------


def test_three_resumes_repeat_no_batch_and_leave_none_out(whole: Options, tmp_path: Path) -> None:
    """Cases 11 to 14: cut three times in the middle of epochs, all seeds given anew each time."""
    options = _options(tmp_path, 16)
    for until in (3, 8, 13, 16):
        train(replace(options, until=until))
    assert final(options) == final(whole)
    assert consumed(options) == consumed(whole)
    check_epochs(options)
    assert [event["step"] for event in _events(options, "resumed")] == [3, 8, 13]


@pytest.mark.parametrize("left_out", ["optimizer", "rng", "data", "scheduler"])
def test_a_resume_equals_the_uninterrupted_run_and_one_that_lacks_a_part_does_not(
    left_out: str, base: Options, whole: Options, tmp_path: Path
) -> None:
    """Case 16, the three-way check: uninterrupted = resumed ≠ cold."""
    resumed = _copy(base, tmp_path / "resumed", 16)
    train(resumed)
    assert final(resumed) == final(whole)
    cold = _copy(base, tmp_path / "cold", 16)
    shutil.rmtree(cold.out)
    train(cold, env={"DIST_CKPT_OMIT_RESTORE": left_out})
    assert final(cold) != final(whole)


def test_steps_above_999999_are_numbers_not_text(base: Options, tmp_path: Path) -> None:
    """Cases 5 and 7: steps 9900 and 10000; times of change are reversed and equal."""
    options = _copy(base, tmp_path, 16)
    folder = Path(options.run_dir) / "checkpoints"
    for number, step in enumerate((12, 8, 4)):
        for path in (folder / f"step_{step:06d}").iterdir():
            os.utime(path, (number, number))
        os.utime(folder / f"step_{step:06d}", (number, number))
    train(options)
    assert [event["step"] for event in _events(options, "resumed")] == [12]
    assert [event["step"] for event in _events(options, "retired")] == [4]
