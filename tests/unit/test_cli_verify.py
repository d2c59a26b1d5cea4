"""``dist-ckpt verify``: each fault is named, nothing is written, nothing to check is no success."""

from __future__ import annotations

import os
import pty
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_ckpt.export import export_bin
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume_point import encode_resume_point
from dist_ckpt.runs import Depth, check_generation, open_run
from helpers.generating import adam_part, change_byte, write_generation
from helpers.hostile import resealed
from helpers.run_dirs import call, ended_run, snapshot_of, spawn

SHARD, STATE = "rank_00000.shard", "rank_00000.state"


def overwrite(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def own_bin(run_dir: Path, step: int) -> Path:
    """The .bin is a file of its own, and no link to the shard any more."""
    path = run_dir / f"step_{step:06d}.bin"
    overwrite(path, path.read_bytes())
    return path


def test_a_whole_run_is_status_0_and_every_byte_was_read(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("verify", run_dir)
    assert (called.status, called.err) == (0, "")
    assert called.out.splitlines()[-1].startswith("3 generations, 3 .bin: ")
    assert "no fault" in called.out
    document = call("verify", run_dir, "--json").json
    assert (document["ok"], document["faults"], document["refused"]) == (True, [], [])
    generations = [found for found in document["findings"] if found["kind"] == "generation"]
    assert [found["step"] for found in generations] == [4, 8, 12]
    for found in generations:
        point = open_run(run_dir).generation(found["step"]).manifest
        assert found["bytes_read"] == point.num_bytes
        assert found["digests_compared"] == 4  # manifest, index, two files of a piece each
    bins = [found for found in document["findings"] if found["kind"] == "bin"]
    assert [found["bytes_read"] for found in bins] == [8 + 12 * 161] * 3


def test_one_generation_is_checked_with_its_bin(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000004" / STATE, 9)
    findings = call("verify", f"{run_dir}@8", "--json").json["findings"]
    assert [(found["kind"], found["step"]) for found in findings] == [("generation", 8), ("bin", 8)]
    directory = run_dir / "checkpoints/step_000004"
    assert call("verify", f"{run_dir}@4").status == 1
    assert call("verify", directory).status == 1


def test_verifying_writes_nothing(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000004" / STATE, 9)
    (run_dir / "checkpoints/step_000008/verified.json").unlink()
    before = snapshot_of(run_dir)
    for option in ([], ["--quick"], ["--sample", "5%"]):
        call("verify", run_dir, *option)
    assert snapshot_of(run_dir) == before


@pytest.mark.parametrize(
    ("name", "fault", "error_id"),
    [
        (SHARD, lambda path: change_byte(path, 20), "digest-mismatch"),
        (STATE, lambda path: change_byte(path, -1), "digest-mismatch"),
        (SHARD, lambda path: overwrite(path, b""), "corrupt-file"),
        (STATE, lambda path: overwrite(path, path.read_bytes()[:-1]), "corrupt-file"),
        (SHARD, lambda path: overwrite(path, path.read_bytes() + b"\0"), "corrupt-file"),
        (SHARD, lambda path: path.unlink(), "not-found"),
        (STATE, lambda path: (path.unlink(), path.mkdir()), "foreign-file"),
        (SHARD, lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "foreign-file"),
        (".snapshot_metadata", lambda path: change_byte(path, 30), "digest-mismatch"),
        (".snapshot_metadata", lambda path: path.unlink(), "not-found"),
        ("resume_point.json", lambda path: change_byte(path, 200), "corrupt-file digest-mismatch"),
        ("resume_point.json", lambda path: overwrite(path, b""), "corrupt-file"),
        ("resume_point.json", lambda path: overwrite(path, b"[" * 100_000), "corrupt-file"),
        ("resume_point.json", lambda path: overwrite(path, b"{}"), "corrupt-file"),
        ("resume_point.json", lambda path: path.unlink(), "not-found"),
    ],
)
def test_a_fault_is_named_and_status_1(
    tmp_path: Path, name: str, fault: Callable[[Path], object], error_id: str
) -> None:
    run_dir = ended_run(tmp_path)
    own_bin(run_dir, 8)
    path = run_dir / "checkpoints/step_000008" / name
    fault(path)
    called = call("verify", run_dir, "--json")
    assert called.status == 1
    faults = [item for item in called.json["faults"] if item["path"] == str(path)]
    assert faults
    assert faults[0]["id"] in error_id.split()
    assert [f["ok"] for f in called.json["findings"] if f["step"] in (4, 12)] == [True] * 4
    text = call("verify", run_dir)
    assert text.status == 1
    assert str(path) in text.out
    assert "FAULTY" in text.out


def test_the_faults_of_all_files_are_named_at_once(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    for step, name in ((4, SHARD), (4, STATE), (12, STATE)):
        change_byte(run_dir / f"checkpoints/step_{step:06d}" / name, 40)
    paths = [fault["path"] for fault in call("verify", run_dir, "--json").json["faults"]]
    assert {Path(path).parent.name + "/" + Path(path).name for path in paths} >= {
        f"step_000004/{SHARD}",
        f"step_000004/{STATE}",
        f"step_000012/{STATE}",
    }


def test_every_bad_piece_of_a_file_is_named(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(4 << 20)}  # three times 16 MiB, and the header
    write_generation(tmp_path / "big", [adam_part(weights)])
    path = tmp_path / "big/checkpoints/step_000100" / SHARD
    change_byte(path, 100)
    change_byte(path, -1)
    finding = check_generation(GenerationStore(tmp_path / "big"), 100, Depth())
    assert [("piece 0" in f.message, "piece 3" in f.message) for f in finding.faults] == [
        (True, False),
        (False, True),
    ]
    # A sample sees it sooner or later; a whole share always does.
    assert call("verify", tmp_path / "big", "--sample", "100%").status == 1


def test_a_quick_check_reads_sizes_and_manifests_only(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "checkpoints/step_000008" / STATE
    change_byte(path, 40)
    called = call("verify", run_dir, "--quick", "--json")
    assert (called.status, called.json["bytes_read"]) == (0, 0)
    assert "sizes and manifests only" in call("verify", run_dir, "--quick").out
    overwrite(path, path.read_bytes()[:-1])
    assert call("verify", run_dir, "--quick").status == 1


def test_a_sample_reads_a_piece_of_each_file_at_least(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("verify", run_dir, "--sample", "5%", "--json")
    assert (called.status, called.json["sample"]) == (0, 0.05)
    assert called.json["digests_compared"] == 12
    change_byte(run_dir / "checkpoints/step_000008" / STATE, 40)
    assert call("verify", run_dir, "--sample", "0.05").status == 1


@pytest.mark.parametrize("share", ["0", "0%", "101%", "-5%", "nan", "five", "5%%", "inf"])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: str) -> None:
    called = call("verify", ended_run(tmp_path), "--sample", share, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "setting")


def test_quick_and_sample_contradict_each_other(tmp_path: Path) -> None:
    assert call("verify", ended_run(tmp_path), "--quick", "--sample", "5%").status == 2


def test_nothing_to_check_is_status_2(tmp_path: Path) -> None:
    """Case 55: an empty or foreign directory isn't "0 objects checked, ok"."""
    empty, foreign, fresh = tmp_path / "empty", tmp_path / "foreign", tmp_path / "fresh"
    for directory in (empty, foreign / "checkpoints/step_000100", fresh / "checkpoints"):
        directory.mkdir(parents=True)
    (foreign / "checkpoints/step_000100/pytorch_model.bin").write_bytes(b"x")
    (fresh / "run.json").write_text("{}")
    shutil.copy(Path(__file__), tmp_path / "some.py")
    for path in (
        empty, foreign, fresh, foreign / "checkpoints/step_000100", tmp_path / "none",
        tmp_path / "none.bin", tmp_path / "some.py",
    ):  # fmt: skip
        called = call("verify", path)
        assert (called.status, called.out) == (2, ""), path
        assert len(called.err.splitlines()) <= 2
        assert "error" in call("verify", path, "--json").json


@pytest.mark.parametrize("bins", [True, False])
def test_generations_that_vanished_are_a_fault(tmp_path: Path, bins: bool) -> None:
    """A whole .bin or two don't make a run healthy whose training would refuse to go on."""
    run_dir = ended_run(tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    for path in () if bins else run_dir.glob("step_*"):
        path.unlink()
    called = call("verify", run_dir)
    assert called.status == 1
    assert f"{run_dir} has no generation, though the journal tells of step 12." in called.out
    assert called.out.splitlines()[-1].endswith("1 fault")
    faults = call("verify", run_dir, "--json").json["faults"]
    assert [(fault["id"], fault["path"]) for fault in faults] == [
        ("not-found", str(run_dir / "checkpoints"))
    ]


def test_a_foreign_directory_among_generations_is_status_2(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "checkpoints/step_000100").mkdir()
    called = call("verify", run_dir, "--json")
    assert called.status == 2
    assert called.json["faults"] == []
    assert "step_000100" in called.json["refused"][0]["path"]
    # A fault weighs more than what couldn't be checked.
    change_byte(run_dir / "checkpoints/step_000004" / STATE, 40)
    assert call("verify", run_dir).status == 1


def test_a_later_format_version_is_refused_and_not_called_faulty(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "checkpoints/step_000008/resume_point.json"
    data = encode_resume_point(open_run(run_dir).generation(8).manifest)
    overwrite(path, resealed(data.replace(b'"version": 1', b'"version": 2', 1)))
    called = call("verify", run_dir, "--json")
    assert (called.status, called.json["refused"][0]["id"]) == (2, "format-version")
    assert call("show", f"{run_dir}@8").status == 2


def test_a_generation_that_is_retired_meanwhile_is_no_fault(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    store = GenerationStore(run_dir)

    def retire(_num_bytes: int) -> None:
        if 8 in store.steps():
            store.retire(8)

    finding = check_generation(store, 8, Depth(), progress=retire)
    assert not store.path(8).exists()
    assert (finding.is_gone, finding.faults, finding.refused) == (True, [], None)


# A .bin


def test_a_bin_is_checked_by_its_sum(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = tmp_path / "copy.bin"
    shutil.copy(run_dir / "step_000008.bin", path)
    alone = call("verify", path, "--json")
    assert alone.status == 0
    assert any("no .sha256" in note for note in alone.json["findings"][0]["notes"])
    (tmp_path / "copy.bin.sha256").write_text(
        (run_dir / "step_000008.bin.sha256").read_text().replace("step_000008", "copy")
    )
    assert call("verify", path, "--json").json["digests_compared"] == 1
    path.chmod(0o600)
    change_byte(path, 300)
    called = call("verify", path, "--json")
    assert (called.status, called.json["faults"][0]["id"]) == (1, "digest-mismatch")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08\0\0",
        b"\x08\0\0\0\x01\0\0\0",
        b"\xff" * 8,
        b"\0\0\0\0\xff\xff\xff\x7f",
        b"\x08\0\0\0\x01\0\0\0" + b"\0" * 13,
        b"PK\x03\x04" + b"\0" * 1000,
    ],
)
def test_a_bin_that_is_none_is_status_1_with_the_numbers(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    called = call("verify", path)
    assert called.status == 1
    assert any(number in called.out for number in (str(len(data)), "negative", "-1"))


def test_a_bin_under_another_name_is_known_by_its_header(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = tmp_path / "weights.foo"
    assert call("export", f"{run_dir}@8", "-o", path, "--format", "bin").status == 0
    checked = call("verify", path, "--json")
    assert (checked.status, checked.json["digests_compared"]) == (0, 1)
    assert call("show", path, "--json").json["step"] == 8
    assert "a single file of weights and moments" in call("ls", path).err
    change_byte(path, 300)
    assert call("verify", path).status == 1
    path.write_bytes(path.read_bytes()[:-1])
    for command in ("verify", "show"):
        called = call(command, path)
        assert called.status == 2
        assert "neither a run directory nor a .bin" in called.err
        assert "Name a run directory, a generation, or a .bin" in called.err


def test_a_sum_that_is_none_is_a_fault(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    sum_path = run_dir / "step_000008.bin.sha256"
    for text in ("", "x" * 64, "0" * 64 + "  other.bin\n", "0" * 63 + "  step_000008.bin\n"):
        overwrite(sum_path, text.encode())
        called = call("verify", run_dir, "--json")
        assert called.status == 1
        assert called.json["faults"][0]["path"] == str(sum_path)
    overwrite(sum_path, ("0" * 64 + "  step_000008.bin\n").encode())
    assert call("verify", run_dir).status == 1
    sum_path.unlink()
    assert call("verify", run_dir).status == 0


def test_a_bin_of_its_own_is_compared_with_its_generation(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    path = own_bin(run_dir, 8)
    assert call("verify", run_dir).status == 0
    change_byte(path, 300)
    (run_dir / "step_000008.bin.sha256").unlink()
    assert call("verify", run_dir).status == 1
    called = call("verify", path)  # in its run directory, by its own path
    assert called.status == 1
    assert "its generation" in called.out


def test_the_bin_of_another_step_is_a_fault(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "step_000008.bin.sha256").unlink()
    overwrite(run_dir / "step_000008.bin", (run_dir / "step_000004.bin").read_bytes())
    called = call("verify", run_dir)
    assert called.status == 1
    assert "has step 4; its generation has 8" in called.out


def test_a_bin_without_its_generation_is_checked_too(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    shutil.rmtree(run_dir / "checkpoints/step_000004")
    findings = call("verify", run_dir, "--json").json["findings"]
    assert ("bin", 4) in [(found["kind"], found["step"]) for found in findings]
    path = own_bin(run_dir, 4)
    change_byte(path, 300)
    assert call("verify", run_dir).status == 1


def test_an_assembled_bin_is_compared_with_the_shards_of_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "ranks"
    part = adam_part({name: torch.randn(50, 3) for name in ("a", "b", "c")})
    point = write_generation(run_dir, [part, part])
    assert export_bin(GenerationStore(run_dir), point) == "assembled"
    assert call("verify", run_dir, "--json").json["digests_compared"] == 8
    (run_dir / "step_000100.bin.sha256").unlink()
    change_byte(run_dir / "step_000100.bin", 100)
    assert call("verify", run_dir).status == 1


def test_a_progress_bar_is_drawn_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    assert call("verify", run_dir).err == ""
    for option, drawn in (([], True), (["--json"], False)):
        ours, theirs = pty.openpty()
        try:
            done = spawn("verify", run_dir, *option, stderr=theirs, env={"TERM": "xterm"})
            os.set_blocking(ours, False)
            try:
                seen = os.read(ours, 1 << 16)
            except BlockingIOError:
                seen = b""
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == 0
        assert (b"verifying" in seen) == drawn
        assert "verifying" not in done.stdout
