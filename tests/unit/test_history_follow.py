"""A history that is looked at again and again: what each look tells, and how much it reads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.history import (
    FollowedHistory,
    History,
    _follow,
    read_journal,
    read_loss,
    read_loss_raw,
)
from dist_ckpt.history._loss_format import scan_loss
from dist_ckpt.storage import replace_durable


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "andrea"
    path.mkdir()
    return path


@pytest.fixture
def whole_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of loss files that were parsed from their first byte on."""
    sizes: list[int] = []

    def counting(data: bytes, **more: str) -> object:
        sizes.append(len(data))
        return scan_loss(data, **more)

    monkeypatch.setattr(_follow, "scan_loss", counting)
    return sizes


def _loss_path(run_dir: Path) -> Path:
    return run_dir / "andrea.loss.json"


def _check(followed: FollowedHistory, run_dir: Path) -> None:
    """A look tells what one who reads everything is told."""
    losses, index = followed.losses(), followed.index()
    counting = read_loss(run_dir)
    assert losses.entries() == read_loss_raw(run_dir)
    assert list(index) == counting
    assert losses.newest == (*(counting[-1] if counting else (None, None)), len(counting))
    assert followed.journal() == read_journal(run_dir)


def test_every_look_at_a_run_with_falls_rewinds_and_nulls_is_that_of_a_whole_reading(
    run_dir: Path, whole_reads: list[int]
) -> None:
    dice = random.Random(7)
    followed = FollowedHistory(run_dir)
    assert (followed.losses().entries(), followed.journal()) == ([], [])
    step = 0
    for attempt in range(1, 13):
        with History(run_dir, "andrea", attempt) as history:
            if attempt in (5, 9):
                step = 0 if attempt == 5 else step // 2  # before the first entry; to one of them
                history.cut(step)
            step = max(0, step - dice.randrange(4))
            history.begin(step or None)
            for _ in range(dice.randrange(1, 12)):
                step += 1
                history.record(step, float("nan") if dice.random() < 0.2 else dice.random(), {})
                if dice.random() < 0.5:
                    _check(followed, run_dir)
        _check(followed, run_dir)
    assert any(event.get("void_losses") for event in followed.journal())
    assert any(loss is None for _, loss in followed.losses().entries())
    # All of it was read before it was there, and once when it was small.
    assert whole_reads[0] == 0
    assert len(whole_reads) == 2
    assert whole_reads[1] < _loss_path(run_dir).stat().st_size / 10


def test_an_earlier_look_stays_what_it_was(run_dir: Path) -> None:
    followed = FollowedHistory(run_dir)
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        history.record(1, 2.5, {})
        before = followed.losses()
        history.record(2, 2.25, {})
        after = followed.losses()
    assert (before.entries(), before.newest, len(before)) == ([(1, 2.5)], (1, 2.5, 1), 1)
    assert (after.entries(since=1), after.newest, len(after)) == ([(2, 2.25)], (2, 2.25, 2), 2)


def _replace(path: Path) -> None:
    replace_durable(path, b"[\n[1, 7.5],\n[2, 7.0],\n[3, 6.5],\n[4, 6.25]]")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _remove(path: Path) -> None:
    path.unlink()


def _shorten(path: Path) -> None:
    path.write_bytes(b"[\n[1, 3.5]]")


def _tear(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b",\n[4, 1.")


def _rewrite_the_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"[3, 3.0]]", b"[3, 9.0],\n[4, 8.0]]"))


def _space(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    "change", [_replace, _empty, _remove, _shorten, _tear, _rewrite_the_end, _space]
)
def test_what_else_may_happen_to_the_file_is_seen(
    run_dir: Path, change: Callable[[Path], None]
) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        for step, loss in ((1, 3.5), (2, 3.25), (3, 3.0)):
            history.record(step, loss, {})
    followed = FollowedHistory(run_dir)
    _check(followed, run_dir)
    path = _loss_path(run_dir)
    before = path.read_bytes()
    change(path)
    if path.exists():
        assert path.read_bytes() != before
        _check(followed, run_dir)
    else:
        assert (len(followed.losses()), followed.index().last_step) == (0, None)
    # And what comes after it: the next attempt mends what is torn.
    with History(run_dir, "andrea", 2) as history:
        history.begin(3)
        history.record(4, 2.75, {})
        _check(followed, run_dir)
        history.record(5, 2.5, {})
        _check(followed, run_dir)


def test_a_file_of_something_else_is_an_error_until_it_is_put_back(run_dir: Path) -> None:
    with History(run_dir, "andrea", 1) as history:
        history.begin(None)
        history.record(1, 2.5, {})
    followed = FollowedHistory(run_dir)
    path = _loss_path(run_dir)
    _check(followed, run_dir)
    right = path.read_bytes()
    path.write_bytes(b'{"loss": [1, 2.5]}')
    for _ in range(2):
        with pytest.raises(CorruptFileError):
            followed.losses()
    path.write_bytes(right)
    _check(followed, run_dir)


def test_a_journal_line_under_way_is_taken_once_and_damage_keeps_its_line(run_dir: Path) -> None:
    path = run_dir / "andrea.journal.jsonl"
    followed = FollowedHistory(run_dir)
    told = []
    for more in (
        b'{"event": "a"}\n{"eve',
        b'nt": "b"}',  # whole, and its end is still to come
        b"\n\n???\n",
        b'{"event": "c"}\n',
    ):
        with path.open("ab") as file:
            file.write(more)
        assert followed.journal() == read_journal(run_dir)
        told.append([(event["event"], event.get("line")) for event in followed.journal()])
    assert told == [
        [("a", None)],
        [("a", None), ("b", None)],
        [("a", None), ("b", None), ("unreadable", 4)],
        [("a", None), ("b", None), ("unreadable", 4), ("c", None)],
    ]
    path.write_bytes(b'{"event": "d"}\n')
    assert [event["event"] for event in followed.journal()] == ["d"]
