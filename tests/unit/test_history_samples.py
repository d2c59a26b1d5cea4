"""Audit samples: a JSON array at all times, read without what was voided."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.history import Samples, canonical_samples, parse_samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.samples.json"


def steps(path: Path) -> list[int]:
    return [sample["step"] for sample in json.loads(path.read_bytes())]


def test_the_file_is_valid_json_after_every_append_and_old_bytes_stay(path: Path) -> None:
    samples = Samples.open(path)
    before = path.read_bytes()
    for step, text, loss in [(1, 'a "b" ü \ud800', 2.5), (2, "]\n[", math.nan), (2, "", None)]:
        samples.append(step, text, loss)
        assert json.loads(path.read_bytes())[-1]["text"] == text
        assert path.read_bytes().startswith(before[:-1])
        before = path.read_bytes()
    samples.close()
    assert [s["loss"] for s in json.loads(before)] == [2.5, None, None]
    assert set(json.loads(before)[0]) == {"step", "loss", "text"}


def test_a_torn_append_is_repaired_on_opening(path: Path) -> None:
    whole = '[\n{"step": 1, "loss": 2.5, "text": "ü ]} \\""},\n{"step": 2, "text": "é"}]'.encode()
    first = whole.index(b",\n{")
    for kept in range(len(whole)):
        path.write_bytes(whole[:kept])
        Samples.open(path).close()
        data = path.read_bytes()
        complete = (kept >= first) + (kept >= len(whole) - 1)
        assert len(json.loads(data)) == complete
        assert whole.startswith(data[:-1])
    assert [s["text"] for s in json.loads(data)] == ['ü ]} "', "é"]


@pytest.mark.parametrize("data", [b'{"step": 1}', b'[{"text": "a"}]', b"[1]", b'[{"step": true}]'])
def test_another_file_is_refused_and_not_touched(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CorruptFileError):
        Samples.open(path)
    assert path.read_bytes() == data


def test_a_reader_beside_the_writer_passes_over_a_torn_end() -> None:
    torn = b'[\n{"step": 1},\n{"st'
    assert parse_samples(torn, path="x", torn_ok=True) == [{"step": 1}]
    with pytest.raises(CorruptFileError, match="whole up to byte"):
        parse_samples(torn, path="x")


def test_a_negative_step_is_refused(path: Path) -> None:
    samples = Samples.open(path)
    with pytest.raises(UsageError):
        samples.append(-1, "", None)
    samples.close()
    assert path.read_bytes() == b"[]"


def test_a_replayed_sample_that_comes_out_the_same_is_not_written_again(path: Path) -> None:
    samples = Samples.open(path)
    for step in (10, 20, 30):
        samples.append(step, f"text {step}", 1.0)
    samples.begin(10)
    samples.append(20, "text 20", 1.0)
    assert steps(path) == [10, 20, 30]
    samples.append(30, "another", 1.0)
    samples.append(40, "text 40", 1.0)
    assert steps(path) == [10, 20, 30, 30, 40]
    samples.close()


def test_a_sample_voids_those_of_later_steps() -> None:
    texts = [(10, "a"), (10, "b"), (20, "c"), (10, "b"), (15, "d")]
    samples = [{"step": step, "loss": None, "text": text} for step, text in texts]
    kept = [(s["step"], s["text"]) for s in canonical_samples(samples)]
    assert kept == [(10, "a"), (10, "b"), (15, "d")]


def test_a_cut_voids_later_samples_or_says_how_many_are_void(path: Path) -> None:
    samples = Samples.open(path)
    for step in (10, 20, 30):
        samples.append(step, "", None)
    assert samples.cut(30) == 0
    assert samples.cut(25) == 0
    assert steps(path) == [10, 20, 30, 20]
    assert samples.cut(5) == 4
    samples.append(7, "", None)
    assert samples.cut(6) == 5
    samples.close()
