"""The history of a run through crashes, replays and rewinds, as its readers see it."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, NotFoundError, StorageError
from dist_ckpt.history import (
    History,
    NullHistory,
    ReplayResult,
    read_history,
    read_journal,
    read_loss,
    read_loss_raw,
    read_metrics,
    read_samples,
    replay_summary,
    replays_until,
    run_name,
)
from helpers.faulty_ops import Fault, FaultyOps


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "andrea"
    path.mkdir()
    return path


def loss_of(step: int) -> float:
    return 3.0 / (step + 0.1)


def train(
    run_dir: Path,
    attempt: int,
    *,
    resumed: int | None,
    until: int,
    noise: dict[int, float] | None = None,
) -> ReplayResult | None:
    with History(run_dir, run_dir.name, attempt) as history:
        history.begin(resumed)
        for step in range((resumed or 0) + 1, until + 1):
            history.record(step, (noise or {}).get(step, loss_of(step)), {"lr": 0.1 / step})
    return history.replay


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run_dir) if event["event"] == name]


def loss_bytes(run_dir: Path) -> bytes:
    return (run_dir / "andrea.loss.json").read_bytes()


def test_a_run_leaves_four_files_private_to_the_user(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=2)
    names = ["journal.jsonl", "loss.json", "metrics.jsonl", "samples.json"]
    assert sorted(os.listdir(run_dir)) == [f"andrea.{name}" for name in names]
    assert {path.stat().st_mode & 0o077 for path in run_dir.iterdir()} == {0}


def test_resuming_twice_keeps_old_bytes_and_one_entry_a_step(run_dir: Path) -> None:
    """Case 41: resume wipes the metrics file."""
    before = {path.name: b"" for path in run_dir.iterdir()}
    for attempt, (resumed, until) in enumerate([(None, 8), (5, 12), (10, 15)], start=1):
        train(run_dir, attempt, resumed=resumed, until=until)
        for name, data in before.items():
            now = (run_dir / name).read_bytes()
            assert now.startswith(data[:-1] if name.endswith(".json") else data)
        before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert read_loss(run_dir) == [(step, loss_of(step)) for step in range(1, 16)]
    assert read_loss_raw(run_dir) == read_loss(run_dir)
    assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, 16))
    assert len((run_dir / "andrea.metrics.jsonl").read_bytes().splitlines()) == 15


def test_a_replay_that_agrees_is_counted_and_not_written_again(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=8)
    before = loss_bytes(run_dir)
    with History(run_dir, "andrea", 2) as history:
        history.begin(5)
        for step in (6, 7, 8):
            assert history.replay is None
            history.record(step, loss_of(step), {})
        assert loss_bytes(run_dir) == before
        assert history.replay is not None  # journalled when the window ends, not at the close
        assert len(events(run_dir, "replayed")) == 1
        history.record(9, loss_of(9), {})
    (event,) = events(run_dir, "replayed")
    assert (event["agreed"], event["of"], event["first_difference"]) == (3, 3, None)
    (result,) = replay_summary(read_journal(run_dir))
    assert result == history.replay
    assert result.all_agreed
    assert result.complete


def test_a_replayed_step_renews_the_time_of_the_loss_file_once_a_second(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_dir, 1, resumed=None, until=9)
    loss = run_dir / "andrea.loss.json"
    os.utime(loss, (1.0, 1.0))
    before = loss_bytes(run_dir)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with History(run_dir, "andrea", 2) as history:
        os.utime(loss, (1.0, 1.0))
        history.begin(5)
        ops = FaultyOps(Fault("utime", nth=2, error="EPERM"))
        with storage.use_ops(ops):
            for step in (6, 7):
                history.record(step, loss_of(step), {})
            assert loss.stat().st_mtime > 1.0
            assert len(ops.of("utime", "andrea.loss.json")) == 1
            clock[0] += 1.0
            history.record(8, loss_of(8), {})  # no error of it gets through
            assert (len(ops.of("utime")), ops.struck) == (2, 1)
            clock[0] += 1.0
            history.record(9, 0.5, {})  # differs: it is written, which has a time of its own
            assert len(ops.of("utime")) == 2
    assert loss_bytes(run_dir).startswith(before[:-1])
    assert history.replay is not None
    assert history.replay.agreed == 3


def test_the_journal_tells_up_to_where_lost_steps_are_computed_again() -> None:
    begun = {"event": "resumed", "step": 5, "replays_until": 8}
    assert replays_until([]) is None
    assert replays_until([begun, {"event": "saved", "step": 6}]) == 8
    assert replays_until([{"event": "fresh_start", "replays_until": 3}]) == 3
    for over in ("replayed", "history_cut", "resumed"):
        assert replays_until([begun, {"event": over, "step": 8}]) is None
    assert replays_until([{**begun, "replays_until": [8]}]) is None


@pytest.mark.parametrize("first", [6, 7, 8])
def test_from_the_first_difference_on_a_replay_is_written(run_dir: Path, first: int) -> None:
    train(run_dir, 1, resumed=None, until=8)
    other = math.nextafter(loss_of(first), math.inf)  # one bit
    result = train(run_dir, 2, resumed=5, until=7 if first < 8 else 8, noise={first: other})
    assert result is not None
    assert (result.agreed, result.num_logged, result.first_difference) == (first - 6, 3, first)
    assert result.complete
    assert not result.all_agreed
    (event,) = events(run_dir, "replay_differs")
    assert (event["step"], event["logged"], event["replayed"]) == (first, loss_of(first), other)
    assert dict(read_loss(run_dir))[first] == other
    assert read_loss(run_dir)[-1][0] == (7 if first < 8 else 8)
    assert len(read_loss_raw(run_dir)) == 8 + (8 - first if first < 8 else 1)


def test_negative_zero_is_not_zero_to_a_replay(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=2, noise={2: 0.0})
    result = train(run_dir, 2, resumed=1, until=2, noise={2: -0.0})
    assert result is not None
    assert result.first_difference == 2


def test_a_replay_that_stops_inside_its_window_says_so_and_keeps_the_tail(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=8)
    result = train(run_dir, 2, resumed=5, until=6)
    assert result is not None
    assert (result.agreed, result.num_logged, result.complete) == (1, 3, False)
    assert not result.all_agreed
    assert read_loss(run_dir)[-1][0] == 8


def test_a_run_without_a_resume_point_replays_from_the_start(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=3)
    result = train(run_dir, 2, resumed=None, until=4)
    assert result is not None
    assert (result.agreed, result.num_logged, result.resumed_step) == (3, 3, 0)
    assert [step for step, _ in read_loss_raw(run_dir)] == [1, 2, 3, 4]


def test_nothing_to_replay_is_nothing_to_report(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=5)
    assert train(run_dir, 2, resumed=5, until=6) is None
    assert events(run_dir, "replayed") == []


def test_a_nan_loss_is_logged_flagged_and_replayed(run_dir: Path) -> None:
    """Case 50: a NaN in a metric blocks every later checkpoint."""
    odd = {2: math.nan, 3: math.inf, 4: -math.inf}
    train(run_dir, 1, resumed=None, until=5, noise=odd)
    data = loss_bytes(run_dir)
    json.loads(data, parse_constant=pytest.fail)
    assert [loss for _, loss in read_loss(run_dir)][1:4] == [None, None, None]
    kinds = [(event["step"], event["kind"]) for event in events(run_dir, "loss_not_finite")]
    assert kinds == [(2, "nan"), (3, "inf"), (4, "-inf")]
    result = train(run_dir, 2, resumed=1, until=5, noise=odd)
    assert result is not None
    assert result.all_agreed
    assert loss_bytes(run_dir) == data
    result = train(run_dir, 3, resumed=1, until=5, noise=odd | {3: math.nan})
    assert result is not None
    assert result.first_difference == 3
    assert events(run_dir, "replay_differs")[0]["logged"] == "inf"


def test_after_a_rewind_the_history_ends_where_the_run_is(run_dir: Path) -> None:
    """Case 52: rolled back 500 steps, the abandoned tail still shows as history."""
    train(run_dir, 1, resumed=None, until=900)
    before = loss_bytes(run_dir)
    with History(run_dir, "andrea", 2) as history:
        history.cut(400)
        assert read_loss(run_dir)[-1] == (400, loss_of(400))
        history.begin(400)
        for step in range(401, 501):
            history.record(
                step, loss_of(step), {"lr": 1.0}
            )  # the same values, written all the same
    canonical = read_loss(run_dir)
    assert canonical == [(step, loss_of(step)) for step in range(1, 501)]
    assert loss_bytes(run_dir).startswith(before[:-1])
    assert len(read_loss_raw(run_dir)) == 900 + 1 + 100
    assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, 501))
    assert events(run_dir, "history_cut")[0]["anchor_step"] == 400
    assert train(run_dir, 3, resumed=450, until=510) is not None
    assert read_loss(run_dir)[-1][0] == 510


def test_a_rewind_to_a_step_that_was_not_logged_repeats_the_one_before(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        for step in (10, 20, 30):
            history.record(step, float(step), {})
        history.cut(25)
    assert read_loss(run_dir) == [(10, 10.0), (20, 20.0)]


def test_a_rewind_to_zero_is_marked_in_the_journal(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        for step in (5, 6, 7):
            history.record(step, float(step), {"a": 1})
            history.sample(step, "text", 1.0)
        history.cut(0)
        before = loss_bytes(run_dir)
    assert read_loss(run_dir) == []
    assert read_samples(run_dir) == []
    assert read_metrics(run_dir) == []
    assert len(read_loss_raw(run_dir)) == 3
    with History(run_dir, "andrea", 2) as history:
        history.begin(0)
        history.record(8, 8.0, {})
        history.sample(8, "text", None)
        assert history.replay is None
    assert loss_bytes(run_dir).startswith(before[:-1])
    assert read_loss(run_dir) == [(8, 8.0)]
    assert [sample["step"] for sample in read_samples(run_dir)] == [8]


def test_a_mark_that_damage_outlived_does_not_void_new_entries(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        for step in (5, 6, 7):
            history.record(step, float(step), {})
        history.cut(0)
    (run_dir / "andrea.loss.json").write_bytes(b"[\n[5, 5.0]]")
    with History(run_dir, "andrea", 2) as history:
        history.begin(0)
        history.record(1, 1.0, {})
    assert read_loss(run_dir) == [(1, 1.0)]


def test_a_rewind_past_the_end_changes_no_loss(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=5)
    before = loss_bytes(run_dir)
    with History(run_dir, "andrea", 2) as history:
        history.cut(5)
    assert loss_bytes(run_dir) == before


def test_a_repair_is_journalled_and_a_long_tail_set_aside(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=100)
    path = run_dir / "andrea.loss.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + b"\0" * 20 + whole[520:])
    with History(run_dir, "andrea", 2):
        pass
    (event,) = events(run_dir, "torn_tail_cut")
    assert event["file"] == "andrea.loss.json"
    kept = (run_dir / event["kept_as"]).read_bytes()
    assert event["num_bytes"] == len(kept)
    data = path.read_bytes()
    assert data[:-1] + kept == whole[:500] + b"\0" * 20 + whole[520:]
    path.write_bytes(data[:-1] + b",\n[99, 0.")
    with History(run_dir, "andrea", 3):
        pass
    assert events(run_dir, "torn_tail_cut")[1]["cut"] == ",\n[99, 0."


class Device(storage.Ops):
    """What a device holds of some files: what was written before a sync that didn't fail."""

    def __init__(self, *paths: Path) -> None:
        self.held = {str(path): path.read_bytes() for path in paths}
        self.dirty: list[tuple[str, bytes, int]] = []
        self.written: list[bytes] = []
        self.failing: str | None = None
        self.failed: list[str] = []

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        done = super().pwrite(fd, data, offset)
        self.dirty.append((os.readlink(f"/proc/self/fd/{fd}"), bytes(data[:done]), offset))
        self.written.append(bytes(data[:done]))
        return done

    def fdatasync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        mine = [write for write in self.dirty if write[0] == path]
        self.dirty = [write for write in self.dirty if write[0] != path]
        if path == self.failing:  # the pages are taken for clean all the same, and it says so once
            self.failing = None
            self.failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)
        for _, data, offset in mine:
            held = self.held.get(path, b"").ljust(offset, b"\0")
            self.held[path] = held[:offset] + data + held[offset + len(data) :]


