"""``dist-ckpt export``."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.capture import Captured
from dist_ckpt.runs import FORMATS, open_run
from helpers.generating import adam_part, change_byte, part_of, write_generation
from helpers.run_dirs import call, ended_run, snapshot_of


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata as the safetensors library reads them."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def test_a_bin_is_written_with_its_sum_and_the_run_is_left_alone(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    before = snapshot_of(run_dir)
    called = call("export", f"{run_dir}@8", "-o", tmp_path / "out.bin")
    assert (called.status, called.err) == (0, "")
    assert snapshot_of(run_dir) == before
    assert (tmp_path / "out.bin").read_bytes() == (run_dir / "step_000008.bin").read_bytes()
    assert (tmp_path / "out.bin").stat().st_nlink == 1
    command = ["sha256sum", "-c", "out.bin.sha256"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert checked.returncode == 0
    assert call("verify", tmp_path / "out.bin").status == 0


def test_the_answer_names_files_sums_and_that_they_cannot_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    document = call("export", ended_run(tmp_path), "-o", path, "--json").json
    assert (document["run"], document["step"], document["resumable"]) == ("ended", 12, False)
    (file,) = document["files"]
    assert file["path"] == str(path)
    assert file["format"] == "bin"
    assert file["num_bytes"] == 8 + 12 * 161
    assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_directory_gets_a_file_with_the_steps_name(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    called = call("export", f"{ended_run(tmp_path)}@8", "-o", tmp_path / "out")
    assert called.status == 0
    assert (tmp_path / "out/step_000008.bin").exists()


def test_weights_for_inference_say_that_they_cannot_be_resumed(tmp_path: Path) -> None:
    """Case 20: in the answer, in the file, and when somebody tries."""
    path = tmp_path / "w.safetensors"
    run_dir = ended_run(tmp_path)
    called = call("export", f"{run_dir}@8", "-o", path, "--weights-only")
    assert called.status == 0
    assert "can't be resumed" in called.out
    tensors, metadata = load(path)
    assert metadata == {
        "format": "pt",
        "dist_ckpt": "weights for inference; can't be resumed",
        "step": "8",
        "run": "ended",
    }
    generation = open_run(run_dir).generation(8)
    names = {key.removeprefix("model/") for key in generation.tensors if key.startswith("model/")}
    assert tensors.keys() == names
    for name, tensor in tensors.items():
        assert torch.equal(tensor, generation.tensor(name))
    for words in (
        ("status", path),
        ("import", path, tmp_path / "new", "--", "python", "train.py"),
        ("fork", path, tmp_path / "new"),
        ("ship", path, tmp_path / "new"),
    ):
        refused = call(*words)
        assert refused.status == 2
        assert "weights for inference; can't be resumed" in refused.err
    assert not (tmp_path / "new").exists()


def test_safetensors_without_further_words_hold_the_optimizer_too(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    run_dir = ended_run(tmp_path)
    assert call("export", f"{run_dir}@8", "-o", path).status == 0
    tensors, metadata = load(path)
    assert torch.equal(
        tensors["optimizer/0.weight/exp_avg"],
        open_run(run_dir).generation(8).tensor("optimizer/0.weight/exp_avg"),
    )
    assert "can't be resumed" in metadata["dist_ckpt"]


def test_both_formats_at_once_take_their_endings(tmp_path: Path) -> None:
    called = call(
        "export", ended_run(tmp_path), "-o", tmp_path / "both", "--format", "bin,safetensors"
    )
    assert called.status == 0
    for name in ("both.bin", "both.safetensors"):
        assert (tmp_path / name).exists()
        assert (tmp_path / f"{name}.sha256").exists()


def test_names_with_dots_keep_them_and_collide_with_none(tmp_path: Path) -> None:
    """Case: a run a learning rate. What comes after the dot is no ending of ours."""
    run_dir = ended_run(tmp_path)
    words = ("export", run_dir, "--format", "bin,safetensors", "-o")
    for name in ("lr.0001", "lr.0003", "all.v2.bin", "all.v3.safetensors"):
        assert call(*words, tmp_path / name).status == 0
    stems = ("lr.0001", "lr.0003", "all.v2", "all.v3")
    names = {f"{stem}.{kind}{sha}" for stem in stems for kind in FORMATS for sha in ("", ".sha256")}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == names


def test_tensors_of_several_ranks_and_kinds_are_exported(tmp_path: Path) -> None:
    weights = {name: torch.randn(5, 3) for name in ("a", "b/c", "d")}
    buffers = {"count": torch.tensor(7), "half": torch.randn(3).bfloat16(), "none": torch.zeros(0)}
    part = adam_part(weights, buffers=buffers)
    write_generation(tmp_path / "ranks", [part, part])
    path = tmp_path / "w.safetensors"
    assert call("export", tmp_path / "ranks", "-o", path, "--weights-only").status == 0
    tensors, _ = load(path)
    assert tensors.keys() == weights.keys() | buffers.keys()
    for name, tensor in {**weights, **buffers}.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_tied_weights_are_written_once_and_named_as_safetensors_does(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    captured = Captured(model, torch.optim.AdamW(model.parameters()))
    write_generation(tmp_path / "tied", [part_of(captured)])
    path = tmp_path / "w.safetensors"
    assert call("export", tmp_path / "tied", "-o", path, "--weights-only").status == 0
    tensors, metadata = load(path)
    assert list(tensors) == ["embedding.weight"]
    assert metadata["head.weight"] == "embedding.weight"
    other = Tied()
    loading: Any = importlib.import_module("safetensors.torch")
    assert loading.load_model(other, path) == (set(), [])
    assert torch.equal(other.head.weight, model.embedding.weight)


def test_a_file_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = tmp_path / "out.bin"
    for name in ("out.bin", "out.bin.sha256"):
        (tmp_path / name).write_text("mine")
        called = call("export", run_dir, "-o", path)
        assert called.status == 2
        assert "--force" in called.err
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    path.write_text("mine")
    assert call("export", run_dir, "-o", path, "--force").status == 0
    assert dist_ckpt.read_bin(path).step == 12


def test_a_faulty_generation_is_not_exported(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000008/rank_00000.state", 40)
    called = call("export", f"{run_dir}@8", "-o", tmp_path / "out.bin", "--json")
    assert (called.status, called.json["error"]["id"]) == (1, "corrupt-file")
    assert not list(tmp_path.glob("*out.bin*"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-o", "x.bin", "--weights-only"], "--format safetensors"),
        (["-o", "x", "--format", "pickle"], "pickle"),
        (["-o", "x", "--format", "bin,"], "''"),
        (["-o", "none/x.bin"], "isn't a directory"),
        (["-o", "none/"], "names a directory, and there is none"),
        (["-o", "small/checkpoints/x.bin"], "outside of checkpoints/"),
        (["-o", "small/checkpoints/step_000008/x.bin"], "outside of checkpoints/"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000012/rank_00000.state", 40)  # would be status 1
    monkeypatch.chdir(tmp_path)
    before = snapshot_of(tmp_path)
    called = call("export", run_dir, *arguments)
    assert called.status == 2
    assert word in called.err
    assert snapshot_of(tmp_path) == before


def test_a_generation_that_has_no_canonical_file_says_why(tmp_path: Path) -> None:
    part = adam_part({"a": torch.randn(3, dtype=torch.float64)}, moment_dtype=torch.float64)
    write_generation(tmp_path / "double", [part])
    called = call("export", tmp_path / "double", "-o", tmp_path / "x.bin")
    assert called.status == 2
    assert "no canonical file" in called.err
    assert not list(tmp_path.glob("*x.bin*"))


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    called = call("export", ended_run(tmp_path), "-o", tmp_path / "x.safetensors")
    assert called.status == 2
    assert "pip install safetensors" in called.err
    assert not list(tmp_path.glob("*x.safetensors*"))


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    part = adam_part({"a": torch.randn(3)}, buffers={"z": torch.zeros(2, dtype=torch.complex128)})
    write_generation(tmp_path / "complex", [part])
    called = call("export", tmp_path / "complex", "-o", tmp_path / "x.safetensors")
    assert called.status == 2
    assert "z is complex128" in called.err


def test_the_documents_are_json_of_their_own(tmp_path: Path) -> None:
    called = call("export", ended_run(tmp_path), "-o", tmp_path / "x.bin", "--json")
    assert len(called.out.splitlines()) == 1
    json.loads(called.out)
