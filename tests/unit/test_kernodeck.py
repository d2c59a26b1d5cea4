"""The mini-project's proof of resume (K1 to K11): what it shows, refuses and notices."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import os
import platform
import random
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_file
from checkpoint_file import RefusedError, load_checkpoint
from experiment import Experiment
from helpers.ranks import RankContext, run_ranks
from make_data import render

SCRIPTS = Path(__file__).resolve().parents[2] / "launch" / "kernodeck"
FILES = ["checkpoint.pt", "checkpoint.pt.sha256", "summary.json"]


def start(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def copy_scripts(home: Path, name: str = "train.py", old: str = "", new: str = "") -> Path:
    """Return a copy of the scripts in which one piece of text, which occurs once, is another."""
    scripts = shutil.copytree(SCRIPTS, home / "scripts", ignore=shutil.ignore_patterns("__py*"))
    text = (scripts / name).read_text(encoding="utf-8")
    assert not old or text.count(old) == 1, f"{text.count(old)} × {old}"
    (scripts / name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return scripts


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The whole protocol, run once by a copy of the scripts; its directory and what it printed."""
    home = tmp_path_factory.mktemp("proof")
    scripts = copy_scripts(home)
    done = start(scripts / "verify_resume.py", "--output", str(home / "runs" / "proof-cpu"))
    assert done.returncode == 0, done.stdout + done.stderr
    return home, done.stdout


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


# What it shows ----------------------------------------------------------------------------------


def test_the_proof_passes_in_four_fresh_processes_and_says_so(proof: tuple[Path, str]) -> None:
    home, said = proof
    for line in ("all_checks_passed: true", "positive: true", "negative_divergence_detected: true"):
        assert line in said.splitlines()
    found = read_json(home / "runs/proof-cpu/verification.json")
    assert found["all_checks_passed"] is True
    assert found["positive"] is True
    assert found["negative_divergence_detected"] is True
    assert found["tolerance"] == {"atol": 1e-12, "rtol": 0.0}
    assert all(found["checks"].values())
    assert {"inputs", "learning_rates", "losses", "model", "optimizer", "scheduler"} <= set(
        found["comparison"]["resumed"]
    )
    for part in found["comparison"]["resumed"].values():
        assert (part["max_abs"], part["findings"], part["atol"]) == (0.0, [], 1e-12)
        assert part["num_values"] > 0
    assert found["comparison"]["negative"]["model"]["max_abs"] > 1e-4
    assert {"model", "losses", "inputs", "rng", "next_draws", "mse"} <= set(
        found["negative_diverged"]
    )
    assert found["weights_sha256"]["resumed"] == found["weights_sha256"]["continuous"]


def test_each_scenario_leaves_three_files_and_no_byte_code_anywhere(
    proof: tuple[Path, str],
) -> None:
    home, _ = proof
    output = home / "runs" / "proof-cpu"
    assert sorted(os.listdir(output)) == [
        "continuous", "cut", "negative", "resumed", "verification.json",
    ]  # fmt: skip
    for name in ("continuous", "cut", "negative", "resumed"):
        assert sorted(os.listdir(output / name)) == FILES
        digest = hashlib.sha256((output / name / "checkpoint.pt").read_bytes()).hexdigest()
        text = (output / name / "checkpoint.pt.sha256").read_text(encoding="ascii")
        assert text == f"{digest}  checkpoint.pt\n"
    assert os.listdir(home / "runs") == ["proof-cpu"]
    assert not list(home.rglob("__pycache__"))
    assert not list(home.rglob("*.pyc"))