@pytest.mark.parametrize("what", ["loss.json", "metrics.jsonl", "samples.json"])
@pytest.mark.parametrize("resumed", [None, 5])
def test_what_a_killed_attempt_could_not_sync_is_written_anew_by_the_next(
    run_dir: Path, what: str, resumed: int | None
) -> None:
    """Replayed steps that agree aren't written again: a sync alone would succeed without them."""
    path = run_dir / f"andrea.{what}"

    def log(history: History, first: int, last: int) -> None:
        for step in range(first, last + 1):
            history.record(step, loss_of(step), {"lr": 0.1})
            history.sample(step, "text", None)

    first = (resumed or 0) + 1
    with History(run_dir, "andrea", 1) as history:
        log(history, 1, first - 1)
    durable = path.read_bytes()
    device = Device(path)
    with storage.use_ops(device):
        history = History(run_dir, "andrea", 2)
        history.begin(resumed)
        log(history, first, 9)
        device.failing = str(path)
        with pytest.raises(StorageError):
            history.sync()
        assert device.failed == [str(path)]
        history.abandon()  # killed
        assert device.held[str(path)] == durable != path.read_bytes()
        history = History(run_dir, "andrea", 3)
        assert device.held[str(path)] == durable  # its first sync told nothing
        history.begin(resumed)
        log(history, first, 9)
        assert device.dirty == []
        history.sync()
        assert device.held[str(path)] == path.read_bytes()
        history.close()


