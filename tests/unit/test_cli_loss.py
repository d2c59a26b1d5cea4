"""``dist-ckpt loss``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import shutil
import sys
from pathlib import Path

import pytest

from dist_ckpt.cli._text import duration, plain, size, table
from dist_ckpt.history import History
from helpers.run_dirs import call, ended_run, killed_run, options_of, spawn
from helpers.trainers import train


def test_the_curve_is_shown_with_its_last_values(tmp_path: Path) -> None:
    called = call("loss", ended_run(tmp_path))
    assert (called.status, called.err) == (0, "")
    head, row, _, *plot, _, last = called.out.splitlines()
    assert head.split()[:3] == ["run", "entries", "steps"]
    assert row.split()[:3] == ["small", "12", "1-12"]
    assert len(plot) == 12
    assert any("\u2800" < sign <= "\u28ff" for sign in "".join(plot))
    assert plot[-1].split() == ["1", "12"]
    assert last.strip().startswith("last: 8: ")
    assert last.count(":") == 6


def test_a_terminal_shows_curves_over_each_other_in_colours(tmp_path: Path) -> None:
    runs = [ended_run(tmp_path, "one"), killed_run(tmp_path, "two")]
    for no_color, frames in (("1", 2), ("", 1)):
        master, slave = pty.openpty()
        env = {"COLUMNS": "60", "TERM": "xterm", "NO_COLOR": no_color}
        done = spawn("loss", *runs, stdout=slave, env=env)
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
            while data := os.read(master, 1 << 16):
                shown += data
        os.close(master)
        assert done.returncode == 0
        assert shown.count("└".encode()) == frames
        assert (b"\x1b[36mone\x1b[0m" in shown) == (frames == 1)


def test_copies_are_told_apart_by_their_directories_and_paths(tmp_path: Path) -> None:
    first = ended_run(tmp_path, "b")
    second, third = tmp_path / "b2", tmp_path / "away" / "b2"
    for copy in (second, third):
        shutil.copytree(first, copy)
    called = call("loss", first, second)
    assert [line.split()[0] for line in called.out.splitlines()[1:3]] == ["b", "b2"]
    document = call("loss", second, first, third, second, "--json").json
    labels = [str(second), "b", str(third), f"{second}~2"]
    assert [run["label"] for run in document["runs"]] == labels
    assert [run["run"] for run in document["runs"]] == ["b"] * 4
    assert document["branches"]["runs"] == labels


def test_as_json_the_entries_are_those_of_the_canonical_history(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run,) = call("loss", run_dir, "--json").json["runs"]
    entries = json.loads((run_dir / "small.loss.json").read_text())
    assert run["entries"] == entries
    assert (run["count"], run["first_step"], run["last_step"]) == (12, 1, 12)
    assert run["last_loss"] == entries[-1][1]
    assert run["lowest"] == min(entries, key=lambda entry: entry[1])
    mean = entries[0][1]
    for _, value in entries[1:]:
        mean = 0.98 * mean + 0.02 * value
    assert run["ema"] == pytest.approx(mean)


def test_void_entries_show_with_raw_only(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    with History(run_dir, "small", 2) as history:
        history.cut(8)
        history.record(9, 7.5, {})
    (run,) = call("loss", run_dir, "--json").json["runs"]
    assert [step for step, _ in run["entries"]] == list(range(1, 10))
    assert run["last_loss"] == 7.5
    (raw,) = call("loss", run_dir, "--raw", "--json").json["runs"]
    assert [step for step, _ in raw["entries"]] == [*range(1, 13), 8, 9]


def test_several_runs_stand_in_one_table(tmp_path: Path) -> None:
    runs = [ended_run(tmp_path, "one"), killed_run(tmp_path, "two")]
    called = call("loss", *runs)
    assert [line.split()[0] for line in called.out.splitlines()[1:3]] == ["one", "two"]
    assert [run["run"] for run in call("loss", *runs, "--json").json["runs"]] == ["one", "two"]


def test_replayed_steps_are_told(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path, "again")
    (run,) = call("loss", run_dir, "--replays", "--json").json["runs"]
    assert run["replays"] == []
    assert "no step was computed again" in call("loss", run_dir, "--replays").out
    train(options_of(run_dir, until=16))
    (run,) = call("loss", run_dir, "--replays", "--json").json["runs"]
    (replay,) = run["replays"]
    assert (replay["resumed_step"], replay["agreed"], replay["num_logged"]) == (12, 2, 2)
    assert replay["all_agreed"] is True
    assert "2 of 2 steps came out the same" in call("loss", run_dir, "--replays").out


def test_a_run_without_losses_and_one_with_nan_are_shown(tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    (run_dir / "new.loss.json").write_text("[]")
    called = call("loss", run_dir)
    assert (called.status, called.out.splitlines()[1].split()) == (
        0,
        ["new", "0", "-", "-", "-", "-", "-"],
    )
    (run_dir / "new.loss.json").write_text("[[1, null]]")
    called = call("loss", run_dir)
    assert called.status == 0
    assert "1 entries aren't finite" in called.out
    (run,) = call("loss", run_dir, "--json").json["runs"]
    assert (run["not_finite"], run["ema"], run["last_loss"]) == (1, None, None)


def test_a_torn_loss_file_is_read_and_a_foreign_one_refused(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "small.loss.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert call("loss", run_dir, "--json").json["runs"][0]["count"] in (11, 12)
    path.write_text('{"a": 1}')
    called = call("loss", run_dir, "--json")
    assert (called.status, called.json["error"]["id"]) == (1, "corrupt-file")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_png_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    called = call("loss", ended_run(tmp_path), killed_run(tmp_path, "$x_$"), "--png", path)
    assert (called.status, called.out.splitlines()[-1]) == (0, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_png_that_cannot_be_drawn_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    assert call("loss", run_dir, "--png", run_dir / "small.loss.json").status == 2
    assert call("loss", run_dir, "--png", tmp_path / "none/x.png").status == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    called = call("loss", run_dir, "--png", tmp_path / "x.png")
    assert called.status == 2
    assert "dist-ckpt[report]" in called.err


# Words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_999, "1.0 MB"),
        (153_363_464, "153.4 MB"), (10**18, "1000.0 PB"), (None, "-"),
    ],
)  # fmt: skip
def test_sizes_in_words(num_bytes: int | None, words: str) -> None:
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("secs", "words"),
    [
        (0, "0.0 s"), (-5, "0.0 s"), (59.94, "59.9 s"), (59.96, "60.0 s"), (60, "1 min"),
        (3600, "1 h"), (7500, "2 h 5 min"), (86_400, "1 d"), (200_000, "2 d 7 h"),
        (float("inf"), "-"), (None, "-"),
    ],
)  # fmt: skip
def test_times_in_words(secs: float | None, words: str) -> None:
    assert duration(secs) == words


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(("a", "n"), [("x", 1), ("yyy", None)], right=("n",)) == "a    n\nx    1\nyyy  -\n"
    assert plain("a\x1bb\u2028\n") == r"a\x1bb\u2028\n"
