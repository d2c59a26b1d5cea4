"""The list of finished items: exactly the finished ones, after kills, power cuts, full disks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt import Ledger, read_ledger
from dist_ckpt.errors import (
    CorruptFileError,
    LockedError,
    NotFoundError,
    StorageError,
    UsageError,
)
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps
from helpers.power_cuts import Disk, cuts
from helpers.recording import Recorder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work" / "done.jsonl"


def test_what_was_appended_is_there_when_it_is_opened_again(path: Path) -> None:
    with Ledger(path) as ledger:
        assert len(ledger) == 0
        ledger.append("a", loss=0.25)
        ledger.append("b")
        ledger.append("a", loss=9.0)  # twice does no harm
        ledger.extend(["c", "b", "d"])
        assert list(ledger.remaining(["d", "e", "a", "e", "f"])) == ["e", "f"]
    with Ledger(path) as ledger:
        assert list(ledger) == ["a", "b", "c", "d"]
        assert ledger["a"] == {"loss": 0.25}
        assert "b" in ledger
        assert "e" not in ledger
    assert read_ledger(path) == {"a": {"loss": 0.25}, "b": {}, "c": {}, "d": {}}
    assert len(path.read_text().splitlines()) == 3


def test_each_append_is_synced_before_it_returns(path: Path) -> None:
    ops = RecordingOps()
    with use_ops(ops), Ledger(path) as ledger:
        ops.calls.clear()
        ledger.append("a")
        assert [call.op for call in ops.calls] == ["pwrite", "fdatasync"]
        ops.calls.clear()
        ledger.extend(map(str, range(1000)))
        assert [call.op for call in ops.calls].count("fdatasync") == 1


def test_a_second_process_is_refused_and_a_reader_isnt(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("a")
        with pytest.raises(LockedError, match=str(os.getpid())):
            Ledger(path)
        assert list(read_ledger(path)) == ["a"]
    with Ledger(path) as ledger:
        assert "a" in ledger


@pytest.mark.parametrize("item", ["", 7, None, ("a",)])
def test_what_is_no_name_is_refused(path: Path, item: object) -> None:
    with Ledger(path) as ledger, pytest.raises(UsageError, match="isn't the name of an item"):
        ledger.append(item)  # type: ignore[arg-type]
    assert read_ledger(path) == {}


def test_facts_that_json_cant_hold_are_refused_and_nothing_is_written(path: Path) -> None:
    with Ledger(path) as ledger:
        for value in (float("nan"), object(), b"bytes"):
            with pytest.raises(UsageError, match="can't be kept"):
                ledger.append("a", value=value)
        ledger.append("b")
    assert list(read_ledger(path)) == ["b"]


def test_a_closed_ledger_says_so_and_a_missing_one_is_named(path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no ledger .*done\.jsonl"):
        read_ledger(path)
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(UsageError, match="is closed"):
        ledger.append("a")


_names = st.text(min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(items=st.lists(_names, unique=True, min_size=1, max_size=6), data=st.data())
def test_any_torn_end_leaves_exactly_the_items_before_it(
    tmp_path_factory: pytest.TempPathFactory, items: list[str], data: st.DataObject
) -> None:
    """A power cut: the last, unsynced append is lost, cut, or has holes of zeros."""
    path = tmp_path_factory.mktemp("ledger") / "done.jsonl"
    with Ledger(path) as ledger:
        for item in items[:-1]:
            ledger.append(item)
        before = path.stat().st_size
        ledger.append(items[-1])
    whole = path.read_bytes()
    tail = bytearray(whole[before:])
    cut = data.draw(st.integers(0, len(tail)), label="bytes that came")
    hole = sorted(data.draw(st.tuples(*[st.integers(0, cut)] * 2), label="hole"))
    tail[hole[0] : hole[1]] = bytes(hole[1] - hole[0])
    path.write_bytes(whole[:before] + tail[:cut] + bytes(data.draw(st.integers(0, 9), label="0s")))
    is_whole = path.read_bytes() == whole
    expected = items if is_whole else items[:-1]
    if path.read_bytes().startswith(whole):  # zeros behind a whole line
        expected = items
    assert list(read_ledger(path)) == expected
    with Ledger(path) as ledger:
        assert list(ledger) == expected
        ledger.append("next!")
    assert list(read_ledger(path)) == [*expected, "next!"]


def test_damage_before_the_last_line_is_refused_with_its_number(path: Path) -> None:
    with Ledger(path) as ledger:
        for item in "abc":
            ledger.append(item)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"b"', b'"x"'))
    for opened in (Ledger, read_ledger):
        with pytest.raises(CorruptFileError, match="line 2 isn't what was written") as caught:
            opened(path)
        assert caught.value.line == 2
    assert path.read_bytes() == data.replace(b'"b"', b'"x"')
    lines = data.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])  # taken out by hand
    with Ledger(path) as ledger:
        assert list(ledger) == ["a", "c"]


def test_a_full_disk_leaves_the_item_unfinished_and_the_file_whole(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("a")
    ops = FaultyOps(Fault("pwrite", path="done.jsonl", error="ENOSPC"))
    with use_ops(ops):
        ledger = Ledger(path)
        with pytest.raises(StorageError):
            ledger.append("b")
        assert ops.strikes
        with pytest.raises(UsageError, match="is closed"):
            ledger.append("b")
    with Ledger(path) as ledger:
        assert list(ledger) == ["a"]
        ledger.append("b")
    assert list(read_ledger(path)) == ["a", "b"]


_WORKER = """
import sys
from dist_ckpt import Ledger
with Ledger(sys.argv[1]) as ledger:
    for item in ledger.remaining(map(str, range(100_000))):
        ledger.append(item, square=int(item) ** 2)
        print(item, flush=True)
