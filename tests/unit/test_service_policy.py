"""The lives of a policy: its sidecar, zombies, what makes it start fresh, and what doesn't."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.history import Journal, read_journal, read_loss_raw
from dist_ckpt.lifecycle import new_request, read_request, write_request
from dist_ckpt.service._policy import KeptPolicy, Past
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps
from helpers.pivoting import SOURCES, Training


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 25 steps: generations of 20 and 25."""
    run = tmp_path / "andrea"
    Training().train(run, 25)
    return run


def _events(run: Path, word: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run) if event["event"] == word]


def _state(run: Path) -> Any:
    return json.loads((run / "andrea.state.json").read_text(encoding="utf-8"))


def _pulls(training: Training) -> int:
    return sum(arm.pulls for arm in training.bandit.arms.values())


def test_the_sidecar_shows_the_policy_of_the_newest_generation_and_a_resume_goes_on(
    run: Path, tmp_path: Path
) -> None:
    assert sum(arm["pulls"] for arm in _state(run)["arms"].values()) == 25
    resumed = Training()
    with resumed.checkpointer(run):
        assert resumed.bandit.state_dict() == _state(run)
    resumed = Training()
    resumed.train(run, 40)
    whole = Training()
    whole.train(tmp_path / "whole", 40)
    assert resumed.bandit.state_dict() == whole.bandit.state_dict() == _state(run)
    for word in ("pivot", "policy_fresh", "policy_differs", "zombie_arms"):
        assert _events(run, word) == []


def test_a_crash_between_the_sidecar_and_its_commit_leaves_the_resume_points_copy_to_count(
    tmp_path: Path,
) -> None:
    run = tmp_path / "andrea"
    training = Training()
    fault = Fault("rename", path="*/.tmp-step_000010-*", error="EIO")
    ops = FaultyOps(fault)
    with use_ops(ops), training.checkpointer(run, every=5) as ckpt:
        for step in ckpt.steps(12):
            training.update()
            if step == 11:
                ckpt.stop()
    assert ops.strikes
    assert [generation.step for generation in dist_ckpt.open_run(run).generations()] == [5, 11]
    assert sum(arm["pulls"] for arm in _state(run)["arms"].values()) == 11
    # As after a crash there: the sidecar is of step 11, the newest generation of step 5.
    shutil.rmtree(run / "checkpoints" / "step_000011")
    training = Training()
    training.train(run, 6)
    assert _pulls(training) == 6
    (event,) = _events(run, "policy_differs")
    assert event["step"] == 5


def test_a_zombie_arm_is_named_with_its_weight_set_aside_and_never_pulled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "andrea"
    before = Training(("docs", "repo-docstrings", "code"))
    with before.checkpointer(run) as ckpt:
        for _ in ckpt.steps(20):
            before.update()
        before.bandit.arms["repo-docstrings"].weight = 1.546
        ckpt.stop()
    # The seed's weight, as it stood in the state that was saved.
    weight = _state(run)["arms"]["repo-docstrings"]["weight"]

    after = Training(("docs", "code", "names"))
    with caplog.at_level(logging.WARNING, "dist_ckpt"), after.checkpointer(run) as ckpt:
        assert set(after.bandit.arms) == {"docs", "code", "names"}
        assert after.bandit.arms["docs"].pulls == before.bandit.arms["docs"].pulls
        assert after.bandit.arms["names"].pulls == 0  # a new source starts clean
        pulled = set()
        for _ in ckpt.steps(60):
            source, _ = after.update()
            pulled.add(source)
    assert pulled == {"docs", "code", "names"}
    (event,) = _events(run, "zombie_arms")
    assert event["step"] == 20
    assert event["arms"]["repo-docstrings"]["weight"] == weight
    assert event["arms"]["repo-docstrings"]["pulls"] > 0
    assert f"repo-docstrings (weight {weight:.3f})" in caplog.text
    assert "repo-docstrings" not in _state(run)["arms"]
    Training(("docs", "code", "names")).train(run, 61)
    assert len(_events(run, "zombie_arms")) == 1  # the next resume point doesn't know it


