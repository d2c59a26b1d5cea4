"""``open_run`` and what it gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dist_ckpt
from dist_ckpt.canonical import step_name
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    ForeignFileError,
    MismatchError,
    NotFoundError,
    SettingError,
)
from dist_ckpt.runs import list_rows, open_run, read_status, write_export
from dist_ckpt.runs._listing import parse_head
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import RecordingOps
from helpers.generating import adam_part, change_byte, write_generation
from helpers.run_dirs import STEPS, ended_run, killed_run, snapshot_of, spawn, write_manifest


def small_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 1),
    )


def test_a_run_tells_its_name_generations_losses_and_events(tmp_path: Path) -> None:
    run = dist_ckpt.open_run(ended_run(tmp_path))
    assert (run.name, run.path) == ("small", tmp_path / "small")
    assert [generation.step for generation in run.generations()] == list(STEPS)
    latest = run.latest()
    assert latest is not None
    assert latest.step == 12
    assert latest.path == tmp_path / "small/checkpoints/step_000012"
    assert latest.manifest.world_size == 1
    assert latest.verified_at is not None
    assert [step for step, _ in run.loss()] == list(range(1, 13))
    assert run.journal()[-1]["event"] == "attempt_ended"


def test_generations_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Case 5: as texts, step_9900 comes after step_10000, also with the names' six digits."""
    run_dir = ended_run(tmp_path)
    point = open_run(run_dir).generation(12).manifest
    for step in (9_900, 10_000, 999_900, 1_000_000):
        write_manifest(run_dir / "checkpoints" / step_name(step), point, step=step)
    steps = [4, 8, 12, 9_900, 10_000, 999_900, 1_000_000]
    run = open_run(run_dir)
    assert [generation.step for generation in run.generations()] == steps
    assert [row.step for row in list_rows(run.store)] == steps
    latest = run.latest()
    assert latest is not None
    assert latest.step == 1_000_000


def test_a_step_that_is_missing_is_answered_with_those_there_are(tmp_path: Path) -> None:
    run = open_run(ended_run(tmp_path))
    with pytest.raises(NotFoundError, match=r"step 5.*4, 8, 12"):
        run.generation(5)


def test_a_run_without_generations_has_no_latest(tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    run = open_run(run_dir)
    assert run.latest() is None
    assert (run.generations(), run.loss(), run.journal()) == ([], [], [])


def test_a_whole_generation_verifies_and_a_changed_byte_is_named(tmp_path: Path) -> None:
    generation = open_run(ended_run(tmp_path)).generation(8)
    seen: list[int] = []
    size = sum(int(record["size_bytes"]) for record in generation.manifest.files.values())
    assert generation.verify(progress=seen.append) == size == sum(seen)
    change_byte(generation.path / "rank_00000.state", 5)
    with pytest.raises(DigestMismatchError, match=r"rank_00000\.state"):
        generation.verify()


def test_a_tensor_is_given_by_its_key_or_its_name(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    generation = open_run(run_dir).generation(8)
    state = dist_ckpt.read_bin(run_dir / "step_000008.bin")
    weight = generation.tensor("0.weight")
    assert weight.shape == (16, 6)
    assert torch.equal(weight, generation.tensor("model/0.weight"))
    assert weight.numpy().tobytes() == state.weights[:96].tobytes()
    moment = generation.tensor("optimizer/0.weight/exp_avg_sq")
    assert moment.numpy().tobytes() == state.v[:96].tobytes()
    assert int(generation.tensor("1.num_batches_tracked")) == 8


def test_a_tensor_that_is_missing_is_answered_with_similar_names(tmp_path: Path) -> None:
    generation = open_run(ended_run(tmp_path)).generation(8)
    with pytest.raises(NotFoundError, match=r"0\.weight"):
        generation.tensor("0.weigth")


def test_a_tensor_whose_bytes_changed_is_refused(tmp_path: Path) -> None:
    generation = open_run(ended_run(tmp_path)).generation(8)
    change_byte(generation.path / "rank_00000.shard", 50)
    with pytest.raises(DigestMismatchError):
        generation.tensor("0.weight")


def test_a_tensor_of_several_ranks_is_put_together(tmp_path: Path) -> None:
    weights = {name: torch.randn(5, 3) for name in ("a", "b", "c")}
    write_generation(tmp_path / "ranks", [adam_part(weights), adam_part(weights)])
    generation = open_run(tmp_path / "ranks").generation(100)
    assert generation.manifest.world_size == 2
    for name, weight in weights.items():
        assert torch.equal(generation.tensor(name), weight)


def test_weights_alone_load_into_a_model_and_leave_random_state_alone(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    model = small_model()
    before = torch.get_rng_state()
    open_run(run_dir).generation(8).load_into(model=model)
    assert torch.equal(before, torch.get_rng_state())
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    state = dist_ckpt.read_bin(run_dir / "step_000008.bin")
    assert flat.numpy().tobytes() == state.weights.tobytes()
    assert model.state_dict()["1.num_batches_tracked"] == 8


def test_optimizer_and_scheduler_load_with_their_groups(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    generation = open_run(run_dir).generation(8)
    generation.load_into(model=model, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.009)
    assert scheduler.last_epoch == 8
    state = dist_ckpt.read_bin(run_dir / "step_000008.bin")
    moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])
    assert moments.numpy().tobytes() == state.m.tobytes()


def test_a_model_that_does_not_fit_is_refused_and_unchanged(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 17))
    before = model.state_dict()["0.weight"].clone()
    with pytest.raises(MismatchError, match=r"0\.weight"):
        open_run(ended_run(tmp_path)).generation(8).load_into(model=model)
    assert torch.equal(model.state_dict()["0.weight"], before)


def test_values_of_a_rank_that_did_not_save_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="1 rank, none is 1"):
        open_run(ended_run(tmp_path)).generation(8).load_into(model=small_model(), rank=1)