"""


def test_after_kills_at_random_instants_exactly_the_finished_items_are_there(path: Path) -> None:
    told: list[str] = []
    for _ in range(3):
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        with worker.stdout as out:
            told += [out.readline().strip() for _ in range(random.randint(1, 200))]
            worker.kill()
            told += [line.strip() for line in out if line.endswith("\n")]
        assert worker.wait() == -signal.SIGKILL
    found = list(read_ledger(path))
    # At each kill one append may have come to its end unheard; nothing else, and none twice.
    assert found == [str(number) for number in range(len(found))]
    assert set(told) <= set(found)
    assert len(set(found) - set(told)) <= 3
    assert len(told) == len(set(told))
    assert all(json.loads(line)["digest"] for line in path.read_text().splitlines())


def test_a_power_cut_at_any_instant_leaves_exactly_the_finished_items(memory: Path) -> None:
    """Names and bytes that weren't synced lost, kept, half or zeros."""
    root = memory / "root"
    root.mkdir()
    disk, recorder = Disk.read(root), Recorder(root)
    finished: list[tuple[int, list[str]]] = [(0, [])]
    with use_ops(recorder), Ledger(root / "done.jsonl") as ledger:
        for batch in (["a"], ["b", "c" * 3000, "d" * 3000], ["e"]):
            ledger.extend(batch)
            finished.append((len(recorder.events), [*finished[-1][1], *batch]))
    num_states = 0
    for number, event in enumerate(recorder.events, start=1):
        disk.do(event)
        durable = max((items for at, items in finished if at <= number), key=len)
        allowed = [items for _, items in finished if len(items) >= len(durable)][:2]
        for state in cuts(disk, random.Random(number), at_most=10):
            scratch = memory / "scratch"
            scratch.mkdir()
            state.lay(scratch)
            with Ledger(scratch / "done.jsonl") as ledger:
                assert list(ledger) in allowed, (number, event.op)
                ledger.append("z")
            assert list(read_ledger(scratch / "done.jsonl"))[:-1] in allowed
            shutil.rmtree(scratch)
            num_states += 1
    assert num_states > 20


def test_a_ledger_that_can_not_be_repaired_leaves_neither_file_nor_lock_open(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("a")
    with path.open("ab") as file:
        file.write(b'{"items"')  # torn by a crash
    before = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    ops = FaultyOps(Fault("ftruncate", path="done.jsonl", error="EIO"))
    with use_ops(ops), pytest.raises(StorageError, match="EIO"):
        Ledger(path)
    assert ops.struck == 1
    after = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    assert str(path) not in after - before
    with Ledger(path) as ledger:
        assert list(ledger) == ["a"]
