"""Bytes that once broke a reader don't any more; mutations of good ones are read or refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import fuzzing
from helpers.reliability import record_fault

FOUND = list(fuzzing.found_earlier())
#: How long each target is looked at by `make soak`.
SOAK_SECS = 20.0


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_what_was_found_once_is_refused_by_name(target: str) -> None:
    for data in fuzzing.beginnings(target):
        fuzzing.TARGETS[target](data)
    for kind, path in FOUND:
        if kind == target:
            fuzzing.attempt(target, path.read_bytes())


def test_findings_are_kept_for_targets_that_there_are() -> None:
    assert FOUND
    assert {path.name for path in fuzzing.HOSTILE.iterdir() if path.is_dir()} <= set(
        fuzzing.TARGETS
    )


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_mutations_are_read_or_refused_by_name(target: str) -> None:
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", time.time_ns() % 10**9))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    fuzzing.look_often(target, count=150, seed=seed)
    what = f"mutations of the file: {target}"
    record_fault("Bad bytes", what, 150, "read, or refused by name")


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_a_bounded_search_finds_nothing(target: str) -> None:
    """Guided by coverage where atheris is installed."""
    script = Path(fuzzing.__file__)
    done = subprocess.run(
        [sys.executable, script, target, str(SOAK_SECS)],
        capture_output=True,
        text=True,
        timeout=SOAK_SECS + 90,
        check=False,
    )
    told = done.stdout + done.stderr
    print(told[-2000:])
    assert done.returncode == 0
    # As libFuzzer says it, or as we do without it.
    count = re.search(r"Done (\d+) runs|: (\d+) mutations", told)
    assert count is not None
    number = int(count[1] or count[2])
    assert number > 0
    what = f"a search over mutations of the file: {target}"
    record_fault("Bad bytes", what, number, "read, or refused by name")