def test_what_a_rewind_voided_is_not_written_anew(run_dir: Path) -> None:
    """It was durable, and the archive tells where in the file it lies."""
    with History(run_dir, "andrea", 1) as history:
        for step in (3, 4, 5):
            history.record(step, loss_of(step), {})
            history.sample(step, "text", None)
        history.cut(2)  # to before all of them
        history.record(3, 1.5, {})
        history.sample(3, "another", None)
    paths = [run_dir / f"andrea.{what}" for what in ("loss.json", "samples.json")]
    device = Device(*paths)
    with storage.use_ops(device), History(run_dir, "andrea", 2) as history:
        history.begin(2)
        before = len(device.written)
        history.sync()
        anew = device.written[before:]
    assert anew == [b",\n[3, 1.5]]", b',\n{"step": 3, "loss": null, "text": "another"}]']


def flip(path: Path, place: bytes) -> None:
    """Damage the byte behind ``place``."""
    data = bytearray(path.read_bytes())
    at = data.index(place) + len(place)
    data[at] ^= 0x40
    path.write_bytes(data)


def test_damage_in_the_middle_is_journalled_and_told_and_the_rest_kept(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=60)
    with History(run_dir, "andrea", 2) as history:
        for step in range(61, 64):
            history.sample(step, "a text " * 20, 1.0)
        mark = history.mark(60)
    flip(run_dir / "andrea.loss.json", b"\n[5, ")
    flip(run_dir / "andrea.samples.json", b'"step": 62')
    with History(run_dir, "andrea", 3) as history:
        gap = history.gap(60, mark)
        loss, samples = history.damage
    assert gap is not None
    assert (gap.num_missing, gap.last_found) == (1, 60)
    assert [step for step, _ in read_loss(run_dir)] == [*range(1, 5), *range(6, 61)]
    assert [sample["step"] for sample in read_samples(run_dir)] == [61, 63]
    first, second = events(run_dir, "torn_tail_cut")
    assert (first["file"], first["kept_behind"]) == ("andrea.loss.json", 55)
    assert first["cut"].startswith(",\n[5, ")
    assert second["kept_behind"] == 1
    assert b"62" in (run_dir / second["kept_as"]).read_bytes()
    assert loss.startswith("andrea.loss.json was damaged: ")
    assert f"lie in {second['kept_as']}; what stood behind them is kept" in samples
    with History(run_dir, "andrea", 4) as history:
        assert history.damage == ()


