"""``dist-ckpt reshard`` and ``launch/reshard.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dist_ckpt.generations import GenerationStore
from helpers.generating import change_byte
from helpers.run_dirs import call, ended_run, snapshot_of
from helpers.trainers import ROOT


def test_the_answer_says_what_was_made_of_what(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    before = snapshot_of(run)
    called = call("reshard", f"{run}@8", "--world-size", "3", "-o", tmp_path / "new", "--json")
    assert (called.status, called.err) == (0, "")
    document = called.json
    point = GenerationStore(tmp_path / "new").manifest(8)
    assert document["path"] == str(tmp_path / "new")
    assert (document["run"], document["step"], document["id"]) == ("new", 8, point.id)
    assert (document["world_size"], document["source"]["world_size"]) == (3, 1)
    assert document["source"]["path"] == str(run / "checkpoints/step_000008")
    assert document["bytes"] == point.num_bytes
    assert (document["verified"], document["canonical_is_shard"]) == (True, False)
    assert document["memory_bytes"] == 256 << 20
    assert any("ranks 1 to 2" in note for note in document["notes"])
    assert snapshot_of(run) == before
    assert call("verify", tmp_path / "new").status == 0
    assert call("ls", tmp_path / "new", "--json").json["generations"][0]["reasons"] == ["reshard"]
    back = call("reshard", tmp_path / "new", "--world-size", "1", "-o", tmp_path / "back")
    assert back.status == 0
    assert "3 → 1 ranks" in back.out
    assert call("diff", f"{run}@8", tmp_path / "back").status == 0
    shard = tmp_path / "back/checkpoints/step_000008/rank_00000.shard"
    assert shard.read_bytes() == (run / "step_000008.bin").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--world-size", "0", "-o", "new"], "isn't a number of ranks"),
        (["--world-size", "100001", "-o", "new"], "more than a generation is rewritten for"),
        (["--world-size", "two", "-o", "new"], "valid integer"),
        (["--world-size", "2"], "--output"),
        (["--world-size", "2", "-o", "small"], "is there already"),
        (["--world-size", "2", "-o", "small/new"], "inside the run"),
        (["--world-size", "2", "-o", "none/new"], "isn't a directory"),
        (["--world-size", "2", "-o", "new", "--memory", "much"], "isn't a size"),
        (["--world-size", "2", "-o", "new", "--memory", "99KB"], "Give at least"),
    ],
)
def test_what_cant_be_done_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    run = ended_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = snapshot_of(tmp_path)
    called = call("reshard", run, *arguments)
    assert called.status == 2
    assert word in called.err
    assert snapshot_of(tmp_path) == before


def test_sizes_are_taken_as_they_are_written(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    for number, (text, wanted) in enumerate({"64MiB": 64 << 20, "64MB": 64 * 10**6}.items()):
        out = tmp_path / f"new-{number}"
        called = call("reshard", run, "--world-size", "2", "-o", out, "--memory", text, "--json")
        assert called.json["memory_bytes"] == wanted
        assert called.json["chunk_bytes"] < 16 << 20


def test_a_faulty_source_is_status_1_and_names_the_file(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    change_byte(run / "checkpoints/step_000012/rank_00000.state", -30)
    called = call("reshard", run, "--world-size", "2", "-o", tmp_path / "new", "--json")
    assert (called.status, called.json["error"]["id"]) == (1, "digest-mismatch")
    assert "rank_00000.state" in called.json["error"]["message"]
    (run / "checkpoints/step_000008/rank_00000.state").unlink()
    called = call("reshard", f"{run}@8", "--world-size", "2", "-o", tmp_path / "new")
    assert called.status == 1
    assert "rank_00000.state is missing" in called.err
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_generation_outside_of_a_run_brings_no_history(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    (run / "checkpoints/step_000008").rename(tmp_path / "lone")
    (tmp_path / "stranger.loss.json").write_text("[\n[8, 0.5]]", encoding="utf-8")
    assert (
        call("reshard", tmp_path / "lone", "--world-size", "2", "-o", tmp_path / "new").status == 0
    )
    assert call("ls", tmp_path / "new", "--json").json["generations"][0]["step"] == 8
    assert (tmp_path / "new/new.loss.json").read_text(encoding="utf-8").strip() == "[]"


def test_a_generation_in_the_archive_brings_the_losses_that_led_to_it(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    losses = call("loss", run, "--json").json["runs"][0]["entries"]
    assert call("rewind", f"{run}@8").status == 0
    archived = run / "archive/rewind_to_000008/step_000012"
    assert call("reshard", archived, "--world-size", "2", "-o", tmp_path / "new").status == 0
    assert call("loss", tmp_path / "new", "--json").json["runs"][0]["entries"] == losses
    assert losses[-1][0] == 12
    inside = call("reshard", archived, "--world-size", "2", "-o", run / "archive/inside")
    assert (inside.status, "inside the run" in inside.err) == (2, True)


def test_the_script_in_launch_is_the_command(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    words = [run, "--world-size", "2", "-o", tmp_path / "new"]
    done = subprocess.run(
        [sys.executable, ROOT / "launch/reshard.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 → 2 ranks" in done.stdout
    assert done.stderr == ""  # no bar where there is no terminal
    assert GenerationStore(tmp_path / "new").manifest(12).world_size == 2
