"""A damaged line or file, or one that can't be read now, never means that something is absent."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.errors import CorruptFileError, StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History, read_journal, read_loss
from dist_ckpt.lifecycle import new_request, write_request
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.pivoting import Training
from helpers.run_dirs import call, ended_run, options_of
from helpers.trainers import train


def journal_of(run_dir: Path) -> Path:
    return run_dir / f"{run_dir.name}.journal.jsonl"


def words(run_dir: Path) -> list[str]:
    return [event["event"] for event in read_journal(run_dir)]


def damage(run_dir: Path, event: str, *, unreadable: bool = False, nth: int = -1) -> None:
    """Flip one bit in a line of the journal: in its event's word, or in its first byte."""
    path = journal_of(run_dir)
    data = bytearray(path.read_bytes())
    found = list(re.finditer(rb'^\{.*"event": "(%s)".*$' % event.encode(), data, re.MULTILINE))
    before = words(run_dir)
    data[found[nth].start() if unreadable else found[nth].start(1) + 1] ^= 4
    path.write_bytes(data)
    after = words(run_dir)
    (changed,) = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert changed[0] == event
    assert (changed[1] == "unreadable") is unreadable


def facts(run_dir: Path) -> Any:
    store = GenerationStore(run_dir)
    return store.steps(), store.archived(), read_loss(run_dir)


# A rewind that had ended


@pytest.mark.parametrize("unreadable", [True, False])
def test_a_rewind_is_not_done_again_because_its_last_line_was_damaged(
    tmp_path: Path, unreadable: bool
) -> None:
    run_dir = ended_run(tmp_path)
    assert call("rewind", f"{run_dir}@4").status == 0
    train(options_of(run_dir, until=12))
    before = facts(run_dir)
    damage(run_dir, "rewound", unreadable=unreadable)
    damage(run_dir, "history_cut")
    assert call("fork", f"{run_dir}@8", tmp_path / "branch").status == 0
    train(options_of(run_dir, until=12))
    assert facts(run_dir) == before
    assert before[0] == [4, 8, 12]
    assert {"rewound", "history_cut"}.isdisjoint(words(run_dir))


@pytest.mark.parametrize("unreadable", [True, False])
def test_what_was_brought_back_stays_though_the_rewind_lacks_its_last_line(
    tmp_path: Path, unreadable: bool
) -> None:
    """Killed at the end of the undelete: all that tells is that the history had been cut."""
    run_dir = ended_run(tmp_path)
    assert call("rewind", f"{run_dir}@4").status == 0
    assert call("undelete", run_dir, "8").status == 0
    damage(run_dir, "rewound", unreadable=unreadable)
    damage(run_dir, "undeleted")
    before = facts(run_dir)
    assert call("prune", run_dir).status == 0
    assert facts(run_dir) == before
    assert before[0] == [4, 8]
    assert words(run_dir)[-1] == "rewound"
    assert call("prune", run_dir).status == 0
    assert words(run_dir).count("rewound") == 1


def _begin_rewind(run_dir: Path) -> None:
    """Have a rewind to step 4 that was killed before it moved anything, and so the next start."""
    with History(run_dir, run_dir.name, 1) as history:
        history.journal.append("rewind_started", step=4, home="rewind_to_000004")
        history.journal.append("attempt_started", nonce="of one that was killed at once")