def test_counts_in_the_journal_hold_after_damage_was_cut_out(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        for step in (3, 4, 5):
            history.record(step, loss_of(step), {})
        history.cut(2)  # to before all of them
        for step in (3, 4, 5, 6):
            history.record(step, 1.0 / step, {})
    flip(run_dir / "andrea.loss.json", b"\n[4, ")  # a void one
    after = [(step, 1.0 / step) for step in (3, 4, 5, 6)]
    assert read_loss(run_dir) == after
    with History(run_dir, "andrea", 2) as history:
        assert len(history.damage) == 1
        assert history.loss.entries() == after
    assert read_loss(run_dir) == after


def test_a_replay_across_a_hole_writes_what_is_missing_and_says_why(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=9)
    flip(run_dir / "andrea.loss.json", b"\n[7, ")
    result = train(run_dir, 2, resumed=5, until=10)
    assert result is not None
    assert (result.agreed, result.first_difference) == (1, 7)
    assert result.likely_cause == "the loss file has no loss of step 7"
    assert read_loss(run_dir) == [(step, loss_of(step)) for step in range(1, 11)]


def test_a_file_that_is_something_else_leaves_no_descriptor_open(run_dir: Path) -> None:
    (run_dir / "andrea.samples.json").write_bytes(b'{"not": "ours"}')
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptFileError):
        History(run_dir, "andrea", 1)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_closing_twice_does_no_harm_and_gives_all_descriptors_back(run_dir: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    history = History(run_dir, "andrea", 1)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 4
    history.close()
    history.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_step_without_a_loss_has_metrics_only(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        history.record(1, None, {"lr": 0.1})
    assert read_loss(run_dir) == []
    assert read_metrics(run_dir) == [{"step": 1, "lr": 0.1}]


class SlowSync(storage.Ops):
    """A disk whose sync takes until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def fdatasync(self, fd: int) -> None:
        self.entered.set()
        self.let_go.wait(10)
        super().fdatasync(fd)


def test_recording_goes_on_while_another_thread_syncs(run_dir: Path) -> None:
    ops = SlowSync()
    history = History(run_dir, "andrea", 1)
    history.begin(None)
    with storage.use_ops(ops):
        thread = threading.Thread(target=history.sync)
        thread.start()
        assert ops.entered.wait(10)
        for step in range(1, 51):
            history.record(step, float(step), {"a": step})
            history.sample(step, "x", None)
        assert thread.is_alive()  # the disk is still at it
        assert len(read_loss(run_dir)) == 50
        ops.let_go.set()
        thread.join(10)
        assert not thread.is_alive()
        history.close()


def test_a_reader_beside_the_writer_sees_a_beginning_of_the_history(run_dir: Path) -> None:
    history = History(run_dir, "andrea", 1)
    history.begin(None)
    done = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not done.is_set():
            losses = read_loss(run_dir)
            assert losses == [(step, loss_of(step)) for step in range(1, len(losses) + 1)]
            seen.append(len(losses))

    thread = threading.Thread(target=look)
    thread.start()
    for step in range(1, 1001):
        history.record(step, loss_of(step), {})
    while len(seen) < 2:
        time.sleep(0.01)
    done.set()
    thread.join(10)
    history.close()
    assert seen == sorted(seen)


KILLED = """
import sys
from dist_ckpt.history import History
history = History(sys.argv[1], "andrea", 1)
history.begin(None)
step = 0
while True:
    step += 1
    history.record(step, 3.0 / (step + 0.1), {"lr": 0.1})
    if step == 200:
        print("under way", flush=True)
"""


def test_a_killed_writer_leaves_a_history_that_goes_on(run_dir: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "under way\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    child.stdout.close()
    before = loss_bytes(run_dir)
    last = read_loss(run_dir)[-1][0]
    assert last >= 200
    result = train(run_dir, 2, resumed=100, until=last + 5)
    assert result is not None
    assert result.all_agreed
    assert result.agreed == last - 100
    assert loss_bytes(run_dir).startswith(before[:-1])
    assert read_loss_raw(run_dir) == [(step, loss_of(step)) for step in range(1, last + 6)]


def test_other_ranks_have_a_history_of_the_same_shape(run_dir: Path) -> None:
    null = NullHistory()
    with null:
        null.begin(3)
        null.record(4, 1.0, {"a": 1})
        null.sample(4, "text", None)
        null.cut(2)
        null.journal.append("saved", step=4, sync=True, path="x")
    shape = {name for name in dir(History) if not name.startswith("_")}
    assert shape <= set(dir(null))
    assert list(run_dir.iterdir()) == []


def test_a_renamed_run_is_read_by_the_name_of_its_files(run_dir: Path) -> None:
    train(run_dir, 1, resumed=None, until=3)
    moved = run_dir.rename(run_dir.with_name("moved"))
    assert run_name(moved) == "andrea"
    history = read_history(moved)
    assert (history.name, len(history.loss), len(history.metrics)) == ("andrea", 3, 3)
    assert history.replays == []


def test_a_run_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    for read in (read_loss, read_loss_raw, read_metrics, read_samples, read_journal, read_history):
        with pytest.raises(NotFoundError):
            read(tmp_path / "none")
    for read in (read_loss, read_loss_raw, read_metrics, read_samples, read_journal):
        with pytest.raises(NotFoundError):
            read(tmp_path)


def test_two_cuts_in_one_attempt_and_a_replay_between_attempts(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        for step in range(1, 11):
            history.record(step, float(step), {})
        history.cut(0)
        for step in range(1, 6):
            history.record(step, -float(step), {})
        history.cut(3)
    assert read_loss(run_dir) == [(1, -1.0), (2, -2.0), (3, -3.0)]
    with History(run_dir, "andrea", 2) as history:
        history.begin(1)
        history.record(2, -2.0, {})
        history.record(3, -3.0, {})
        assert history.replay is not None
        assert history.replay.all_agreed
        assert history.loss.entries() == read_loss(run_dir)