def test_the_path_of_a_generation_is_a_run_of_one(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    run = open_run(run_dir / "checkpoints/step_000008")
    assert [generation.step for generation in run.generations()] == [8]
    assert run.name == "ended"  # what the manifest says, not the directory
    assert len(run.loss()) == 12


def test_a_generation_copied_elsewhere_under_another_name_can_be_read(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    copy = tmp_path / "elsewhere" / "best"
    shutil.copytree(run_dir / "checkpoints/step_000008", copy)
    generation = open_run(copy).latest()
    assert generation is not None
    assert (generation.step, generation.path) == (8, copy)
    generation.verify()
    assert generation.tensor("0.weight").shape == (16, 6)


def test_a_generation_of_a_wrong_name_is_refused(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "checkpoints/step_000008").rename(run_dir / "checkpoints/step_000009")
    with pytest.raises(CorruptFileError, match="step 8, in the directory of step 9"):
        _ = open_run(run_dir).generation(9).manifest


def test_the_current_directory_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    monkeypatch.chdir(run_dir)
    assert open_run(".").name == "small"
    monkeypatch.chdir(run_dir / "checkpoints/step_000008")
    generation = open_run(".").latest()
    assert generation is not None
    assert generation.manifest.step == 8


def test_what_is_no_run_is_refused_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_run(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ForeignFileError, match="isn't a run directory"):
        open_run(empty)
    # A snapshot of torchsnapshot's own has no file that only we write.
    (empty / "checkpoints/step_000001").mkdir(parents=True)
    (empty / "checkpoints/step_000001/.snapshot_metadata").write_text("{}")
    with pytest.raises(ForeignFileError):
        open_run(empty)
    run_dir = ended_run(tmp_path)
    with pytest.raises(ForeignFileError, match="a single file of weights and moments"):
        open_run(run_dir / "step_000008.bin")


def test_an_export_for_inference_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Case 20: what holds weights only can't be taken for a resume point."""
    pytest.importorskip("safetensors")
    path = tmp_path / "ema.safetensors"
    generation = open_run(ended_run(tmp_path)).generation(8)
    write_export(generation, path, "safetensors", weights_only=True)
    with pytest.raises(ForeignFileError, match=r"step 8 of ended.*can't be resumed"):
        open_run(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"nope!", b"\0" * 8])
def test_a_hostile_safetensors_file_is_refused_without_reading_it(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ForeignFileError):
        open_run(path)


def test_looking_at_a_run_imports_no_torch(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    code = f"""
import sys
import dist_ckpt
run = dist_ckpt.open_run({str(run_dir)!r})
latest = run.latest()
latest.manifest, latest.verified_at, latest.tensors, latest.verify()
run.loss(), run.journal(), run.generations()
from dist_ckpt.runs import list_rows, read_status
list_rows(run.store), read_status(run)
print([name for name in ("torch", "torchsnapshot", "typer", "rich") if name in sys.modules])
"""
    done = spawn(code=code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_head_of_a_manifest_says_what_the_whole_says(tmp_path: Path) -> None:
    generation = open_run(ended_run(tmp_path)).generation(8)
    point = generation.manifest
    data = (generation.path / "resume_point.json").read_bytes()
    sizes = {name: record["size_bytes"] for name, record in point.files.items()}
    sizes[".snapshot_metadata"] = point.index["size_bytes"]
    assert parse_head(data) == (8, point.time, ("cadence",), 1, point.num_bytes, sizes)
    # A manifest laid out otherwise is read whole instead.
    assert parse_head(data.replace(b"\n", b"")) is None
    assert parse_head(b"") is None
    assert parse_head(b'{"step": []' + b',\n "index": ') is None


def test_a_generation_that_is_not_verified_is_checked_whole_in_a_list(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "checkpoints/step_000008/resume_point.json"
    change_byte(path, -40)  # within its digest of itself, far behind what a list shows
    rows = {row.step: row for row in list_rows(open_run(run_dir).store)}
    assert rows[8].fault is not None
    assert rows[8].verified_at is None
    assert rows[4].fault is None


def test_two_thousand_generations_are_listed_with_few_files_read_for_each(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    point = open_run(run_dir).generation(12).manifest
    for number in range(2_000):
        step = 100 + number
        directory = run_dir / "checkpoints" / step_name(step)
        write_manifest(directory, point, verified=False, step=step)
    ops = RecordingOps()
    with use_ops(ops):
        rows = list_rows(open_run(run_dir).store)
    assert len(rows) == 2_000 + len(STEPS)
    # Work instead of time: other tests run beside this one.
    assert len(ops.of("open")) <= 3 * len(rows) + 20


def test_looking_changes_nothing(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    before = snapshot_of(run_dir)
    run = open_run(run_dir)
    assert (len(list_rows(run.store)), read_status(run).last_step) == (len(STEPS), 14)
    latest = run.latest()
    assert latest is not None
    latest.verify()
    latest.tensor("0.weight")
    assert snapshot_of(run_dir) == before
