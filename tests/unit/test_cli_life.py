"""``dist-ckpt fork``, ``rewind``, ``undelete``, ``pin``, ``unpin``, ``prune``."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt import lifecycle
from dist_ckpt.errors import LockedError, StorageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss, read_samples
from dist_ckpt.lifecycle import find_origin, fork, hold_open
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.generating import change_byte
from helpers.run_dirs import (
    Called,
    call,
    ended_run,
    killed_run,
    options_of,
    snapshot_of,
    write_manifest,
)
from helpers.trainers import train


def steps(run_dir: Path) -> list[int]:
    return GenerationStore(run_dir).steps()


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run_dir) if item["event"] == event]


def add_samples(run_dir: Path) -> None:
    samples = [{"step": step, "loss": 1.0, "text": f"of {step}"} for step in (4, 8, 12)]
    (run_dir / f"{run_dir.name}.samples.json").write_text(json.dumps(samples))


# fork


def test_a_fork_shares_its_files_and_carries_lineage_and_losses_up_to_its_step(
    tmp_path: Path,
) -> None:
    """A11: the branch is a run of its own; nothing of the parent changes."""
    parent, branch = killed_run(tmp_path), tmp_path / "branch"
    add_samples(parent)
    (parent / f"{parent.name}.state.json").write_text('{"arms": []}')
    (parent / f"{parent.name}.policy.json").write_text('{"floors": {}}')
    before = snapshot_of(parent / "checkpoints")
    called = call("fork", f"{parent}@8", branch, "--json")
    assert called.status == 0, called.err
    assert called.json["step"] == 8
    assert sum(called.json["files"].values()) == 5
    assert "copy" not in called.json["files"]
    assert snapshot_of(parent / "checkpoints") == before
    assert steps(branch) == [8]
    assert read_loss(branch) == read_loss(parent)[:8]
    assert [sample["step"] for sample in read_samples(branch)] == [4, 8]
    # Settings are those that step 8 was made under, none; the parent's state is of step 12.
    assert not (branch / "branch.policy.json").exists()
    assert not (branch / "branch.state.json").exists()
    first, *later = read_journal(branch)
    assert later == []
    assert (first["event"], first["step"], first["run"]) == ("forked", 8, parent.name)
    assert first["path"] == str(parent)
    assert first["digest"].startswith("xxh3_128:")
    assert call("verify", branch).status == 0
    assert call("diff", f"{parent}@8", branch).status == 0
    assert call("fork", f"{parent}@12", tmp_path / "late").status == 0
    assert json.loads((tmp_path / "late" / "late.state.json").read_text()) == {"arms": []}


def _read_only(run_dir: Path) -> FaultyOps:
    """Return a system that lets nobody make the run's lock."""
    return FaultyOps(Fault("stat", str(run_dir), error="EROFS"))


def test_a_run_that_may_only_be_read_is_forked_and_what_came_over_is_read_back(
    tmp_path: Path,
) -> None:
    parent = ended_run(tmp_path)
    origin, ops = find_origin(GenerationStore(parent), 8), _read_only(parent)
    before = snapshot_of(parent)
    with use_ops(ops):
        fork(origin, tmp_path / "branch")
    assert ops.struck == 1
    copied = str(tmp_path / ".tmp-fork-branch/checkpoints/step_000008/rank_00000.shard")
    assert ops.of("preadv", copied)
    assert snapshot_of(parent) == before
    train(options_of(tmp_path / "branch", until=9))
    assert steps(tmp_path / "branch") == [8, 9]


