"""Journal and metrics: one JSON object a line, whole whatever a crash left."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt import storage
from dist_ckpt.errors import UsageError
from dist_ckpt.history import Journal, Metrics, parse_journal, parse_metrics, read_journal
from dist_ckpt.history._lines_file import end_of_step

LINE = b'{"time": 1.5, "attempt": 1, "event": "started", "step": null}\n'
SECOND = b'{"time": 2.5, "attempt": 1, "event": "saved", "step": 100}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.journal.jsonl"


class SyncCount(storage.Ops):
    def __init__(self) -> None:
        self.writes = 0
        self.syncs = 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:  # type: ignore[override]
        self.writes += 1
        return super().pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        super().fdatasync(fd)


def test_an_event_is_one_line_by_one_write_and_durable_when_asked(path: Path) -> None:
    ops = SyncCount()
    with storage.use_ops(ops):
        journal = Journal.open(path, attempt=3)
        journal.append("saved", step=100, path=Path("a\nb"), size_bytes=np.int64(5))
        assert (ops.writes, ops.syncs) == (1, 1)
        journal.append("note", sync=False, loss=math.nan, values=(1, -math.inf))
        assert (ops.writes, ops.syncs) == (2, 1)
        journal.close()
    first, second = path.read_bytes().splitlines()
    event = json.loads(first)
    assert list(event) == ["time", "attempt", "event", "step", "path", "size_bytes"]
    assert event["attempt"] == 3
    assert event["path"] == "a\nb"
    assert event["size_bytes"] == 5
    assert json.loads(second, parse_constant=pytest.fail)["values"] == [1, "-inf"]
    assert json.loads(second)["step"] is None


def test_a_field_that_every_line_has_is_refused(path: Path) -> None:
    journal = Journal.open(path, attempt=1)
    with pytest.raises(UsageError, match="time"):
        journal.append("saved", time=3.0)
    journal.close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("kept", range(len(SECOND)))
@pytest.mark.parametrize("tail", [b"", b"\0" * 50])
def test_a_torn_last_line_is_repaired_on_opening(path: Path, kept: int, tail: bytes) -> None:
    torn = LINE + SECOND[:kept] + tail
    path.write_bytes(torn)
    whole = kept == len(SECOND) - 1
    if not (whole and tail):
        assert read_journal(path) == parse_journal(LINE + SECOND if whole else LINE)
    journal = Journal.open(path, attempt=2)
    assert journal.repaired == (len(tail) if whole else kept + len(tail))
    journal.append("started")
    journal.close()
    data = path.read_bytes()
    assert data.startswith(LINE + SECOND if whole else LINE)
    assert [event["attempt"] for event in read_journal(path)] == ([1, 1, 2] if whole else [1, 2])


def test_a_damaged_line_in_the_middle_is_reported_and_the_rest_read() -> None:
    events = parse_journal(LINE + b"\0" * 40 + b"\n" + SECOND)
    assert [event["event"] for event in events] == ["started", "unreadable", "saved"]
    assert (events[1]["line"], events[1]["num_bytes"]) == (2, 40)


def test_old_lines_stay_a_prefix_through_attempts(path: Path) -> None:
    before = b""
    for attempt in range(4):
        journal = Journal.open(path, attempt)
        journal.append("started")
        journal.close()
        assert path.read_bytes().startswith(before)
        before = path.read_bytes()
    assert [event["attempt"] for event in read_journal(path)] == [0, 1, 2, 3]


def test_threads_do_not_mix_their_lines(path: Path) -> None:
    journal = Journal.open(path, attempt=1)

    def work(name: int) -> None:
        for number in range(200):
            journal.append("tick", step=number, sync=False, name=name, filler="x" * name * 40)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    events = read_journal(path)
    assert len(events) == 800
    for name in range(4):
        assert [e["step"] for e in events if e["name"] == name] == list(range(200))


def test_a_metric_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "run.metrics.jsonl"
    metrics = Metrics.open(path)
    metrics.append(1, {"lr": 0.1, "norm": math.inf, "acc": np.float32(math.nan), "n": 3})
    metrics.append(2, {"lr": 0.05})
    metrics.close()
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()
    )
    assert first["lr"] == 0.1
    assert first["norm"] is None
    assert first["nonfinite"] == {"norm": "inf", "acc": "nan"}
    assert first["n"] == 3
    assert second == {"step": 2, "lr": 0.05}


@pytest.mark.parametrize("name", ["step", "nonfinite", "cut"])
def test_a_metric_called_as_the_file_needs_itself_is_refused(tmp_path: Path, name: str) -> None:
    metrics = Metrics.open(tmp_path / "run.metrics.jsonl")
    with pytest.raises(UsageError, match=name):
        metrics.append(1, {name: 1.0})
    metrics.close()


def test_metrics_are_read_as_the_losses_are(tmp_path: Path) -> None:
    path = tmp_path / "run.metrics.jsonl"
    metrics = Metrics.open(path)
    for step in (1, 2, 3, 4, 3):
        metrics.append(step, {"a": 1})
    assert [line["step"] for line in parse_metrics(path.read_bytes())] == [1, 2, 3]
    metrics.cut(2)
    assert [line["step"] for line in parse_metrics(path.read_bytes())] == [1, 2]
    assert metrics.steps_after(1) == {2}
    metrics.close()


def test_only_events_whose_lines_name_a_word_are_read_and_a_torn_end_is_passed_over() -> None:
    lines = [
        b'{"event": "saved", "step": 1, "id": "a1"}\n',
        b'{"event":"resumed","id":"a1"}\n',
        b"half of an event saved\n",
        b'{"event": "saved", "step": 2, "id": "b2"}\n',
        b'{"event": "saved", "st',
    ]
    data = b"".join(lines)
    assert [event["event"] for event in parse_journal(data, naming=("resumed",))] == ["resumed"]
    found = parse_journal(data, naming=("a1", "b2"))
    assert [(event["event"], event["step"]) for event in found] == [
        ("saved", 1),
        ("resumed", None),
        ("saved", 2),
    ]
    named = parse_journal(data, naming=("saved",))
    assert [event["event"] for event in named] == ["saved", "unreadable", "saved"]
    assert named[1]["line"] == 3
    assert parse_journal(data, naming=("rewound",)) == []
    assert len(parse_journal(data)) == 4


@pytest.mark.parametrize(
    ("data", "step", "behind"),
    [
        (b"[\n[1, 0.5],\n[2, 0.5],\n[3, 0.5]]", 2, b"[3, 0.5]]"),
        (b"[\n[1, 0.5],\n[2, 0.5],\n[3, 0.5]]", 0, b"[1, 0.5],\n[2, 0.5],\n[3, 0.5]]"),
        (b"[\n[1, 0.5],\n[2, 0.5],\n[3, 0.5]]", 3, b""),
        (b"[\n[1, 0.5],\n[4, 0.5],\n[2, 0.5],\n[3, 0.5]]", 2, b"[3, 0.5]]"),
        (b"[]", 0, b""),
        (b"", 0, b""),
        (b"[[1, 0.5], [2, 0.5]]", 0, b""),
        (
            b'{"step": 1, "lr": 2}\n{"step": 4}\n{"step": 2, "cut": true}\n{"step": 3}\n',
            2,
            b'{"step": 3}\n',
        ),
        (b'{"step": 5, "lr": 2}\n{"step": 6}\n', 4, b'{"step": 5, "lr": 2}\n{"step": 6}\n'),
        (b'{"step": 5}\ndamaged\n{"step": 6}\n', 4, b'{"step": 6}\n'),
    ],
)
def test_the_lines_at_the_end_that_are_of_later_steps(
    data: bytes, step: int, behind: bytes
) -> None:
    first = end_of_step(data, step)
    assert data[first:] == behind
    assert end_of_step(data, step, at_most=0) == len(data)
    assert first <= end_of_step(data, step, at_most=1) <= len(data)
