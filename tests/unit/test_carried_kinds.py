"""What a loss was that isn't finite stands in the journal, wherever the loss is brought."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import dist_ckpt
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History, read_history, read_journal, read_loss
from helpers.run_dirs import call

ODD = {1: math.nan, 3: math.inf, 5: -math.inf}
UP_TO_4 = {1: "nan", 3: "inf"}


def train(run_dir: Path, until: int, odd: dict[int, float]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dist_ckpt.Checkpointer(run_dir, model=model, optimizer=optimizer, every=2) as ckpt:
        for step in ckpt.steps(until=until):
            ckpt.record(loss=odd.get(step, 1 / step))


def kinds(run_dir: Path) -> dict[int, str]:
    told = [event for event in read_journal(run_dir) if event["event"] == "loss_not_finite"]
    return {event["step"]: event["kind"] for event in told}  # the last word holds


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    train(tmp_path / "run", 6, ODD)
    assert kinds(tmp_path / "run") == {1: "nan", 3: "inf", 5: "-inf"}
    return tmp_path / "run"


def test_a_fork_a_shipped_and_a_rewritten_run_tell_what_losses_up_to_their_step_were(
    run_dir: Path, tmp_path: Path
) -> None:
    made = [tmp_path / "branch", tmp_path / "away/run-step_000004", tmp_path / "one"]
    assert call("fork", f"{run_dir}@4", made[0]).status == 0
    assert call("ship", f"{run_dir}@4", tmp_path / "away").status == 0
    assert call("reshard", f"{run_dir}@4", "--world-size", "1", "-o", made[2]).status == 0
    for new in made:
        assert [step for step, loss in read_loss(new) if loss is None] == [1, 3]
        assert kinds(new) == UP_TO_4
    # Told already, they are no trace of work there: the same call finds it done.
    assert call("fork", f"{run_dir}@4", made[0], "--json").json["was_there"]
    assert call("ship", f"{run_dir}@4", tmp_path / "away", "--json").json["sent"] == []
    with History(made[1], "run", 1) as history:
        history.record(5, -math.inf, {})
    called = call("ship", f"{run_dir}@4", tmp_path / "away")
    assert (called.status, "tells of `loss_not_finite`" in called.err) == (2, True)
    train(made[0], 6, ODD)
    assert kinds(made[0]) == UP_TO_4 | {5: "-inf"}
    assert call("fork", f"{run_dir}@4", made[0]).status == 2


def test_only_losses_that_count_and_are_null_bring_a_kind(run_dir: Path, tmp_path: Path) -> None:
    assert call("rewind", f"{run_dir}@2").status == 0
    train(run_dir, 4, {})
    assert kinds(run_dir)[3] == "inf"  # of the branch that was left
    assert call("fork", f"{run_dir}@4", tmp_path / "branch").status == 0
    assert kinds(tmp_path / "branch") == {1: "nan"}


def test_a_branch_from_the_archive_has_the_kinds_that_it_had(run_dir: Path, tmp_path: Path) -> None:
    assert call("rewind", f"{run_dir}@2").status == 0
    train(run_dir, 4, {3: math.nan})
    assert kinds(run_dir)[3] == "nan"
    archived = run_dir / "archive/rewind_to_000002/step_000004"
    assert call("fork", archived, tmp_path / "branch").status == 0
    assert kinds(tmp_path / "branch") == UP_TO_4
    assert call("rewind", f"{run_dir}@2").status == 0
    assert call("undelete", run_dir, "rewind_to_000002/step_000004").status == 0
    assert GenerationStore(run_dir).steps() == [2, 4]
    assert kinds(run_dir)[3] == "inf"
    with History(run_dir, "run", 9) as history:
        history.begin(2)
        history.record(3, math.inf, {})
    assert history.replay is not None
    assert history.replay.first_difference is None


def test_a_replay_tells_the_kind_that_a_crash_took_from_the_journal(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        with History(tmp_path, "run", attempt) as history:
            history.begin(None)
            for step, loss in ODD.items():
                history.record(step, loss, {})
        if attempt == 1:
            path = tmp_path / "run.journal.jsonl"
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(line for line in lines if b'"inf"' not in line))
            assert kinds(tmp_path) == {1: "nan", 5: "-inf"}
        else:
            assert history.replay is not None
            assert history.replay.all_agreed
    told = [e for e in read_history(tmp_path).journal if e["event"] == "loss_not_finite"]
    assert [(event["step"], event["attempt"]) for event in told] == [(1, 1), (5, 1), (3, 2)]