def test_a_fork_that_can_not_keep_others_out_is_refused_where_one_is_there_or_comes(
    tmp_path: Path,
) -> None:
    parent, branch = ended_run(tmp_path), tmp_path / "branch"
    origin, ops = find_origin(GenerationStore(parent), 8), _read_only(parent)
    with hold_open(parent, "rewind"), use_ops(ops), pytest.raises(LockedError, match="rewind"):
        fork(origin, branch)
    assert ops.struck == 1

    def come(_num_bytes: int) -> None:
        with hold_open(parent, "rewind") as (_, history):
            history.journal.append("came")

    with use_ops(_read_only(parent)), pytest.raises(LockedError, match="while it was read"):
        fork(origin, branch, progress=come)
    assert events(parent, "came")
    with hold_open(parent, "rewind") as (store, history):
        history.journal.append("rewind_started", step=8, home="rewind_to_000008")
    with use_ops(_read_only(parent)), pytest.raises(StorageError, match="was cut off"):
        fork(origin, branch)
    assert store.steps() == [4, 8, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == [parent.name]


def _foreign(directory: Path, name: str, text: str = "[]") -> None:
    path = directory / name
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name",
    ["a.txt", "checkpoints/model.pt", "checkpoints/step_000004/model.pt", "x.loss.json",
     "run.json", "x.journal.jsonl", "checkpoints/step_000004/rank_00000.shard"],
)  # fmt: skip
def test_no_command_leaves_anything_in_a_directory_that_is_not_surely_a_runs(
    name: str, tmp_path: Path
) -> None:
    directory = tmp_path / "foreign"
    _foreign(directory, name)
    before = snapshot_of(directory)
    generation = directory / "checkpoints/step_000004"
    for words in (
        ("rewind", f"{directory}@4"),
        ("rewind", generation),
        ("undelete", directory, "rewind_to_000004"),
        ("pin", f"{directory}@4"),
        ("pin", generation),
        ("prune", directory),
        ("fork", f"{directory}@4", tmp_path / "new"),
        ("fork", generation, tmp_path / "new"),
        ("pivot", directory),
        ("save", directory),
        ("stop", directory),
    ):
        called = call(*words)
        assert called.status == 2, (words, called.out, called.err)
        assert snapshot_of(directory) == before, words
    call("unpin", f"{directory}@4")
    assert snapshot_of(directory) == before
    assert not (tmp_path / "new").exists()


def test_two_branches_from_the_same_weights_are_compared_from_where_they_part(
    tmp_path: Path,
) -> None:
    """A11: which converges. Own line only: neither run's retention reaches into another."""
    parent = ended_run(tmp_path)
    for name in ("b1", "b2"):
        assert call("fork", f"{parent}@8", tmp_path / name).status == 0
        assert call("prune", tmp_path / name, "--keep-last", "1").status == 0  # before any save
        settings = {"keep_last": 1, "accept": ["config.name"]}
        options = options_of(tmp_path / name, until=11, settings=settings)
        train(
            options
            if name == "b1"
            else options_of(
                tmp_path / name, until=11, settings=settings, config={"lr": 0.01, "name": "other"}
            )
        )
        assert steps(tmp_path / name) == [11]
        assert [event["step"] for event in events(tmp_path / name, "resumed")] == [8]
    assert steps(parent) == [4, 8, 12]
    assert call("verify", parent).status == 0
    path = tmp_path / "b2" / "b2.loss.json"
    path.write_text(path.read_text().replace("[9, ", "[9, 9"))  # it converges worse
    called = call("loss", tmp_path / "b1", tmp_path / "b2", "--json")
    branches = called.json["branches"]
    assert branches["runs"] == ["b1", "b2"]
    assert branches["fork_step"] == 8
    assert (branches["whole"]["first_step"], branches["whole"]["last_step"]) == (9, 11)
    assert branches["whole"]["lowest"] == "b1"
    assert "the same up to step 8" in call("loss", tmp_path / "b1", tmp_path / "b2").out


