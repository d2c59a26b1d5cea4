"""``dist-ckpt diff``: 0 they agree, 1 they differ, 2 they can't be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_ckpt.cli import _diff
from dist_ckpt.export import read_bin, write_bin
from helpers.run_dirs import call, ended_run


def test_a_state_agrees_with_itself_and_the_text_says_how_that_was_judged(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("diff", run_dir, f"{run_dir}@12")
    assert (called.status, called.err) == (0, "")
    assert "agree" in called.out
    assert "absolute tolerance 1e-12, relative 0" in called.out
    assert "infinities" not in called.out


def test_two_steps_differ_and_every_difference_has_its_path(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("diff", f"{run_dir}@4", f"{run_dir}@8", "--json")
    assert (called.status, called.err) == (1, "")
    document = called.json
    assert document["agrees"] is False
    paths = [finding["path"] for finding in document["findings"]]
    assert "step" in paths
    assert any(path.startswith("model/") for path in paths)
    assert document["atol"] == 1e-12


def test_files_agree_within_the_tolerance_that_is_given(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    state = read_bin(run_dir / "step_000012.bin")
    near = tmp_path / "near.bin"
    write_bin(near, state.step, state.weights + 1e-3, state.m, state.v)
    assert call("diff", run_dir / "step_000012.bin", run_dir).status == 0
    assert call("diff", near, run_dir).status == 1
    assert call("diff", near, run_dir, "--atol", "0.01").status == 0
    assert call("diff", near, run_dir, "--rtol", "1e9").status == 0


def test_how_far_it_is_is_drawn_on_a_bar_of_the_bytes_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    file = run_dir / "step_000012.bin"
    bars: list[tuple[str, int, bool]] = []
    told: list[int] = []

    @contextlib.contextmanager
    def bar(label: str, num_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
        bars.append((label, num_bytes, quiet))
        yield told.append
        told.append(-1)  # it is closed

    monkeypatch.setattr(_diff, "byte_bar", bar)
    for a, b, least in ((run_dir, run_dir, 0.5), (run_dir, file, 0.1), (file, file, 1.0)):
        for option in ([], ["--json"]):
            assert call("diff", a, b, *option).status == 0
            ((label, num_bytes, quiet),) = bars
            assert (label, quiet, told[-1]) == ("comparing", bool(option), -1)
            assert least * num_bytes <= sum(told[:-1]) <= num_bytes, (a, b)
            bars.clear()
            told.clear()


@pytest.mark.parametrize("other", ["none", "none@4", "run@5", "run@x"])
def test_what_isnt_there_cant_be_compared(other: str, tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("diff", run_dir, str(tmp_path / other).replace("run", run_dir.name))
    assert (called.status, called.out) == (2, "")
    assert len(called.err.splitlines()) == 2


def test_a_file_that_isnt_whole_cant_be_compared(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    broken = tmp_path / "broken.bin"
    broken.write_bytes((run_dir / "step_000012.bin").read_bytes()[:-4])
    called = call("diff", broken, run_dir, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "incomplete")
    assert str(broken) in called.json["error"]["message"]


def test_a_tolerance_that_is_none_is_refused(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    for value in ("-1", "nan", "inf"):
        assert call("diff", run_dir, run_dir, "--atol", value).status == 2
