"""`make soak MINUTES=N`: no more tests are begun after so long, in an order of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
#: Tests that each take 40 seconds by the clock that they set themselves.
MODULE = """
import time
import pytest

clock, passed = time.monotonic, 0
time.monotonic = lambda: clock() + passed

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    global passed
    print("ran", number)
    passed += 40
"""


def _soak(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_bytes(CONFTEST.read_bytes())
    (folder / "test_it.py").write_text(MODULE, encoding="utf-8")
    given = {f"DIST_CKPT_TEST_{name}": value for name, value in variables.items()}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA"]
    return subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _ran(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(line[4:]) for line in done.stdout.splitlines() if line.startswith("ran ")]


def test_after_its_minutes_no_more_are_begun_in_the_order_that_was_given(tmp_path: Path) -> None:
    first = _soak(tmp_path, MINUTES="2", ORDER="1")
    assert "soak: 2 minutes, order 1" in first.stdout
    assert "the soak's 2 minutes are over before test_it[" in first.stdout
    assert len(_ran(first)) == 3  # at 0, 40 and 80 s; a fourth would begin at 120 s
    tests = list(range(12))
    random.Random("1").shuffle(tests)
    assert _ran(first) == tests[:3]


def test_without_minutes_all_are_run_in_their_order(tmp_path: Path) -> None:
    done = _soak(tmp_path, MINUTES="", ORDER="1")
    assert _ran(done) == list(range(12))
    assert "soak:" not in done.stdout


def test_less_than_a_minute_is_refused(tmp_path: Path) -> None:
    done = _soak(tmp_path, MINUTES="0.5", ORDER="1")
    assert done.returncode == 4
    assert "MINUTES=0.5: give the soak a minute or more." in done.stderr