def test_a_fork_with_a_policy_starts_the_policy_fresh(tmp_path: Path) -> None:
    parent, branch = ended_run(tmp_path), tmp_path / "branch"
    (parent / f"{parent.name}.state.json").write_text('{"arms": []}')
    (tmp_path / "policy.json").write_text('{"floors": {"a": 0.1}}')
    assert call("fork", f"{parent}@8", branch, "--policy", tmp_path / "policy.json").status == 0
    assert json.loads((branch / "branch.policy.json").read_text()) == {"floors": {"a": 0.1}}
    assert not (branch / "branch.state.json").exists()
    for refused in ("[1]", '{"floors": NaN}'):  # the branch's first start would refuse them
        (tmp_path / "policy.json").write_text(refused)
        called = call("fork", f"{parent}@8", tmp_path / "x", "--policy", tmp_path / "policy.json")
        assert called.status == 2
        assert not (tmp_path / "x").exists()


def test_a_fork_replaces_nothing_and_takes_nothing_that_is_not_whole(tmp_path: Path) -> None:
    parent = ended_run(tmp_path)
    (tmp_path / "there").mkdir()
    assert call("fork", f"{parent}@8", tmp_path / "there", "--json").status == 2
    assert call("fork", f"{parent}@8", parent / "inside").status == 2
    assert call("fork", f"{parent}@8", tmp_path / "no" / "parent").status == 2
    assert call("fork", f"{parent}@9", tmp_path / "new").status == 2
    generation = parent / "checkpoints" / "step_000008"
    (generation / "verified.json").unlink()
    change_byte(generation / "rank_00000.state", 100)
    called = call("fork", f"{parent}@8", tmp_path / "new")
    assert called.status == 1
    assert "was changed" in called.err or "digest" in called.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [parent.name, "there"]


@pytest.mark.parametrize("command", ["fork", "reshard"])
def test_a_name_that_training_would_refuse_makes_no_run(tmp_path: Path, command: str) -> None:
    """Renaming the directory wouldn't help: the run's files keep the name."""
    parent = ended_run(tmp_path)
    suffix = len(".journal.jsonl.torn-1000000-1000000")
    most = tmp_path / ("n" * (os.statvfs(tmp_path).f_namemax - suffix))
    more = tmp_path / f"{most.name}{'n' * 12}"

    def make(target: Path) -> Called:
        to = [target] if command == "fork" else ["--world-size", "1", "-o", target]
        return call(command, f"{parent}@8", *to, "--json")

    refused = make(more)
    assert (refused.status, refused.json["error"]["id"]) == (2, "setting")
    assert "is too long by 12 bytes" in refused.json["error"]["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [parent.name]
    assert make(most).status == 0


def test_where_the_file_system_can_share_nothing_a_fork_copies(tmp_path: Path) -> None:
    parent, branch = ended_run(tmp_path), tmp_path / "branch"
    ops = FaultyOps(
        Fault("clone", times=None, error="EOPNOTSUPP"), Fault("link", times=None, error="EXDEV")
    )
    with use_ops(ops):
        called = call("fork", f"{parent}@8", branch, "--json")
    assert called.json["files"] == {"copy": 5}
    assert ops.struck > 5
    assert call("verify", branch).status == 0
    inodes = [os.stat(run / "checkpoints/step_000008/rank_00000.shard").st_ino
              for run in (parent, branch)]  # fmt: skip
    assert inodes[0] != inodes[1]


# rewind, undelete


def test_a_rewind_sets_later_points_and_samples_aside_and_keeps_all_bytes(tmp_path: Path) -> None:
    """Cases 41 and 52: canonical history ends where the run is, old bytes stay a prefix."""
    run_dir = killed_run(tmp_path)
    add_samples(run_dir)
    loss_path = run_dir / f"{run_dir.name}.loss.json"
    before = loss_path.read_bytes()
    dry = call("rewind", f"{run_dir}@4", "-n", "--json")
    assert dry.json["set_aside"] == [8, 12]
    assert loss_path.read_bytes() == before
    called = call("rewind", f"{run_dir}@4", "--json")
    assert called.status == 0, called.err
    assert {**dry.json, "archive": called.json["archive"], "dry_run": False} == called.json
    assert called.json["num_losses"] == 10
    assert loss_path.read_bytes().startswith(before.rstrip()[:-1])
    assert [step for step, _ in read_loss(run_dir)] == [1, 2, 3, 4]
    assert [sample["step"] for sample in read_samples(run_dir)] == [4]
    home = run_dir / "archive" / called.json["archive"]
    assert sorted(path.name for path in home.iterdir()) == [
        f"{run_dir.name}.samples.json",
        *(f"step_{step:06d}{end}" for step in (8, 12) for end in ("", ".bin", ".bin.sha256")),
    ]
    # The run goes on from there, less far than before.
    train(options_of(run_dir, until=6))
    assert steps(run_dir) == [4, 6]
    assert [step for step, _ in read_loss(run_dir)] == list(range(1, 7))


def test_a_rewind_that_is_refused_at_once_has_not_begun(tmp_path: Path) -> None:
    """The next start must not go back silently because somebody once was refused to."""
    run_dir = ended_run(tmp_path)
    ops = FaultyOps(Fault("mkdir", "archive", error="EACCES"))
    with use_ops(ops):
        called = call("rewind", f"{run_dir}@4")
    assert ops.struck == 1
    assert called.status == 2
    assert "has begun" not in called.err
    assert [event for event in read_journal(run_dir) if "rew" in event["event"]] == []
    train(options_of(run_dir, until=14))
    assert steps(run_dir)[-1] == 14
    assert 12 in steps(run_dir)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("rename", "step_000012", error="EIO"),
        Fault("fdatasync", "*.journal.jsonl", nth=2, error="EIO"),
    ],
)
def test_a_rewind_that_fails_half_way_says_that_it_stands(tmp_path: Path, fault: Fault) -> None:
    """Also where only the sync of its own mark failed: the mark can be read."""
    run_dir = ended_run(tmp_path)
    ops = FaultyOps(fault)
    with use_ops(ops):
        called = call("rewind", f"{run_dir}@4")
    assert ops.struck == 1
    assert called.status == 2
    assert "Going back to step 4 has begun and can't be ended now" in called.err
    assert "The next start ends it first, and so does the same command." in called.err
    train(options_of(run_dir, until=6))
    assert steps(run_dir) == [4, 6]