def test_the_experiment_is_the_one_that_the_requirements_describe(
    proof: tuple[Path, str],
) -> None:
    """K1."""
    output = proof[0] / "runs" / "proof-cpu"
    cut, end = (read_json(output / name / "summary.json") for name in ("cut", "resumed"))
    assert cut["parameters"] == 33
    assert (cut["progress"]["step"], cut["progress"]["cursor"]) == (5, 20)
    assert cut["progress"]["rows"] == 24
    assert (end["progress"]["step"], end["progress"]["observations"]) == (10, 40)
    assert end["progress"]["epoch"] == 2
    assert end["next_learning_rate"] == 0.00375
    assert end["resumed"]["step"] == 5
    assert end["resumed"]["rng_restore_omitted"] is False
    pids = {read_json(path)["pid"] for path in output.glob("*/summary.json")}
    assert len(pids) == 4
    state = torch.load(output / "cut" / "checkpoint.pt", map_location="cpu", weights_only=True)
    assert {"model", "optimizer", "scheduler", "progress", "history", "rng"} <= set(state)
    assert state["rng"]["numpy"]["bit_generator"] == "PCG64"
    assert state["rng"]["torch"].dtype is torch.uint8


#: torch's family → (CPU capability, digest of the weights, MSE) after ten updates.
GOLDEN: dict[str, tuple[str, str, float]] = {
    "2.13": (
        "AVX512",
        "54ad3b7b5f30d29c3a68d4ea632b6b546dc80a5aaaec99c58b099d21d9f77085",
        0.23323996468692332,
    ),
}


def test_the_final_numbers_are_those_of_this_torch_family(proof: tuple[Path, str]) -> None:
    family = ".".join(torch.__version__.split(".")[:2])
    if family not in GOLDEN or platform.machine() != "x86_64":
        pytest.skip(f"no golden numbers for torch {family} on {platform.machine()}")
    capability, digest, mse = GOLDEN[family]
    end = read_json(proof[0] / "runs/proof-cpu/continuous/summary.json")
    assert end["next_learning_rate"] == 0.00375
    assert end["mse"] == pytest.approx(mse, abs=1e-6)
    if torch.backends.cpu.get_cpu_capability() == capability:  # other kernels, other last bits
        assert (end["weights_sha256"], end["mse"]) == (digest, mse)


def test_the_data_file_is_what_its_generator_writes() -> None:
    assert (SCRIPTS / "rows.csv").read_text(encoding="ascii") == render()


