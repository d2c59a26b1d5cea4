"""``dist-ckpt ship`` to a directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import dist_ckpt
from dist_ckpt import lifecycle, storage
from dist_ckpt.canonical import bin_size
from dist_ckpt.capture import Captured
from dist_ckpt.errors import NoSpaceError, UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.runs import open_run, pivot_run
from dist_ckpt.shipping import parse_place, ship
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps, faults_environment, read_strikes
from helpers.generating import adam_part, change_byte, part_of, write_generation
from helpers.pivoting import Training
from helpers.reliability import record_fault
from helpers.run_dirs import (
    call,
    ended_run,
    killed_run,
    options_of,
    snapshot_of,
    spawn,
    write_manifest,
)
from helpers.trainers import ROOT, final, train

FOLDER = "small-step_000012"
HOME = "checkpoints/step_000012"
KILLED = """
import sys
from helpers.faulty_ops import install_from_environment
from dist_ckpt.cli import main
install_from_environment()
sys.exit(main(sys.argv[1:]))
"""


def shipped_events(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(run_dir) if event["event"] == "shipped"]


def pins(run_dir: Path) -> dict[int, str]:
    return dict(GenerationStore(run_dir).pins())


# what arrives


def test_training_goes_on_from_the_shipped_folder_alone_bit_equal(tmp_path: Path) -> None:
    """Requirement K13: by the commands of its own page, on a machine without the original."""
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    called = call("ship", run_dir, away)
    assert (called.status, called.err) == (0, "")
    assert f"{away / FOLDER}: shipped and confirmed" in called.out
    assert "step found: 12" in called.out
    assert f"command run: dist-ckpt ship {run_dir} {away}" in called.out
    losses = read_loss(run_dir)
    uninterrupted = options_of(run_dir, until=16)
    train(uninterrupted)
    shutil.rmtree(run_dir)

    page = (away / FOLDER / "RESTORE.md").read_text(encoding="utf-8")
    fetch, check, start = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert "DIST_CKPT_RUN_DIR=runs/small" in start
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        ["/bin/bash", "-euc", fetch + check],
        cwd=elsewhere,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    restored = elsewhere / "runs/small"
    assert read_loss(restored) == losses
    resumed = options_of(restored, until=16)
    train(resumed)
    assert final(resumed) == final(uninterrupted)
    events = [event["event"] for event in read_journal(restored)]
    assert events[0] == "arrived"
    assert "resumed" in events
    assert "policy_fresh" not in events


def test_the_confirmation_tells_every_file_and_the_journal_tells_the_shipment(
    tmp_path: Path,
) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    before = snapshot_of(run_dir / "checkpoints")
    document = call("ship", f"{run_dir}@12", away, "--json").json
    assert document["journalled"] is True
    folder = away / FOLDER
    told = json.loads((folder / "confirmation.json").read_text())
    assert told == {k: v for k, v in document.items() if k not in ("journalled", "dry_run")}
    point = GenerationStore(run_dir).manifest(12)
    assert (told["run"], told["step"], told["id"]) == ("small", 12, point.id)
    assert told["trial_load"]["num_ranks"] == 1
    assert told["trial_load"]["num_tensors"] > 0
    assert told["bin"]["size_bytes"] == bin_size(point.canonical.num_params)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*told["files"], "confirmation.json"}
    for name, facts in told["files"].items():
        assert (folder / name).stat().st_size == facts["size_bytes"]
    (event,) = shipped_events(run_dir)
    assert (event["step"], event["id"]) == (12, point.id)
    assert event["destination"] == str(folder)
    assert pins(run_dir) == {}
    assert snapshot_of(run_dir / "checkpoints") == before
    assert json.loads((folder / "shipped/configuration.json").read_text()) == {
        "lr": 0.01,
        "name": "small",
    }
    assert json.loads((folder / "shipped/identity.json").read_text())["data"]["length"] == 24
    for directory in (folder, folder / "checkpoints", folder / HOME):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_an_older_step_brings_the_history_that_led_to_it_and_nothing_later(
    tmp_path: Path,
) -> None:
    run_dir, away = killed_run(tmp_path), tmp_path / "away"
    assert call("ship", f"{run_dir}@8", away).status == 0
    folder = away / "small-step_000008"
    assert read_loss(folder) == read_loss(run_dir)[:8]
    assert GenerationStore(folder).steps() == [8]
    events = (folder / "shipped/journal.jsonl").read_text().splitlines()
    last = json.loads(events[-1])
    assert (last["event"], last["step"]) == ("saved", 8)
    again = call("ship", f"{run_dir}@8", away, "--json").json
    assert again["sent"] == []


def test_the_bin_of_several_ranks_is_put_together_on_the_way(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    run_dir, away = tmp_path / "two", tmp_path / "away"
    point = write_generation(run_dir, [part_of(Captured(model, optimizer))] * 2)
    assert not point.canonical.is_shard
    document = call("ship", f"{run_dir}@100", away, "--json").json
    assert document["trial_load"]["num_ranks"] == 2
    state = dist_ckpt.read_bin(away / "two-step_000100/step_000100.bin")
    assert state.step == 100
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(torch.from_numpy(state.weights.copy()), weights)
    assert state.weights.size == point.canonical.num_params == 77
    assert call("verify", away / "two-step_000100").status == 0


def test_a_signature_goes_along_and_the_policy_goes_on_as_on_the_run_itself(
    tmp_path: Path,
) -> None:
    run, away = tmp_path / "small", tmp_path / "away"
    before = Training()
    before.train(run, 20)
    pivot_run(open_run(run), {"floors": {"docs": 2.0}})
    before.train(run, 25)
    (run / "checkpoints/step_000025/resume_point.sig").write_bytes(b"s" * 64)
    assert call("ship", run, away).status == 0
    folder = away / "small-step_000025"
    assert (folder / "checkpoints/step_000025/resume_point.sig").read_bytes() == b"s" * 64
    with (same := Training()).checkpointer(folder):
        assert same.bandit.state_dict() == before.bandit.state_dict()
        assert same.bandit.settings.floors == {"docs": 2.0}
    pivot_run(open_run(run), {"floors": {"docs": 3.0}})
    assert call("ship", run / "checkpoints/step_000020", tmp_path / "earlier").status == 0
    arrived = read_journal(tmp_path / "earlier/small-step_000020")
    assert [event["event"] for event in arrived] == ["arrived"]  # the pivot came later
    assert call("ship", run, tmp_path / "later").status == 0
    with (fresh := Training()).checkpointer(tmp_path / "later/small-step_000025"):
        assert all(arm.pulls == 0 for arm in fresh.bandit.arms.values())
        assert fresh.bandit.settings.floors == {"docs": 3.0}


def test_without_its_bin_on_wish(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    called = call("ship", run_dir, away, "--no-bin")
    assert called.status == 0
    assert "no .bin: it was left out on wish" in called.out
    assert not list((away / FOLDER).glob("*.bin*"))


def test_a_dry_run_names_the_files_and_makes_nothing(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    before = snapshot_of(run_dir)
    called = call("ship", run_dir, away, "-n")
    assert called.status == 0
    assert "would ship step 12" in called.out
    assert f"{HOME}/rank_00000.shard" in called.out
    assert not away.exists()
    assert snapshot_of(run_dir) == before


def test_a_run_that_trains_is_shipped_beside_it_and_its_journal_left_alone(
    tmp_path: Path,
) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    lock = storage.RunLock(run_dir / "run.lock")
    lock.acquire({"pid": os.getpid(), "host": "here"})
    try:
        called = call("ship", run_dir, away)
    finally:
        lock.release()
    assert called.status == 0, called.err
    assert "journal doesn't tell" in called.out
    assert shipped_events(run_dir) == []
    assert pins(run_dir) == {}


def test_what_was_pinned_before_stays_pinned(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    assert call("pin", f"{run_dir}@12", "--reason", "for the paper").status == 0
    assert call("ship", run_dir, tmp_path / "away").status == 0
    assert pins(run_dir) == {12: "for the paper"}


def test_what_is_pinned_while_it_is_shipped_stays_pinned(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    seen: list[str] = []

    def meanwhile(_num_bytes: int) -> None:
        if not seen:
            seen.append(pins(run_dir)[12])
            assert call("pin", f"{run_dir}@12").status == 0

    ship(open_run(run_dir).generation(12), "small", parse_place(str(tmp_path)), progress=meanwhile)
    assert seen == [f"being shipped to {tmp_path / FOLDER}"]
    assert pins(run_dir) == {12: ""}


def test_of_two_shipments_at_once_each_keeps_the_generation_until_it_has_ended(
    tmp_path: Path,
) -> None:
    run_dir, first, second = ended_run(tmp_path), tmp_path / "a", tmp_path / "b"
    both = f"being shipped to {first / FOLDER}; being shipped to {second / FOLDER}"
    ops = FaultyOps(Fault("pwrite", path=".tmp-ship-rank_00000.state", error="ENOSPC"))
    seen: list[str] = []

    def meanwhile(_num_bytes: int) -> None:
        if not seen:
            seen.append(pins(run_dir)[12])
            with use_ops(ops):
                assert call("ship", run_dir, second).status == 2
            seen.append(pins(run_dir)[12])

    generation = open_run(run_dir).generation(12)
    ship(generation, "small", parse_place(str(first)), progress=meanwhile)
    assert seen == [f"being shipped to {first / FOLDER}", both]
    assert ops.struck == 1
    assert pins(run_dir) == {12: f"being shipped to {second / FOLDER}"}
    assert call("ship", run_dir, second).status == 0
    assert pins(run_dir) == {}


# what goes wrong


@pytest.mark.parametrize(
    ("fault", "has_shard"),
    [
        (Fault("pwrite", path=".tmp-ship-rank_00000.state", kill=True), True),
        (Fault("rename", path="*.tmp-ship-RESTORE.md", kill=True), True),
        (Fault("rename", path="*.tmp-ship-confirmation.json", kill=True), True),
        (Fault("pwrite", path=".tmp-ship-rank_00000.shard", kill=True), False),
    ],
    ids=["state", "page", "confirmation", "shard"],
)
def test_a_shipment_that_was_killed_isnt_confirmed_and_goes_on(
    tmp_path: Path, fault: Fault, has_shard: bool
) -> None:
    run_dir, away, log = ended_run(tmp_path), tmp_path / "away", tmp_path / "strikes"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {"PYTHONPATH": path, **faults_environment([fault], log=log)}
    killed = spawn("ship", run_dir, away, code=KILLED, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(read_strikes(log)) == 1
    folder = away / FOLDER
    assert (folder / "unfinished.json").exists()
    assert not (folder / "confirmation.json").exists()
    assert (folder / HOME / "rank_00000.shard").exists() is has_shard
    assert pins(run_dir) == {12: f"being shipped to {folder}"}

    document = call("ship", run_dir, away, "--json").json
    assert (f"{HOME}/rank_00000.shard" in document["sent"]) is not has_shard
    assert document["found_wrong"] == []
    assert not (folder / "unfinished.json").exists()
    assert not [path for path in folder.rglob("*") if ".tmp" in path.name]
    assert call("verify", folder).status == 0
    assert pins(run_dir) == {}
    what = f"SIGKILL of a shipment at {fault.op} of {fault.path}"
    record_fault("Kill", what, 1, "isn't confirmed, and goes on")


def test_copies_that_are_wrong_are_found_and_only_they_are_sent_again(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    assert call("ship", run_dir, away).status == 0
    folder = away / FOLDER
    change_byte(folder / HOME / "rank_00000.shard", 100)
    change_byte(folder / "step_000012.bin", -1)
    (folder / HOME / "rank_00000.state").unlink()
    os.truncate(folder / "small.loss.json", 5)
    called = call("ship", run_dir, away, "--json")
    assert called.status == 0, called.err
    wrong = [f"{HOME}/rank_00000.shard", "small.loss.json", "step_000012.bin"]
    assert called.json["found_wrong"] == wrong
    assert sorted(called.json["sent"]) == sorted([*wrong, f"{HOME}/rank_00000.state"])
    assert (folder / "confirmation.json").exists()
    assert call("verify", folder).status == 0


def test_a_destination_that_changes_what_it_takes_gets_no_confirmation(tmp_path: Path) -> None:
    class Changing(MemoryFileSystem):  # type: ignore[misc]
        protocol = "changing"
        store: dict[str, Any] = {}  # noqa: RUF012 - as in its base
        pseudo_dirs = [""]  # noqa: RUF012 - as in its base

        def cat_file(self, path: str, *arguments: Any, **named: Any) -> bytes:
            data: bytes = super().cat_file(path, *arguments, **named)
            return data[:-1] + b"?" if path.endswith(".shard") else data

    fsspec.register_implementation("changing", Changing, clobber=True)
    run_dir = ended_run(tmp_path)
    called = call("ship", run_dir, "changing://there", "--scratch", tmp_path)
    assert called.status == 1
    assert "rank_00000.shard came out wrong 3 times" in called.err
    names = {name.rpartition("/")[2] for name in Changing.store}
    assert "unfinished.json" in names
    assert "confirmation.json" not in names
    assert not list(tmp_path.glob("dist-ckpt-ship-*"))


def test_a_full_destination_keeps_what_arrived_and_the_next_call_goes_on(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    full = Fault("pwrite", path=".tmp-ship-rank_00000.state", error="ENOSPC")
    ops = FaultyOps(full)
    with use_ops(ops):
        called = call("ship", run_dir, away, "--json")
    assert ops.struck == 1
    assert called.status == 2
    assert called.json["error"]["id"] == "no-space"
    folder = away / FOLDER
    assert not (folder / "confirmation.json").exists()
    assert not list(folder.rglob(".tmp-ship-*"))
    assert 12 in pins(run_dir)
    document = call("ship", run_dir, away, "--json").json
    assert f"{HOME}/rank_00000.shard" not in document["sent"]
    assert f"{HOME}/rank_00000.state" in document["sent"]
    assert pins(run_dir) == {}


def test_a_full_store_keeps_what_arrived_and_the_next_call_goes_on(tmp_path: Path) -> None:
    class Full(MemoryFileSystem):  # type: ignore[misc]
        protocol = "full"
        store: dict[str, Any] = {}  # noqa: RUF012 - as in its base
        pseudo_dirs = [""]  # noqa: RUF012 - as in its base
        has_room = False

        def _open(self, path: str, mode: str = "rb", *arguments: Any, **named: Any) -> Any:
            if mode == "wb" and path.endswith(".state") and not Full.has_room:
                raise OSError(28, "No space left on device")
            return super()._open(path, mode, *arguments, **named)

    fsspec.register_implementation("full", Full, clobber=True)
    run_dir = ended_run(tmp_path)
    words = ("ship", run_dir, "full://there", "--scratch", tmp_path, "--json")
    refused = call(*words)
    assert refused.status == 2
    assert "No space left" in refused.json["error"]["message"]
    assert "same command again" in refused.json["error"]["next_step"]
    Full.has_room = True
    document = call(*words).json
    assert f"{HOME}/rank_00000.shard" not in document["sent"]
    assert f"{HOME}/rank_00000.state" in document["sent"]


def test_no_room_is_known_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    away.mkdir()
    asked = []

    def no_room(path: Path, need_bytes: int) -> None:
        asked.append(need_bytes)
        raise NoSpaceError(f"{path} is full.", need_bytes=need_bytes, free_bytes=0)

    monkeypatch.setattr("dist_ckpt.storage.check_space", no_room)
    called = call("ship", run_dir, away, "--json")
    assert called.status == 2
    assert called.json["error"]["id"] == "no-space"
    assert asked[0] > GenerationStore(run_dir).manifest(12).num_bytes
    assert list(away.iterdir()) == []
    assert pins(run_dir) == {}


def test_a_faulty_source_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    change_byte(run_dir / HOME / "rank_00000.state", 50)
    called = call("ship", run_dir, away)
    assert called.status == 1
    assert "rank_00000.state" in called.err
    assert not away.exists()
    assert pins(run_dir) == {}


# what is in the way


def test_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    folder = away / FOLDER
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    called = call("ship", run_dir, away, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "foreign-file")
    (folder / "mine.txt").unlink()
    assert call("ship", run_dir, away).status == 0

    other = tmp_path / "other/small"
    write_generation(other, [adam_part({"w": torch.ones(4)})], step=12, id_="ab" * 16)
    called = call("ship", other, away)
    assert called.status == 2
    assert "holds another resume point of step 12" in called.err

    train(options_of(folder, until=16))
    before = (folder / "small.loss.json").read_bytes()
    called = call("ship", run_dir, away)
    assert called.status == 2
    assert f"The run has gone on in {folder} (run.json is there)" in called.err
    assert (folder / "small.loss.json").read_bytes() == before


def test_a_copy_that_only_was_forked_is_still_one_and_one_that_was_worked_on_isnt(
    tmp_path: Path,
) -> None:
    run_dir, away = ended_run(tmp_path), tmp_path / "away"
    assert call("ship", run_dir, away).status == 0
    folder = away / FOLDER
    assert call("fork", folder, tmp_path / "branch").status == 0
    assert (folder / "run.lock").exists()
    document = call("ship", run_dir, away, "--json").json
    assert (document["sent"], document["found_wrong"]) == ([], [])

    with lifecycle.hold_run(folder, "fork"):
        held = call("ship", run_dir, away)
    assert (held.status, "(run.lock is held)" in held.err) == (2, True)
    assert call("pivot", folder).status == 0
    before = (folder / "small.journal.jsonl").read_bytes()
    called = call("ship", run_dir, away)
    assert (called.status, "its journal tells of `pivot`" in called.err) == (2, True)
    assert (folder / "small.journal.jsonl").read_bytes() == before


def test_a_destination_inside_the_run_is_refused(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    before = snapshot_of(run_dir)
    for place in (run_dir, run_dir / "checkpoints", run_dir / "away"):
        called = call("ship", run_dir, place)
        assert called.status == 2
        assert "lies inside the run" in called.err
    assert snapshot_of(run_dir) == before


@pytest.mark.parametrize("name", ["b\udcffd", "new\nline"])
def test_a_run_whose_name_no_text_can_hold_is_refused_and_its_fork_is_shipped(
    tmp_path: Path, name: str
) -> None:
    run_dir, away = ended_run(tmp_path, name), tmp_path / "away"
    before = snapshot_of(run_dir)
    for words in (["--json"], ["-n", "--json"]):
        called = call("ship", run_dir, away, *words)
        assert (called.status, called.json["error"]["id"]) == (2, "usage")
        assert "can't be shipped" in called.json["error"]["message"]
    assert not away.exists()
    assert snapshot_of(run_dir) == before
    assert call("fork", run_dir, tmp_path / "small").status == 0
    assert call("ship", tmp_path / "small", away).status == 0


def test_names_that_are_odd_and_lines_of_text_come_back_by_the_pages_own_commands(
    tmp_path: Path,
) -> None:
    run_dir, away = ended_run(tmp_path, "back\\slash ü'"), tmp_path / "a\udcff\nb"
    point = GenerationStore(run_dir).manifest(12)
    code = {"path": "tr\udcff|ain\n.py", "git": None}
    write_manifest(run_dir / HOME, point, identity={**point.identity, "code": code})
    assert call("ship", run_dir, away).status == 0
    (folder,) = away.iterdir()
    page = (folder / "RESTORE.md").read_bytes().decode("utf-8", "surrogateescape")
    assert "| program | `tr\\udcff/ain .py`, git unknown |" in page
    fetch, check = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[:2]
    sums = check.splitlines()[0]
    for said, status in ((fetch + sums, 0), (f"echo >> {HOME}/rank_00000.state; {sums}", 1)):
        done = subprocess.run(
            ["/bin/bash", "-euc", said.replace(HOME, f"runs/*/{HOME}") if status else said],
            cwd=tmp_path,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == status, done.stderr


def test_a_protocol_that_nobody_knows_is_named(tmp_path: Path) -> None:
    called = call("ship", ended_run(tmp_path), "nonsense://there/x")
    assert called.status == 2
    assert "nonsense://there/x isn't a destination that is known here" in called.err


# places


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3://KEY:SECRET@bucket/a", "s3://bucket/a"),
        ("sftp://me:pass@host:22/data", "sftp://host:22/data"),
        ("sftp://me:pa%2Fss@host/data", "sftp://host/data"),
        ("sftp://me:pa/ss@host/data", "sftp://host/data"),
        ("sftp://me@host/data", "sftp://host/data"),
        ("sftp://host:22/data/me@home", "sftp://host:22/data/me@home"),
        ("https://host/a?token=hidden", "https://host/a"),
        ("S3://bucket", "s3://bucket"),
    ],
)
def test_a_place_is_told_without_its_credentials(text: str, label: str) -> None:
    place = parse_place(text)
    assert place.label == label
    for secret in ("SECRET", "pass", "pa/ss", "pa%2Fss", "hidden"):
        assert secret not in place.scrub(f"{text} failed: {secret}") or secret not in text


def test_a_path_and_a_file_url_are_directories(tmp_path: Path) -> None:
    assert parse_place(str(tmp_path)).path == tmp_path
    assert parse_place(f"file://{tmp_path}").path == tmp_path
    for wrong in ("", "s3://", "s3:///", "simplecache::s3://bucket/a"):
        with pytest.raises(UsageError):
            parse_place(wrong)
