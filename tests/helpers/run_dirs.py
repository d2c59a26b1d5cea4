"""Real run directories for tests that look at them, and the command line called from within.

One small training is run once in a pytest process; tests get copies of what it left.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_ckpt.cli import main
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume_point import ResumePoint, encode_resume_point
from helpers.trainers import ROOT, Job, train
from helpers.training import Options

STEPS = (4, 8, 12)
CONFIG = {"lr": 0.01, "name": "small"}


@dataclasses.dataclass(frozen=True)
class Called:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


def call(*arguments: str | Path) -> Called:
    """Return what ``dist-ckpt ARGUMENTS`` did, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Called(status, out.getvalue(), err.getvalue())


def spawn(
    *arguments: str | Path, code: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return how a process of its own ended: the command line, or Python code."""
    what = ["-m", "dist_ckpt"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *what, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})},
        text=True,
        timeout=200,  # for one that hangs; on a busy machine a proof on two ranks takes a minute
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="run-dirs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def options_of(run_dir: Path, **changes: Any) -> Options:
    """Return the options of the small training in a run directory."""
    facts: dict[str, Any] = {"until": 12, "every": 4, "config": CONFIG, **changes}
    return Options(str(run_dir), str(run_dir.with_name(f"{run_dir.name}-out")), **facts)


@functools.cache
def _template() -> Path:
    run_dir = _folder() / "ended"
    train(options_of(run_dir))
    return run_dir


@functools.cache
def _killed_template() -> Path:
    """The same, started again and killed in the middle of step 15, after step 14 was logged."""
    run_dir = _folder() / "killed"
    train(options_of(run_dir))
    with Job(options_of(run_dir, until=30, kill_at=15)) as job:
        assert job.wait() == [-9], job.stderr()
    return run_dir


def ended_run(tmp_path: Path, name: str = "small") -> Path:
    """Return a copy of a run that ended at step 12, generations `STEPS`, its .bin files links."""
    return _copy(_template(), tmp_path / name)


def killed_run(tmp_path: Path, name: str = "small") -> Path:
    """Return a copy of a run of two attempts, the second killed after step 14."""
    return _copy(_killed_template(), tmp_path / name)


def _copy(source: Path, target: Path) -> Path:
    seen: dict[int, str] = {}

    def copy(one: str, other: str) -> None:
        # Hard links stay links, and each copy has files of its own.
        inode = os.stat(one).st_ino
        if inode in seen:
            os.link(seen[inode], other)
        else:
            shutil.copy2(one, other)
            seen[inode] = other

    shutil.copytree(source, target, copy_function=copy)
    for suffix in ("journal.jsonl", "loss.json", "metrics.jsonl", "samples.json"):
        path = target / f"{source.name}.{suffix}"
        if path.exists():
            path.rename(target / f"{target.name}.{suffix}")
    return target


def write_manifest(
    directory: Path, point: ResumePoint, *, verified: bool = True, **changes: Any
) -> ResumePoint:
    """Have a changed resume point in a generation's directory, its digest of itself right."""
    changed = dataclasses.replace(point, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "resume_point.json"
    path.unlink(missing_ok=True)
    path.write_bytes(encode_resume_point(changed))
    if verified:
        run_dir = directory.parent.parent
        (directory / "verified.json").unlink(missing_ok=True)
        GenerationStore(run_dir).mark_verified(changed.step, "test")
    return changed


def snapshot_of(directory: Path) -> Mapping[str, tuple[int, int, int]]:
    """Return inode, size and time of change of everything below a directory, itself included."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found