def test_a_sidecar_that_was_archived_by_hand_is_a_pivot(run: Path) -> None:
    (run / "archive").mkdir()
    (run / "andrea.state.json").rename(run / "archive" / "old.state.json")
    training = Training()
    with training.checkpointer(run):
        assert _pulls(training) == 0
    (pivot,) = _events(run, "pivot")
    assert (pivot["by"], pivot["step"], pivot["archive"]) == ("hand", 25, None)
    # A crash before the next generation: what is in the resume point still doesn't count.
    training = Training()
    training.train(run, 30)
    assert _pulls(training) == 5
    assert len(_events(run, "pivot")) == 1
    assert [event["why"] for event in _events(run, "policy_fresh")] == ["taken", "pivot"]
    # And the state of the new generation does.
    training = Training()
    training.train(run, 31)
    assert _pulls(training) == 6


def test_going_back_behind_a_pivot_starts_fresh_too(run: Path) -> None:
    (run / "andrea.state.json").unlink()
    Training().train(run, 40)
    training = Training()
    training.train(run, 30, resume=20)
    assert _pulls(training) == 10
    training = Training()
    training.train(run, 31)  # step 30 was made under the new policy, though 30 < 40
    assert _pulls(training) == 11


def test_a_copy_of_a_generation_without_its_sidecars_keeps_the_policy(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    training = Training()
    training.train(copy, 26)
    assert _pulls(training) == 26
    assert json.loads((copy / "copy.state.json").read_text())["phase"]["pulls"] == 26


def test_a_sidecar_that_differs_is_journalled_kept_and_doesnt_count(run: Path) -> None:
    path = run / "andrea.state.json"
    state = _state(run)
    edited = {**state, "arms": {**state["arms"], "docs": {**state["arms"]["docs"], "pulls": 9000}}}
    path.write_text(json.dumps(edited), encoding="utf-8")
    training = Training()
    with training.checkpointer(run):
        assert _pulls(training) == 25
    (event,) = _events(run, "policy_differs")
    assert event["paths"] == ["arms/docs/pulls"]
    assert json.loads((run / event["kept_as"]).read_text()) == edited
    assert _state(run) == state


def test_a_sidecar_of_before_a_rewind_is_kept_and_no_fault(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = _state(run)
    training = Training()
    with caplog.at_level(logging.WARNING, "dist_ckpt"), training.checkpointer(run, resume=20):
        assert _pulls(training) == 20
    assert [record for record in caplog.records if "state.json" in record.message] == []
    assert _events(run, "policy_differs") == []
    (event,) = _events(run, "policy_followed")
    assert json.loads((run / event["kept_as"]).read_text()) == state
    assert _state(run) == training.bandit.state_dict()


def test_a_sidecar_that_isnt_json_is_refused_by_name(run: Path) -> None:
    (run / "andrea.state.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"andrea\.state\.json"):
        Training().train(run, 30)


def test_settings_are_given_to_the_policy_before_its_state_and_their_change_is_told(
    run: Path,
) -> None:
    settings = {"floors": {"docs": 4.0}}
    (run / "andrea.policy.json").write_text(json.dumps(settings), encoding="utf-8")
    training = Training()
    with training.checkpointer(run) as ckpt:
        assert training.bandit.settings.floors == {"docs": 4.0}
        assert _pulls(training) == 25
        for _ in ckpt.steps(26):
            training.update()
    (event,) = _events(run, "policy_changed")
    assert (event["policy"], event["previous"]) == (settings, None)
    assert dist_ckpt.open_run(run).generation(26).manifest.notes["policy"] == settings
    Training().train(run, 27)
    assert len(_events(run, "policy_changed")) == 1


def test_settings_that_nobody_heeds_end_the_start(run: Path) -> None:
    (run / "andrea.policy.json").write_text('{"floors": {}}', encoding="utf-8")
    training = Training()
    with (
        pytest.raises(UsageError, match="nobody would heed"),
        dist_ckpt.Checkpointer(run, model=training.model, optimizer=training.optimizer),
    ):
        pass


class Learner(torch.nn.Module):
    """A policy of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(1000.0))


def test_a_policy_of_tensors_is_told_by_digests(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    learner = Learner()
    for until in (3, 4):
        training = Training()
        training.bandit = learner  # type: ignore[assignment]
        with training.checkpointer(run) as ckpt:
            for _ in ckpt.steps(until):
                training.optimizer.step()
                learner.table.data += 1
    table = _state(run)["$odict"] if "$odict" in _state(run) else _state(run)
    text = json.dumps(table)
    assert '"xxh3_128"' in text
    assert len(text) < 300
    assert _events(run, "policy_differs") == []
    assert learner.table[0].item() == 4.0


def test_what_a_crash_left_behind_a_pivot_is_no_part_of_the_history(run: Path) -> None:
    """A tail of the loss file that the old policy made is voided once, by the cut."""
    with (run / "andrea.loss.json").open("r+", encoding="utf-8") as file:
        text = file.read()
        file.seek(0)
        file.write(text.rstrip().removesuffix("]") + ",\n[26, 1.5],\n[27, 1.25]]")
    (run / "andrea.state.json").unlink()
    Training().train(run, 30)
    assert [step for step, _ in dist_ckpt.open_run(run).loss()] == list(range(1, 31))
    assert (26, 1.5) in [tuple(entry) for entry in read_loss_raw(run)]
    assert _events(run, "replayed") == []
    assert set(SOURCES) == set(_state(run)["arms"])


def test_a_request_is_answered_at_the_boundary_and_other_signals_at_once(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    training = Training()
    with training.checkpointer(run, every=10) as ckpt:
        for step in ckpt.steps(30):
            training.update()
            if step == 3:
                write_request(run, new_request(None))
                os.kill(os.getpid(), signal.SIGUSR1)
                assert not ckpt.poll()  # a long evaluation needn't end for it
            if step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert (ckpt.stopped, ckpt.step) == ("pivot", 10)
    saved = [(event["step"], event["reasons"]) for event in _events(run, "saved")]
    assert saved == [(5, ["SIGUSR1"]), (10, ["cadence", "SIGUSR1", "pivot"])]
    assert read_request(run) is not None  # for whoever comes next
    training = Training()
    with training.checkpointer(run, every=10):
        assert _pulls(training) == 0
    assert read_request(run) is None


def test_a_request_for_which_no_signal_comes_is_left_for_the_next_start(tmp_path: Path) -> None:
    run = tmp_path / "andrea"
    training = Training()
    with training.checkpointer(run, every=5) as ckpt:
        write_request(run, new_request({"c": 0.0}))
        for _ in ckpt.steps(7):
            training.update()
    assert ckpt.stopped is None
    training = Training()
    with training.checkpointer(run):
        assert training.bandit.settings.c == 0.0
        assert _pulls(training) == 0
    assert [event["step"] for event in _events(run, "pivot")] == [7]


def test_a_fresh_policy_is_fresh_though_a_newer_generation_was_tried_before(
    tmp_path: Path,
) -> None:
    """The newest generation turns out faulty after its policy was loaded: random state is last."""
    run = tmp_path / "andrea"
    Training().train(run, 5, every=5)
    (run / "andrea.state.json").unlink()
    Training().train(run, 10, every=5)
    kept = KeptPolicy(Training().bandit)
    store = dist_ckpt.open_run(run)
    pivot = _events(run, "pivot")[0]["id"]
    kept.begin(Past(pivot, None, None, ()), "")
    old, new = (store.generation(step).manifest for step in (5, 10))
    kept.choose(new)
    kept.load_state_dict(_state(run))
    assert kept.policy.arms["docs"].pulls > 0
    kept.choose(old)
    kept.load_state_dict({"arms": {}})
    assert all(arm.pulls == 0 for arm in kept.policy.arms.values())


def test_a_run_directory_that_vanishes_gets_the_policys_files_back(run: Path) -> None:
    (run / "andrea.policy.json").write_text('{"c": 0.25}', encoding="utf-8")
    training = Training()
    with training.checkpointer(run, every=5) as ckpt:
        for step in ckpt.steps(40):
            training.update()
            if step == 30:
                shutil.rmtree(run)
    assert len(_events(run, "made_again")) == 1
    assert json.loads((run / "andrea.policy.json").read_text()) == {"c": 0.25}
    assert sum(arm["pulls"] for arm in _state(run)["arms"].values()) == 40
    again = Training()
    with again.checkpointer(run, every=5):
        assert again.bandit.state_dict() == training.bandit.state_dict()
        assert again.bandit.settings.c == 0.25


@pytest.mark.parametrize("policy", [True, False])
def test_a_branch_that_was_given_settings_of_its_own_starts_with_a_fresh_policy(
    run: Path, tmp_path: Path, policy: bool
) -> None:
    branch = tmp_path / "branch"
    shutil.copytree(run / "checkpoints", branch / "checkpoints")
    journal = Journal.open(branch / "branch.journal.jsonl", 0)
    journal.append("forked", step=25, id="0123", policy=policy)
    journal.close()
    for until, fresh, restored in ((26, 1, 26), (27, 2, 27)):
        training = Training()
        training.train(branch, until)
        assert _pulls(training) == (fresh if policy else restored)
