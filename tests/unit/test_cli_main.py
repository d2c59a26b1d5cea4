"""The command line as a whole: usage, statuses, errors, pipes, interrupts, imports."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dist_ckpt
from dist_ckpt.cli import _main
from helpers.run_dirs import call, ended_run, spawn
from helpers.trainers import ROOT

COMMANDS = (
    "ls", "status", "show", "verify", "export", "save", "stop", "loss", "report", "serve", "diff",
    "prove",
)  # fmt: skip
ABOUT_A_RUN = (
    "ls",
    "status",
    "show",
    "verify",
    "export",
    "save",
    "stop",
    "loss",
    "report",
    "serve",
)


def test_help_lists_every_command_and_each_has_its_own() -> None:
    called = call("--help")
    assert (called.status, called.err) == (0, "")
    for command in (*COMMANDS, "run"):
        assert f"\n  {command} " in called.out
    for command in COMMANDS:
        called = call(command, "--help")
        assert (called.status, called.err) == (0, "")
        assert called.out.startswith(f"Usage: dist-ckpt {command} ")
        assert "--json" in called.out
        assert len(called.out.splitlines()) < 30


def test_the_list_of_homes_is_that_of_the_modules() -> None:
    for home, names in _main._HOMES.items():
        module = importlib.import_module(f"dist_ckpt.cli.{home}")
        assert names == tuple(command.__name__.rstrip("_") for command in module.COMMANDS)


def test_the_version_is_told() -> None:
    called = call("--version")
    assert (called.status, called.out) == (0, f"dist-ckpt {dist_ckpt.__version__}\n")


def test_run_hands_everything_to_the_launcher() -> None:
    done = spawn("run", "--help")
    assert done.returncode == 0
    assert "torchrun with signals that work" in done.stdout
    done = spawn("run", "--nproc-per-node=2", "no_such_script.py", "--json", "--until", "5")
    assert done.returncode == 2
    assert "no_such_script.py" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["ls"],
        ["ls", "a", "b"],
        ["ls", "--fast", "a"],
        ["export", "a"],
        ["status", "a", "--max-age", "soon"],
        ["loss"],
        ["--json"],
    ],
)
def test_wrong_usage_is_status_2_and_two_lines_and_json_on_demand(arguments: list[str]) -> None:
    called = call(*arguments)
    assert called.status == 2
    if "--json" not in arguments:
        assert called.out == ""
        assert called.err.startswith("dist-ckpt: ")
        assert "--help" in called.err
        assert len(called.err.splitlines()) <= 2
    as_json = call(*arguments, "--json")
    assert (as_json.status, as_json.err) == (2, "")
    assert as_json.json["error"]["id"] == "usage"
    assert as_json.json["error"]["next_step"]


@pytest.mark.parametrize("command", ABOUT_A_RUN)
def test_a_run_that_is_missing_is_status_2_for_every_command(command: str, tmp_path: Path) -> None:
    arguments = [command, str(tmp_path / "none")]
    if command == "export":
        arguments += ["-o", str(tmp_path / "x.bin")]
    called = call(*arguments)
    assert (called.status, called.out) == (2, "")
    assert str(tmp_path / "none") in called.err
    assert len(called.err.splitlines()) <= 2
    as_json = call(*arguments, "--json")
    assert (as_json.status, as_json.err) == (2, "")
    assert as_json.json["error"]["id"] == "not-found"


@pytest.mark.parametrize("which", ["x", "-4", "4.0", "", "9" * 50, "٤", "0x4"])
def test_a_step_that_is_none_is_refused(which: str, tmp_path: Path) -> None:
    called = call("show", f"{ended_run(tmp_path)}@{which}", "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "usage")


def test_a_generation_is_addressed_in_four_ways(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    for address, step in {
        f"{run_dir}": 12,
        f"{run_dir}/": 12,
        f"{run_dir}@latest": 12,
        f"{run_dir}@8": 8,
        f"{run_dir}@000008": 8,
        f"{run_dir}/checkpoints/step_000004": 4,
    }.items():
        assert call("show", address, "--json").json["step"] == step


def test_an_at_sign_in_a_path_is_a_sign_of_the_path(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path, name="lr@8")
    assert call("show", run_dir, "--json").json["step"] == 12
    assert call("show", f"{run_dir}@4", "--json").json["step"] == 4


def test_a_traceback_comes_with_debug_only(tmp_path: Path) -> None:
    plain = call("ls", tmp_path / "none")
    assert "Traceback" not in plain.err
    for arguments in (["--debug", "ls"], ["ls", "--debug"]):
        debug = call(*arguments, tmp_path / "none")
        assert debug.status == 2
        assert "Traceback" in debug.err
        assert plain.err in debug.err


def test_a_bug_is_said_in_two_lines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("dist_ckpt.cli._look.list_rows", fails)
    called = call("ls", ended_run(tmp_path))
    assert called.status == 2
    assert len(called.err.splitlines()) == 2
    assert "--debug" in called.err
    assert call("ls", tmp_path / "small", "--json").json["error"]["id"] == "internal"


def test_an_interrupt_is_status_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dist_ckpt.cli._look.list_rows", interrupted)
    called = call("ls", ended_run(tmp_path))
    assert (called.status, called.out) == (130, "")


def test_a_real_ctrl_c_ends_a_waiting_command_with_130_and_no_traceback(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    # No command takes long enough by itself to be met for certain.
    code = (
        "import sys, time, dist_ckpt.cli._main as m, dist_ckpt.cli._look as look\n"
        "def slow(*a, **k):\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "look.list_rows = slow\n"
        f"sys.exit(m.carry_out(['ls', {str(run_dir)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_goes_away_is_no_error_message(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    receiving, sending = os.pipe()
    os.close(receiving)
    done = spawn("show", run_dir, "--tensors", stdout=sending)
    os.close(sending)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_answer_that_cannot_be_written_is_status_2(tmp_path: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = spawn("ls", ended_run(tmp_path), stdout=full)
    assert done.returncode == 2
    assert "No space left" in done.stderr


def test_a_terminal_without_unicode_gets_an_answer(tmp_path: Path) -> None:
    done = spawn("loss", ended_run(tmp_path), env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    done.stdout.encode("ascii")


def test_a_path_that_is_not_utf_8_can_be_named(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path, name=os.fsdecode(b"caf\xe9"))
    done = spawn("ls", run_dir, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["path"] == str(run_dir)
    assert spawn("show", run_dir).returncode == 0


def test_no_looking_command_imports_torch(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    code = f"""
import sys
from dist_ckpt.cli import main
run = {str(run_dir)!r}
for command in (["ls", run], ["status", run], ["show", run, "--tensors"],
                ["loss", run, "--replays"], ["save", run], ["stop", run]):
    status = main([*command, "--json"])
    assert status == (2 if command[0] in ("save", "stop") else 0), command
    assert not {{"torch", "torchsnapshot"}} & set(sys.modules), command
    quick = command[0] in ("ls", "status", "show")
    assert not quick or not {{"numpy", "filelock", "rich"}} & set(sys.modules), command
print("none", file=sys.stderr)
"""
    done = spawn(code=code)
    assert done.stderr == "none\n"
    assert all(json.loads(line) for line in done.stdout.splitlines())


def _into(where: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return how the command line ended with its streams put elsewhere by a shell."""
    command = [sys.executable, "-m", "dist_ckpt", *map(str, arguments)]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {where}', "sh", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_closed_stdout_changes_no_verdict_and_makes_no_noise(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    done = _into(">&-", "verify", run)
    assert (done.returncode, done.stderr) == (0, "")
    shard = run / "checkpoints/step_000008/rank_00000.shard"
    shard.chmod(0o600)
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    done = _into(">&- 2>&-", "verify", run)
    assert done.returncode == 1
    done = _into(">&-", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    done = _into("2>&-", "ls", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    # Nobody reads, but there is a fault: that status is worth more than the pipe's.
    receiving, sending = os.pipe()
    os.close(receiving)
    broken = spawn("verify", run, stdout=sending)
    assert (broken.returncode, broken.stderr) == (1, "")
    broken = spawn("--help", stdout=sending)
    assert (broken.returncode, broken.stderr) == (141, "")
    os.close(sending)