def test_an_undelete_that_is_done_already_says_so(tmp_path: Path) -> None:
    """Whoever was killed at its end gives it again."""
    run_dir = ended_run(tmp_path)
    assert call("rewind", f"{run_dir}@4").status == 0
    assert call("undelete", run_dir, "12").status == 0
    journal = (run_dir / f"{run_dir.name}.journal.jsonl").read_bytes()
    for more in ((), ("-n",)):
        called = call("undelete", run_dir, "12", *more, "--json")
        assert called.status == 0, called.err
        assert called.json["was_there"] is True
        assert [one["step"] for one in called.json["brought_back"]] == [12]
        assert "is back already" in call("undelete", run_dir, "12", *more).out
    assert (run_dir / f"{run_dir.name}.journal.jsonl").read_bytes() == journal
    assert call("undelete", run_dir, "3").status == 2


def test_a_rewind_wants_a_step_and_a_whole_generation(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("rewind", run_dir)
    assert called.status == 2
    assert "@N" in called.err
    assert call("rewind", f"{run_dir}@5").status == 2
    change_byte(run_dir / "checkpoints/step_000004/rank_00000.state", 100)
    assert call("rewind", f"{run_dir}@4").status == 1
    assert steps(run_dir) == [4, 8, 12]
    assert events(run_dir, "rewind_started") == []


def test_commands_that_move_things_are_refused_beside_a_live_run(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    with hold_open(run_dir, "training, as it were"):
        for words in (
            ["rewind", f"{run_dir}@4"],
            ["fork", f"{run_dir}@4", tmp_path / "new"],
            ["undelete", run_dir, "4"],
            ["prune", run_dir, "--keep-last", "1"],
        ):
            called = call(*words, "--json")
            assert called.status == 2
            assert called.json["error"]["id"] == "locked"
            assert called.json["error"]["holder"]["pid"] == os.getpid()
            assert "Stop that one, or wait for its end" in called.json["error"]["next_step"]
        assert call("prune", run_dir, "-n").status == 0
        assert call("pin", f"{run_dir}@4").status == 0
        # A command that holds the lock is no training: nobody may send it a signal.
        assert call("save", run_dir).status == 2
        assert "dist-ckpt training" in call("status", run_dir).out
    assert steps(run_dir) == [4, 8, 12]


def test_what_is_brought_back_has_its_losses_again_unless_another_branch_is_there(
    tmp_path: Path,
) -> None:
    run_dir = ended_run(tmp_path)
    whole = read_loss(run_dir)
    assert call("undelete", run_dir).out == "archive/ is empty.\n"
    assert call("rewind", f"{run_dir}@4").status == 0
    assert call("undelete", run_dir, "5").status == 2
    assert call("undelete", run_dir, "8", "-n").status == 0
    assert steps(run_dir) == [4]
    assert call("undelete", run_dir, "archive/rewind_to_000004/step_000008").status == 0
    assert read_loss(run_dir) == whole[:8]
    assert (run_dir / "step_000008.bin").exists()
    # Another branch: 12 can't come back beside a 10 that it never went through.
    settings = {"accept": ["config.name"]}
    train(options_of(run_dir, until=10, settings=settings, config={"lr": 0.01, "name": "x"}))
    for what, word in (("12", "another branch"), ("8", "holds no generation")):
        called = call("undelete", run_dir, what)
        assert called.status == 2
        assert word in called.err
    empty = call("undelete", ended_run(tmp_path, "other"), "8")
    assert (empty.status, "nothing was set aside" in empty.err) == (2, True)
    # A fork of it is the way out, with the losses that it had.
    archived = run_dir / "archive" / "rewind_to_000004" / "step_000012"
    assert call("fork", archived, tmp_path / "old").status == 0
    assert read_loss(tmp_path / "old") == whole
    change_byte(archived / "rank_00000.state", 100)
    assert call("rewind", f"{run_dir}@8").status == 0
    assert call("undelete", run_dir, "rewind_to_000004/step_000012").status == 1
    assert steps(run_dir) == [4, 8]


# pin, prune


def test_a_pin_means_one_generation_and_survives_its_way_through_the_archive(
    tmp_path: Path,
) -> None:
    run_dir = ended_run(tmp_path)
    assert call("pin", f"{run_dir}@8", "--reason", "before the pivot").status == 0
    assert "before the pivot" in call("ls", run_dir).out
    assert call("rewind", f"{run_dir}@4").status == 0
    settings = {"accept": ["config.name"]}
    train(options_of(run_dir, until=8, settings=settings, config={"lr": 0.01, "name": "x"}))
    assert steps(run_dir) == [4, 8]
    assert GenerationStore(run_dir).pins() == {}  # this 8 is another one
    assert call("rewind", f"{run_dir}@4").status == 0
    assert call("undelete", run_dir, "rewind_to_000004/step_000008").status == 0
    assert GenerationStore(run_dir).pins() == {8: "before the pivot"}
    assert call("unpin", f"{run_dir}@8", "--json").json["was_pinned"]
    assert GenerationStore(run_dir).pins() == {}
    assert call("unpin", f"{run_dir}@8", "--json").json["was_pinned"] is False


def test_a_pin_without_a_reason_keeps_the_one_that_was_given(tmp_path: Path) -> None:
    address = f"{ended_run(tmp_path)}@8"
    call("pin", address, "--reason", "before the pivot")
    assert call("pin", address, "--json").json["reason"] == "before the pivot"
    assert call("pin", address).out == "small: step 8 is pinned: before the pivot\n"
    for reason in ("after all", ""):
        call("pin", address, "--reason", reason)
        assert GenerationStore(tmp_path / "small").pins() == {8: reason}


def test_prune_says_of_each_why_it_stays_or_goes_with_the_settings_of_the_run(
    tmp_path: Path,
) -> None:
    run_dir = ended_run(tmp_path)
    assert call("pin", f"{run_dir}@4", "--reason", "the start").status == 0
    (run_dir / "checkpoints/step_000008/verified.json").unlink()
    assert call("prune", run_dir, "-n", "--json").json["settings"] == {
        "keep_last": 3, "keep_every": None, "keep_bins": None,
    }  # fmt: skip
    called = call("prune", run_dir, "-n", "--json", "--keep-last", "1", "--keep-bins", "1")
    assert [
        (row["step"], row["keep"], row["reason"], row["bin"]) for row in called.json["generations"]
    ] == [
        (4, True, "pinned", "drop"),
        (8, True, "unverified", "keep"),
        (12, True, "keep_last", "keep"),
    ]
    assert steps(run_dir) == [4, 8, 12]
    assert call("unpin", f"{run_dir}@4").status == 0
    called = call("prune", run_dir, "--keep-last", "1")
    assert "not among the newest 1, not pinned" in called.out
    assert steps(run_dir) == [8, 12]
    assert [event["step"] for event in events(run_dir, "retired")] == [4]


@pytest.mark.parametrize(
    "words", [["--keep-last", "0"], ["--keep-last", "-1"], ["--keep-every", "0"],
              ["--keep-last", "three"], ["--keep-bins", "-1"]],
)  # fmt: skip
def test_a_setting_that_would_keep_nothing_is_refused(words: list[str], tmp_path: Path) -> None:
    """Case 54: a typo in a retention setting must not remove everything."""
    run_dir = ended_run(tmp_path)
    called = call("prune", run_dir, *words, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "setting")
    assert steps(run_dir) == [4, 8, 12]
    assert call("prune", tmp_path).status == 2  # patterns that match nothing: no run at all


def test_a_pin_beside_a_live_run_holds_at_once_and_a_stale_higher_step_counts_for_nothing(
    tmp_path: Path,
) -> None:
    """Case 54, and retention across branches: what the run just saved must never look old."""
    other = ended_run(tmp_path, "other")
    run = tmp_path / "run"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with dist_ckpt.Checkpointer(
        run, model=model, optimizer=optimizer, every=2, keep_last=1, keep_bins=0
    ) as ckpt:
        for step in ckpt.steps(8):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 4:  # 2 is there, and goes when 4 is verified
                ckpt._opened("test")._saver.wait_done()
                assert call("pin", f"{run}@2", "--reason", "by hand").status == 0
                source = other / "checkpoints" / "step_000012"
                shutil.copytree(source, run / "checkpoints" / "step_000012")
    assert steps(run) == [2, 8, 12]
    assert [event["step"] for event in events(run, "retired")] == [4, 6]
    assert list(run.glob("*.bin")) == []
    rows = call("prune", run, "-n", "--json").json["generations"]
    assert [row["reason"] for row in rows] == ["pinned", "keep_last", "other_line"]


def lose_lines(run_dir: Path, *steps: int, nonce: bool = False) -> None:
    """Take the ``saved`` lines of steps out of the journal, and with ``nonce`` every attempt's."""
    path = run_dir / f"{run_dir.name}.journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line["event"] != "saved" or line["step"] not in steps]
    assert len(kept) == len(lines) - len(steps)
    if nonce:
        assert [line.pop("nonce") for line in kept if line["event"] == "attempt_started"]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def reasons(run_dir: Path) -> dict[int, str]:
    rows = call("prune", run_dir, "-n", "--json", "--keep-last", "1").json["generations"]
    return {row["step"]: row["reason"] for row in rows}


def test_a_save_whose_line_the_journal_lacks_is_known_by_its_attempt_once_a_later_one_is_known(
    tmp_path: Path,
) -> None:
    run_dir = ended_run(tmp_path)
    lose_lines(run_dir, 8)
    assert reasons(run_dir) == {4: "old", 8: "old", 12: "keep_last"}
    lose_lines(run_dir, 12)  # nothing says that this one is the run's newest
    assert reasons(run_dir) == {4: "keep_last", 8: "other_line", 12: "other_line"}


def test_a_save_that_neither_a_line_nor_an_attempt_of_the_journal_tells_of_is_left_alone(
    tmp_path: Path,
) -> None:
    run_dir = ended_run(tmp_path)
    lose_lines(run_dir, 8, nonce=True)
    assert reasons(run_dir) == {4: "old", 8: "other_line", 12: "keep_last"}
    other = ended_run(tmp_path, "other")
    lose_lines(other, 8)
    point = GenerationStore(other).manifest(8)
    write_manifest(
        other / "checkpoints/step_000008", point, notes={**point.notes, "nonce": "another's"}
    )
    assert reasons(other) == {4: "old", 8: "other_line", 12: "keep_last"}
    write_manifest(
        other / "checkpoints/step_000008", point, notes={**point.notes, "nonce": ["no text"]}
    )
    assert reasons(other) == {4: "old", 8: "other_line", 12: "keep_last"}


def test_a_generation_of_the_parent_run_that_was_copied_into_a_fork_is_left_alone(
    tmp_path: Path,
) -> None:
    parent, branch = ended_run(tmp_path), tmp_path / "branch"
    assert call("fork", f"{parent}@8", branch).status == 0
    train(options_of(branch, until=12))
    shutil.copytree(parent / "checkpoints/step_000004", branch / "checkpoints/step_000004")
    assert reasons(branch) == {4: "other_line", 8: "old", 12: "keep_last"}


def test_a_generation_that_is_pinned_while_it_is_being_retired_stays(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    store = GenerationStore(run_dir)
    holds, told = threading.Event(), threading.Event()

    def pins_late() -> None:
        with store._holding_pins():
            holds.set()
            told.wait(20)
            pins = store._read_pins().with_pin(4, store.manifest(4).id, "late")
            from dist_ckpt.generations._pins import encode_pins

            (run_dir / "pins.json").write_bytes(encode_pins(pins))

    thread = threading.Thread(target=pins_late)
    thread.start()
    holds.wait(20)
    threading.Timer(0.1, told.set).start()
    assert store.retire(4) is False  # waited for the one that pins
    thread.join(20)
    assert steps(run_dir) == [4, 8, 12]


def test_prune_tells_what_really_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = ended_run(tmp_path)
    judge = lifecycle.judge

    def judge_and_pin(store: GenerationStore, *others: Any) -> Any:
        verdicts = judge(store, *others)
        store.pin(8, "late")
        return verdicts

    monkeypatch.setattr(lifecycle, "judge", judge_and_pin)
    called = call("prune", run_dir, "--keep-last", "1")
    assert steps(run_dir) == [8, 12]
    rows = {line.split()[0]: line for line in called.out.splitlines()}
    assert ("stays" in rows["8"], "pinned meanwhile" in rows["8"]) == (True, True)
    assert "went" not in rows["8"]
    assert " went " in rows["4"]
    store = GenerationStore(run_dir)
    assert called.out.splitlines()[-1].startswith("1 of 3 went, ")
    assert store.bin_path(8).exists()

    store.unpin(8)
    document = call("prune", run_dir, "--keep-last", "1", "--json").json
    assert (document["removed"], document["bins_removed"]) == ([], [])
    told = [(row["step"], row["keep"], row["reason"]) for row in document["generations"]]
    assert told == [(8, True, "pinned"), (12, True, "keep_last")]
