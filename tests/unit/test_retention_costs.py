"""Retention looks at all that is kept at every save: what it has read before, it reads no more."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dist_ckpt import lifecycle
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.generations import GenerationStore, Retention
from dist_ckpt.history import Journal, OwnPoints
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps
from helpers.generating import adam_part, write_generation

PART = adam_part({"w": torch.ones(3)})
KEEP_ALL = Retention(keep_last=2, keep_every=1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def _add(store: GenerationStore, journal: Journal, step: int) -> str:
    id_ = write_generation(store.run_dir, [PART], step=step, id_=f"{step:032x}").id
    store.mark_verified(step, "test")
    journal.append("saved", step=step, id=id_)
    return id_


def test_a_generation_and_a_line_of_the_journal_are_read_once(run_dir: Path) -> None:
    store, own = GenerationStore(run_dir), OwnPoints(run_dir)
    journal = Journal.open(run_dir / "run.journal.jsonl", 1)
    for step in (1, 2, 3):
        _add(store, journal, step)
    first = lifecycle.judge(store, KEEP_ALL, own)
    assert [verdict.reason for verdict in first] == ["keep_every", "keep_last", "keep_last"]
    _add(store, journal, 4)
    with use_ops(RecordingOps()) as ops:
        verdicts = lifecycle.judge(store, KEEP_ALL, own)
    assert [verdict.reason for verdict in verdicts] == ["keep_every"] * 2 + ["keep_last"] * 2
    assert isinstance(ops, RecordingOps)
    opened = {call.path for call in ops.of("open")}
    assert {str(Path(path).parent) for path in opened if "/step_" in path} == {str(store.path(4))}
    (read,) = [call for call in ops.of("preadv") if call.path.endswith(".journal.jsonl")]
    assert read.args[-1] > 100, "the journal was read from its beginning"
    journal.close()


def test_what_changes_is_read_anew(run_dir: Path) -> None:
    store, own = GenerationStore(run_dir), OwnPoints(run_dir)
    journal = Journal.open(run_dir / "run.journal.jsonl", 1)
    journal.append("saved", step=9, id="9" * 32)
    write_generation(run_dir, [PART], step=1)
    assert [v.reason for v in lifecycle.judge(store, KEEP_ALL, own)] == ["unverified"]
    store.mark_verified(1, "test")
    assert [v.reason for v in lifecycle.judge(store, KEEP_ALL, own)] == ["other_line"]
    journal.append("saved", step=1, id=store.manifest(1).id)
    assert [v.reason for v in lifecycle.judge(store, KEEP_ALL, own)] == ["keep_last"]
    assert store.retire(1)
    assert lifecycle.judge(store, KEEP_ALL, own) == []
    # Another generation of that step, which the journal doesn't know.
    write_generation(run_dir, [PART], step=1, id_="f" * 32)
    store.mark_verified(1, "test")
    assert [v.reason for v in lifecycle.judge(store, KEEP_ALL, own)] == ["other_line"]
    # A link to it elsewhere has the same files, and isn't the run's generation any more.
    elsewhere = store.path(1).rename(run_dir / "elsewhere")
    store.path(1).symlink_to(elsewhere)
    assert [v.reason for v in lifecycle.judge(store, KEEP_ALL, own)] == ["unverified"]
    store.path(1).unlink()
    elsewhere.rename(store.path(1))
    (store.path(1) / "resume_point.json").chmod(0o600)
    (store.path(1) / "resume_point.json").write_bytes(b"{}")
    (verdict,) = lifecycle.judge(store, KEEP_ALL, own)
    assert (verdict.reason, verdict.num_bytes) == ("unverified", None)
    journal.close()


def test_the_journal_is_followed_whatever_becomes_of_it(run_dir: Path) -> None:
    path, own = run_dir / "run.journal.jsonl", OwnPoints(run_dir)
    with pytest.raises(NotFoundError):
        own.look()
    assert own.is_blank

    def line(**fields: object) -> bytes:
        return json.dumps({"event": "saved", "step": 1, **fields}).encode() + b"\n"

    path.write_bytes(line(event="attempt_started", nonce="n") + line(id="a") + line(id="b")[:-9])
    own.look()
    assert own.has("a")
    assert not own.has("b")
    assert own.has_attempt("n")
    assert not own.has_attempt(None)
    with path.open("ab") as file:
        file.write(line(id="b")[-9:] + line(id="c"))
    own.look()
    assert all(map(own.has, "abc"))
    # Put in its place anew, with other lines.
    beside = path.with_suffix(".new")
    beside.write_bytes(line(id="d") * 9)
    os.replace(beside, path)
    own.look()
    assert own.has("d")
    assert not own.has("a")
    assert not own.has_attempt("n")
    os.truncate(path, 0)
    own.look()
    assert own.is_blank
    path.unlink()
    with pytest.raises(NotFoundError):
        own.look()
    assert own.is_blank


@pytest.mark.parametrize(("op", "error"), [("open", "EMFILE"), ("preadv", "EIO"), ("lstat", "EIO")])
def test_a_journal_that_can_not_be_read_now_lets_nothing_be_retired_and_is_read_at_the_next_save(
    run_dir: Path, op: str, error: str
) -> None:
    """By names alone the copy would be the newest, and the run's own point would go."""
    store, own = GenerationStore(run_dir), OwnPoints(run_dir)
    journal = Journal.open(run_dir / "run.journal.jsonl", 1)
    _add(store, journal, 5)
    write_generation(run_dir, [PART], step=9)  # of a run of the same name, copied here
    store.mark_verified(9, "test")
    judged = lifecycle.judge(store, Retention(keep_last=1), own)
    expected = ["keep_last", "other_line"]
    assert [verdict.reason for verdict in judged] == expected
    journal.append("saved", step=7, id="7" * 32)
    ops = FaultyOps(Fault(op, "*.journal.jsonl", error=error))
    with use_ops(ops), pytest.raises(StorageError, match=error):
        lifecycle.judge(store, Retention(keep_last=1), own)
    assert ops.struck == 1
    assert own.has(store.manifest(5).id), "what was known is forgotten"
    again = lifecycle.judge(store, Retention(keep_last=1), own)
    assert own.has("7" * 32)
    assert [verdict.reason for verdict in again] == expected
    journal.close()


@pytest.mark.parametrize("name", ["verified.json", "resume_point.json"])
@pytest.mark.parametrize(("op", "error"), [("open", "EMFILE"), ("preadv", "EIO")])
def test_an_error_that_passes_leaves_a_generation_unverified_only_as_long_as_it_lasts(
    run_dir: Path, name: str, op: str, error: str
) -> None:
    store, own = GenerationStore(run_dir), OwnPoints(run_dir)
    journal = Journal.open(run_dir / "run.journal.jsonl", 1)
    _add(store, journal, 1)
    ops = FaultyOps(Fault(op, f"*/{name}", error=error))
    with use_ops(ops):
        judged = [lifecycle.judge(store, KEEP_ALL, own) for _ in range(2)]
    assert ops.struck == 1
    assert [[verdict.reason for verdict in one] for one in judged] == [
        ["unverified"],
        ["keep_last"],
    ]
    journal.close()