def test_where_nothing_tells_whether_a_rewind_had_ended_nothing_is_moved(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    _begin_rewind(run_dir)
    damage(run_dir, "attempt_started", unreadable=True)
    before = facts(run_dir)
    number = len(words(run_dir))
    for command, *arguments in (("prune", run_dir), ("fork", f"{run_dir}@8", tmp_path / "new")):
        called = call(str(command), *arguments)
        assert called.status == 1
        assert f"Line {number} of {journal_of(run_dir)} can't be read" in called.err
        assert "later steps (8, 12) have to go to archive/. Nothing was moved." in called.err
        assert facts(run_dir) == before
    lines = journal_of(run_dir).read_text().splitlines(keepends=True)
    # What the message says: the line removed, or another one in its place.
    journal_of(run_dir).write_text("".join([*lines[:-1], '{"event": "rewound"}\n']))
    assert call("prune", run_dir).status == 0
    assert facts(run_dir) == before
    journal_of(run_dir).write_text("".join(lines[:-1]))
    assert call("prune", run_dir).status == 0
    assert facts(run_dir)[:2] == ([4], [("rewind_to_000004", 8), ("rewind_to_000004", 12)])


def test_a_rewind_that_was_cut_off_is_ended_though_an_attempt_began_after_it(
    tmp_path: Path,
) -> None:
    """A start writes that line before it ends the rewind: it proves nothing."""
    run_dir = ended_run(tmp_path)
    _begin_rewind(run_dir)
    train(options_of(run_dir, until=6))
    assert facts(run_dir)[0] == [4, 6]
    assert words(run_dir).count("rewound") == 1


# A pivot that had been carried out


def _learned(run_dir: Path, until: int) -> int:
    """Train on; return of how many steps the policy has learned at the end."""
    training = Training()
    training.train(run_dir, until, every=5)
    return sum(arm.pulls for arm in training.bandit.arms.values())


def test_a_policy_goes_on_though_the_line_of_its_pivot_was_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older pivot is the newest one that can be read then."""
    run_dir = tmp_path / "andrea"
    _learned(run_dir, 5)
    for until, learned in ((8, 3), (12, 4)):
        write_request(run_dir, new_request(None))
        assert _learned(run_dir, until) == learned
    damage(run_dir, "pivot")
    branch = tmp_path / "branch"
    assert call("fork", run_dir, branch).status == 0
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        assert _learned(run_dir, 14) == 6
    assert "the journal lacks the pivot that step 12 was saved after" in caplog.text
    assert _learned(run_dir, 15) == 7
    assert _learned(branch, 13) == 5
    assert "policy_fresh" not in words(branch)
    # One that comes later counts as ever.
    write_request(run_dir, new_request(None))
    assert _learned(run_dir, 17) == 2


# Pins


def test_no_bit_of_the_pins_lets_a_pinned_generation_go(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    assert call("pin", f"{run_dir}@4", "--reason", "golden").status == 0
    store, path = GenerationStore(run_dir), run_dir / "pins.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(CorruptFileError, match=r"Until then nothing is retired\."):
            store.pins()
    at = data.index(store.manifest(4).id.encode())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    called = call("prune", run_dir, "--keep-last", "1")
    assert called.status == 1
    assert f"{path} was changed since it was written" in called.err
    assert store.steps() == [4, 8, 12]
    # As the message says; and as it was written before it had a digest.
    brace, digest, *rest = data.decode().splitlines()
    assert '"digest"' in digest
    for text in ('{"4": "golden"}', "\n".join([brace, *rest])):
        path.write_text(text)
        assert store.pins() == {4: "golden"}
    assert call("pin", f"{run_dir}@8").status == 0
    assert b'"digest": "xxh3_128:' in path.read_bytes()
    assert store.pins() == {4: "golden", 8: ""}


def test_a_manifest_that_can_not_be_read_now_costs_no_other_pin_of_its_step(
    tmp_path: Path,
) -> None:
    """Of two branches each has a step 8 that is pinned; one of them lies in the archive."""
    run_dir = ended_run(tmp_path)
    assert call("pin", f"{run_dir}@8", "--reason", "of the other branch").status == 0
    assert call("rewind", f"{run_dir}@4").status == 0
    train(options_of(run_dir, until=8))
    assert call("pin", f"{run_dir}@8").status == 0
    store = GenerationStore(run_dir)
    before = (run_dir / "pins.json").read_bytes()
    ops = FaultyOps(Fault("open", "*/step_000008/resume_point.json", error="EMFILE"))
    with use_ops(ops), pytest.raises(StorageError, match="EMFILE"):
        store.unpin(8)
    assert ops.struck == 1
    assert (run_dir / "pins.json").read_bytes() == before
    assert store.unpin(8)
    assert "of the other branch" in (run_dir / "pins.json").read_text()


@pytest.mark.parametrize("at", [b"{", b"retention", b"keep_every"])
def test_prune_takes_no_default_for_a_setting_that_a_damaged_file_held(
    tmp_path: Path, at: bytes
) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "run.json"
    data = path.read_bytes()
    place = data.index(at)
    path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    called = call("prune", run_dir, "--keep-last", "1")
    assert called.status == 1
    assert f"{path} can't be read, or doesn't tell" in called.err
    assert GenerationStore(run_dir).steps() == [4, 8, 12]
    given = ("--keep-last", "1", "--keep-every", "8", "--keep-bins", "all")
    assert call("prune", run_dir, *given).status == 0
    assert GenerationStore(run_dir).steps() == [8, 12]
