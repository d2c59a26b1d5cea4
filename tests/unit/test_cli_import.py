"""``dist-ckpt import``: starts a command that takes a .bin over."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dist_ckpt.generations import GenerationStore
from helpers.generating import change_byte
from helpers.import_script import train
from helpers.run_dirs import call, snapshot_of
from helpers.trainers import ROOT

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "import_script.py"


@functools.cache
def _source() -> Path:
    run = Path(tempfile.mkdtemp(prefix="import-")) / "source"
    train(str(run), 1, 3)
    train(str(run), 1, 5)
    return run


def test_the_command_trains_on_from_the_file_and_the_answer_is_one_document(
    tmp_path: Path,
) -> None:
    given = _source() / "step_000003.bin"
    run = tmp_path / "new"
    called = call("import", given, run, "--json", "--", "python", SCRIPT, "elsewhere", "99", "5")
    assert called.status == 0, called
    document = called.json
    assert (document["file"], document["run"]) == (str(given), str(run))
    assert (document["step"], document["latest_step"], document["num_params"]) == (3, 5, 71)
    assert document["stateless"] == ["unused.weight", "unused.bias"]
    assert any("place in the data" in note for note in document["notes"])
    wanted = (_source() / "step_000005.bin").read_bytes()
    assert (run / "step_000005.bin").read_bytes() == wanted
    again = call("import", given, run, "--", sys.executable, SCRIPT, "elsewhere", "99", "5")
    assert again.status == 2
    assert "has generations up to step 5" in again.err


@pytest.mark.slow
def test_two_ranks_of_the_launcher_import_and_only_the_first_generation_is_made(
    tmp_path: Path,
) -> None:
    given = _source() / "step_000003.bin"
    run = tmp_path / "new"
    words = ["dist-ckpt", "run", "--nproc-per-node", "2", SCRIPT, "elsewhere", "99", "5"]
    command = [sys.executable, "-m", "dist_ckpt", "import", given, run, "--only", "--", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=110, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "step 3 imported, 71 parameters" in done.stdout
    point = GenerationStore(run).manifest(3)
    assert (point.world_size, point.reasons, GenerationStore(run).steps()) == (2, ("import",), [3])
    assert (run / "step_000003.bin").read_bytes() == given.read_bytes()


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("print('hello')", "imported nothing. It must enter a Checkpointer"),
        ("raise SystemExit(3)", "ended with status 3 and imported nothing. What it printed"),
    ],
)
def test_a_command_that_imports_nothing_is_status_2(tmp_path: Path, code: str, word: str) -> None:
    given = _source() / "step_000003.bin"
    called = call("import", given, tmp_path / "new", "--json", "--", sys.executable, "-c", code)
    assert called.status == 2
    error = called.json["error"]
    assert error["id"] == "incomplete"
    assert word in f"{error['message']} {error['next_step']}"
    assert not (tmp_path / "new").exists()


def test_what_cant_be_imported_is_said_before_anything_is_started(tmp_path: Path) -> None:
    given = tmp_path / "step_000003.bin"
    given.write_bytes((_source() / "step_000003.bin").read_bytes())
    (tmp_path / "step_000003.bin.sha256").write_bytes(
        (_source() / "step_000003.bin.sha256").read_bytes()
    )
    never = ("--", sys.executable, "-c", "raise SystemExit('started')")
    change_byte(given, 20)
    before = snapshot_of(tmp_path)
    called = call("import", given, tmp_path / "new", *never)
    assert called.status == 1
    assert "isn't whole, nothing was started" in called.err
    assert call("import", tmp_path / "none.bin", tmp_path / "new", *never).status == 2
    assert call("import", given, tmp_path / "new").status == 2
    other = call("import", _source() / "step_000003.bin", _source(), *never)
    assert other.status == 2
    assert "an import begins a run" in other.err
    folder = call("import", _source(), tmp_path / "new", *never)
    assert folder.status == 2
    assert "Name a step_N.bin in it" in folder.err
    unknown = call("import", _source() / "step_000003.bin", tmp_path / "new", "--", "no-such-one")
    assert unknown.status == 2
    assert "no command no-such-one" in unknown.err
    assert snapshot_of(tmp_path) == before
