"""torch's own DataLoader, whose workers get the signals of their process group.

`ResumableLoader` sees to this by itself (tests/unit/test_loader_workers.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.trainers import HELPERS

WAIT_SECS = 60.0


@contextmanager
def training(run: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A training in its sixth step or later, in a process group of its own, and its workers."""
    script = str(HELPERS / "plain_loader.py")
    process = subprocess.Popen(
        [sys.executable, script, str(run), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_workers_that_only_the_trainer_ends_outlive_a_stop_of_the_group_and_the_script_ends(
    tmp_path: Path,
) -> None:
    """Case 26: a worker's own SIGTERM is nothing; the group's is a checkpoint and status 0."""
    with training(tmp_path / "run", "deaf") as (process, workers):
        os.kill(workers[0], signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_SECS)
    assert process.returncode == 0, err
    stopped, step = out.split()
    assert stopped == "SIGTERM"
    assert (tmp_path / "run" / "checkpoints" / f"step_{int(step):06d}").is_dir()
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def test_plain_workers_die_of_their_groups_signal_and_torch_makes_that_the_trainers_error(
    tmp_path: Path,
) -> None:
    """Why the documentation asks for one of the two other ways; red once torch changes it."""
    with training(tmp_path / "run", "plain") as (process, workers):
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_SECS)
    assert process.returncode != 0
    # "is killed by signal", or what its broken connection looks like where that is met first.
    assert "Traceback" in err
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