def test_observing_the_next_draws_moves_no_generator() -> None:
    state, threads = random.getstate(), torch.get_num_threads()
    torch_state, deterministic = (
        torch.get_rng_state(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        experiment = Experiment()
        experiment.update()
        first = experiment.next_draws()
        assert experiment.next_draws() == first
        assert all(len(set(draws)) == 3 for draws in first.values())
    finally:
        random.setstate(state)
        torch.set_rng_state(torch_state)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# What it notices --------------------------------------------------------------------------------


def run_protocols(ctx: RankContext, folders: list[str]) -> None:
    """Each folder's scripts have run the protocol, in forks: 50 ms a scenario instead of 3 s."""
    sys.dont_write_bytecode = True
    # What the first optimizer and the first comparison import, once for all forks.
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step()
    importlib.import_module("dist_ckpt.comparison")
    for folder in folders:
        os.chdir(folder)
        for arguments in (
            ["--steps", "10", "--output", "continuous"],
            ["--steps", "5", "--output", "cut"],
            ["--steps", "5", "--output", "resumed", "--resume", "cut/checkpoint.pt"],
            [
                *("--steps", "5", "--output", "negative"),
                *("--resume", "cut/checkpoint.pt", "--omit-rng-restore"),
            ],
        ):
            in_fork(folder, "train.py", functools.partial(run_train, arguments))
        in_fork(folder, "judgement.py", write_judgement)


def in_fork(folder: str, script: str, run: Callable[[dict[str, Any]], int]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            scripts = f"{folder}/scripts"
            for path in Path(scripts).glob("*.py"):  # not the originals, which pytest imported
                sys.modules.pop(path.stem, None)
            sys.path.insert(0, scripts)
            status = run(runpy.run_path(f"{scripts}/{script}"))
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"{script} in {folder} ended with {status}")


def run_train(arguments: list[str], train: dict[str, Any]) -> int:
    status: int = train["main"](arguments)
    return status


def write_judgement(judgement: dict[str, Any]) -> int:
    found = judgement["judge"](Path())
    Path("verification.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


#: Part → the file, the line that restores it, and where what was not restored lies in the tree.
BREAKS = {
    "nothing": ("experiment.py", "", ""),
    "model": (
        "experiment.py", '        self.model.load_state_dict(state["model"])\n', "model/",
    ),
    "optimizer": (
        "experiment.py", '        self.optimizer.load_state_dict(state["optimizer"])\n',
        "optimizer/",
    ),
    "scheduler": (
        "experiment.py", '        self.scheduler.load_state_dict(state["scheduler"])\n',
        "scheduler/",
    ),
    "step": ("experiment.py", '        self.step = state["progress"]["step"]\n', "progress/step"),
    "permutation": (
        "experiment.py", '        self.permutation = list(state["data"]["permutation"])\n',
        "data/permutation",
    ),
    "cursor": ("experiment.py", '        self.cursor = state["data"]["cursor"]\n', "data/cursor"),
    "history": ("experiment.py", '        self.history = list(state["history"])\n', "history"),
    "python": ("randomness.py", '    restore_python(state["python"])\n', "rng/python/"),
    "numpy": ("randomness.py", '    restore_numpy(state["numpy"], generator)\n', "rng/numpy/"),
    "torch": ("randomness.py", '    restore_torch(state["torch"])\n', "rng/torch"),
    "control": ("experiment.py", "        if not omit_rng:\n", ""),
}  # fmt: skip
PARTS = [name for name in BREAKS if name not in {"nothing", "control"}]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the judgement says after each line was left out."""
    home = tmp_path_factory.mktemp("broken")
    for part, (name, line, _) in BREAKS.items():
        (home / part).mkdir()
        new = "        if True:\n" if part == "control" else ""
        copy_scripts(home / part, name, line, new)
    folders = [str(home / part) for part in BREAKS]
    (result,) = run_ranks(1, run_protocols, folders, init=False)
    assert result.returncode == 0, result.stderr
    return {part: read_json(home / part / "verification.json") for part in BREAKS}


def test_with_no_line_left_out_everything_passes(judged: dict[str, dict[str, Any]]) -> None:
    found = judged["nothing"]
    failed = {name for name, passed in found["checks"].items() if not passed}
    assert failed == {"fresh_processes"} or not failed  # forks may be given a number again
    assert found["positive"]
    assert found["negative_divergence_detected"]
    assert found["not_restored"] == []


@pytest.mark.parametrize("part", PARTS)
def test_leaving_out_any_restored_part_fails_the_proof_and_is_named(
    judged: dict[str, dict[str, Any]], part: str
) -> None:
    found, path = judged[part], BREAKS[part][2]
    assert found["all_checks_passed"] is False
    assert found["positive"] is False
    assert found["diverged"]
    assert found["checks"]["everything_restored"] is False
    # A learning rate lives in the optimizer's groups.
    named = [where for where in found["not_restored"] if where != "next_learning_rate"]
    assert named
    assert all(where.startswith(path) for where in named), named


def test_a_control_that_does_not_diverge_fails_the_proof(
    judged: dict[str, dict[str, Any]],
) -> None:
    """K10: a verifier that can't notice a missing part proves nothing."""
    found = judged["control"]
    assert found["positive"] is True
    assert found["negative_divergence_detected"] is False
    assert found["all_checks_passed"] is False


def test_a_broken_resume_ends_with_status_1_and_a_complete_directory(tmp_path: Path) -> None:
    scripts = copy_scripts(tmp_path, "randomness.py", BREAKS["torch"][1], "")
    done = start(scripts / "verify_resume.py", "--output", str(tmp_path / "out"))
    assert done.returncode == 1, done.stderr
    assert "all_checks_passed: false" in done.stdout
    assert "not restored: rng/torch" in done.stdout
    assert "diverged: " in done.stdout
    assert read_json(tmp_path / "out" / "verification.json")["positive"] is False


# What can't be completed -------------------------------------------------------------------------


def test_a_killed_child_ends_with_status_2_and_no_output(tmp_path: Path) -> None:
    old = "        self.step += 1\n"
    kill = f"{old}        import os; os.kill(os.getpid(), 9)\n"
    scripts = copy_scripts(tmp_path, "experiment.py", old, kill)
    done = start(scripts / "verify_resume.py", "--output", str(tmp_path / "runs" / "out"))
    assert done.returncode == 2, done.stdout
    assert "ended with signal 9" in done.stderr
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize("script", ["train.py", "verify_resume.py"])
def test_a_directory_that_exists_is_refused_with_status_2_and_left_alone(
    tmp_path: Path, script: str
) -> None:
    (tmp_path / "out").mkdir()
    steps = ["--steps", "1"] if script == "train.py" else []
    done = start(SCRIPTS / script, *steps, "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "exists" in done.stderr
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("script", ["train.py", "verify_resume.py"])
def test_without_torch_the_status_is_2_and_there_is_no_output(tmp_path: Path, script: str) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    text = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (blocked / "torch.py").write_text(text, encoding="ascii")
    steps = ["--steps", "1"] if script == "train.py" else []
    output = tmp_path / "runs" / "out"
    done = start(SCRIPTS / script, *steps, "--output", str(output), PYTHONPATH=str(blocked))
    assert done.returncode == 2, done.stderr
    assert "No module named 'torch'" in done.stderr
    assert not output.exists()
    assert not output.parent.exists() or os.listdir(output.parent) == []


def test_a_stopped_verifier_ends_its_children_and_leaves_nothing(tmp_path: Path) -> None:
    slow = "    check_absent(options.output)\n        import time; time.sleep(50)\n"
    scripts = copy_scripts(tmp_path, "train.py", "    check_absent(options.output)\n", slow)
    command = [sys.executable, "-B", str(scripts / "verify_resume.py"), "--output"]
    child = subprocess.Popen([*command, str(tmp_path / "runs" / "out")], stderr=subprocess.PIPE)
    waiting: list[Path] = []
    while len(waiting) < 2:
        waiting = [p for p in Path("/proc").glob("[0-9]*") if is_child_of(p, child.pid)]
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 2
    assert child.stderr is not None
    assert b"interrupted" in child.stderr.read()
    child.stderr.close()
    assert not any(path.exists() for path in waiting)
    assert os.listdir(tmp_path / "runs") == []


def is_child_of(path: Path, parent: int) -> bool:
    try:
        return (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1] == str(
            parent
        )
    except OSError:
        return False


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0", "--output", "x"],
        ["--steps", "many", "--output", "x"],
        ["--steps", "1"],
        ["--steps", "1", "--output", "x", "--omit-rng-restore"],
    ],
)
def test_options_that_make_no_sense_are_refused_with_status_2(arguments: list[str]) -> None:
    train = runpy.run_path(str(SCRIPTS / "train.py"))
    with pytest.raises(SystemExit) as caught:
        train["main"](arguments)
    assert caught.value.code == 2


# What is refused to be loaded (K11) -------------------------------------------------------------


def cut_of(proof: tuple[Path, str], home: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Return a copy of the cut's checkpoint, changed and with fitting fingerprint and size."""
    folder = shutil.copytree(proof[0] / "runs/proof-cpu/cut", home / "cut")
    body = torch.load(folder / "checkpoint.pt", weights_only=True)
    # The proof's scripts lie elsewhere, but are the same: their identity is ours.
    body = change(body) or body
    buffer = io.BytesIO()
    torch.save(body, buffer)
    rewrite(folder, buffer.getvalue())
    return folder / "checkpoint.pt"


def rewrite(folder: Path, data: bytes) -> None:
    (folder / "checkpoint.pt").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (folder / "checkpoint.pt.sha256").write_text(f"{digest}  checkpoint.pt\n", encoding="ascii")
    summary = read_json(folder / "summary.json")
    summary["checkpoint"]["size_bytes"] = len(data)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def swap(values: list[int]) -> None:
    values[0], values[1] = values[1], values[0]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("schema", lambda body: body.update(schema="kernodeck.checkpoint/2")),
        ("schema", lambda body: body.pop("scheduler") and None),
        ("schema", lambda body: body.update(scaler={})),
        ("schema", lambda body: body.update(history={})),
        ("schema", lambda body: body["rng"].pop("numpy") and None),
        ("schema", lambda body: body["model"].update({"3.bias": torch.zeros(1)})),
        ("schema", lambda body: body["model"]["3.bias"].fill_(float("nan")) and None),
        ("schema", lambda body: body["model"].pop("3.bias") and None),
        ("schema", lambda _: ["a list"]),
        ("progress", lambda body: body["progress"].update(step=6)),
        ("progress", lambda body: body["progress"].update(epoch=2)),
        ("progress", lambda body: body["data"].update(cursor=16)),
        ("progress", lambda body: swap(body["data"]["permutation"])),
        ("progress", lambda body: body["data"]["permutation"].pop() and None),
        ("progress", lambda body: body["history"].pop() and None),
        ("progress", lambda body: body["scheduler"].update(last_epoch=4)),
        ("progress", lambda body: body["optimizer"]["state"][0]["step"].fill_(4) and None),
        ("versions", lambda body: body["versions"].update(torch="2.0.0")),
        ("config", lambda body: body["config"].update(lr=0.01)),
        ("code", lambda body: body["identity"].update(code="sha256:0")),
        ("data", lambda body: body["identity"].update(data="sha256:0")),
    ],
)
def test_each_check_refuses_what_does_not_fit(
    proof: tuple[Path, str], tmp_path: Path, check: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = cut_of(proof, tmp_path, change)
    with pytest.raises(RefusedError) as caught:
        load_checkpoint(path)
    assert caught.value.check == check


def test_an_unchanged_copy_is_loaded(proof: tuple[Path, str], tmp_path: Path) -> None:
    assert load_checkpoint(cut_of(proof, tmp_path, lambda _: None))["progress"]["step"] == 5


def flip(folder: Path) -> None:
    data = bytearray((folder / "checkpoint.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "checkpoint.pt").write_bytes(data)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("fingerprint", flip),
        ("fingerprint", lambda folder: (folder / "checkpoint.pt.sha256").unlink()),
        ("fingerprint", lambda folder: (folder / "checkpoint.pt.sha256").write_text("no\n")),
        ("size", lambda folder: (folder / "summary.json").unlink()),
        ("size", lambda folder: (folder / "checkpoint.pt").unlink()),
        ("size", lambda folder: (folder / "checkpoint.pt").write_bytes(b"")),
        ("size", lambda folder: os.truncate(folder / "checkpoint.pt", 1000)),
        ("size", lambda folder: rewrite(folder, bytes(checkpoint_file.LIMIT_BYTES + 1))),
        ("content", lambda folder: rewrite(folder, b"no checkpoint")),
    ],
)
def test_a_file_that_changed_or_lacks_what_belongs_to_it_is_refused(
    proof: tuple[Path, str], tmp_path: Path, check: str, change: Callable[[Path], Any]
) -> None:
    folder = shutil.copytree(proof[0] / "runs/proof-cpu/cut", tmp_path / "cut")
    change(folder)
    with pytest.raises(RefusedError) as caught:
        load_checkpoint(folder / "checkpoint.pt")
    assert caught.value.check == check


class Payload:
    """Would be executed by a loader that takes any pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_in_a_file_is_ever_executed(
    proof: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 22: never a fallback to unsafe loading."""
    monkeypatch.chdir(tmp_path)
    path = cut_of(proof, tmp_path, lambda body: body.update(scheduler=Payload()))
    with pytest.raises(RefusedError) as caught:
        load_checkpoint(path)
    assert caught.value.check == "content"
    assert not (tmp_path / "executed").exists()


def test_a_refused_checkpoint_ends_training_with_status_2_and_no_output(
    proof: tuple[Path, str], tmp_path: Path
) -> None:
    path = cut_of(proof, tmp_path, lambda body: body["identity"].update(data="sha256:0"))
    output = tmp_path / "runs" / "out"
    arguments = ["--steps", "5", "--resume", str(path), "--output", str(output)]
    done = start(SCRIPTS / "train.py", *arguments)
    assert done.returncode == 2
    assert "refused (data)" in done.stderr
    assert not output.parent.exists()


def test_state_is_not_read_while_a_gradient_is_pending() -> None:
    """K7."""
    experiment = object.__new__(Experiment)
    experiment.model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    experiment.model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients are pending"):
        experiment.state()
