"""How many states of power cuts were tried stands at the end of a run, of several processes too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
MODULE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number, record_property):
    record_property("power_cuts", [1_000, int(number == BAD), 7, f"life {number}"])
    assert number != BAD

def test_another():
    pass
"""


def _run(folder: Path, bad: int, *options: str) -> str:
    (folder / "conftest.py").write_bytes(CONFTEST.read_bytes())
    (folder / "test_it.py").write_text(f"BAD = {bad}\n{MODULE}", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (bad >= 0), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [("-p", "no:xdist"), ("-n", "2")], ids=["one", "two"])
def test_the_states_are_summed_up(options: tuple[str, ...], tmp_path: Path) -> None:
    said = _run(tmp_path, -1, *options)
    assert "power cuts: 4,000 states tried, all recovered (seed 7)" in said
    assert "  1,000  life 3" in said


def test_a_state_that_was_not_recovered_is_not_hidden(tmp_path: Path) -> None:
    said = _run(tmp_path, 2, "-p", "no:xdist")
    assert "power cuts: 4,000 states tried, 1 or more NOT recovered (seed 7)" in said


def test_without_power_cuts_nothing_is_said(tmp_path: Path) -> None:
    assert "power cuts" not in _run(tmp_path, -1, "-p", "no:xdist", "-k", "another")
