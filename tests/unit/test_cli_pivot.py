"""``dist-ckpt pivot`` from the outside: its answers, refusals, and what `show` says after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.cli import main
from helpers.pivoting import Training

NEW = {"floors": {"docs": 3.0}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "andrea"
    Training().train(run, 20)
    return run


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "polish.json"
    path.write_text(json.dumps(NEW), encoding="utf-8")
    return path


def _call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_dry_run_tells_and_changes_nothing(
    run: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run.iterdir())
    status, out, _ = _call(capsys, "pivot", run, "--policy", policy, "--dry-run")
    assert status == 0
    assert "would pivot at the checkpoint of step 20" in out
    assert "andrea.state.json would go to archive/" in out
    assert '{"floors": {"docs": 3.0}}' in out
    status, out, _ = _call(capsys, "pivot", run, "-n", "--json")
    document = json.loads(out)
    assert (status, document["dry_run"], document["step"]) == (0, True, 20)
    assert sorted(path.name for path in run.iterdir()) == before


def test_the_answer_names_both_policies_what_was_set_aside_and_how_to_go_on(
    run: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = _call(capsys, "pivot", run, "--policy", policy)
    assert status == 0
    assert "set aside in archive/pivot_000020: andrea.samples.json, andrea.state.json" in out
    assert "policy before: as the program sets it" in out
    assert 'policy now:    {"floors": {"docs": 3.0}}' in out
    assert "start it again" in out


def test_show_names_the_pivot_at_its_resume_point_and_the_policy_of_later_ones(
    run: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(capsys, "pivot", run, "--policy", policy)[0] == 0
    Training().train(run, 40)
    status, out, _ = _call(capsys, "show", f"{run}@20")
    assert status == 0
    (line,) = (line for line in out.splitlines() if line.startswith("pivot "))
    assert "as the program sets it" in line
    assert json.dumps(NEW) in line
    assert "archive/pivot_000020" in line
    document: dict[str, Any] = json.loads(_call(capsys, "show", f"{run}@40", "--json")[1])
    (pivot,) = document["pivots"]
    assert (pivot["step"], pivot["policy"], pivot["previous"]) == (20, NEW, None)
    assert document["notes"]["policy"] == NEW
    out = _call(capsys, "show", f"{run}@40")[1]
    assert any(line.startswith("policy ") and json.dumps(NEW) in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "0"], "isn't a number of seconds"),
        (["--policy", "BAD"], "isn't one JSON object"),
        (["--policy", "MISSING"], "MISSING"),
    ],
)
def test_what_cant_be_meant_is_refused_with_status_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "BAD").write_text("[1]", encoding="utf-8")
    words = [str(tmp_path / word) if word in {"BAD", "MISSING"} else word for word in words]
    status, out, err = _call(capsys, "pivot", run, *words)
    assert (status, out) == (2, "")
    assert says in err
    assert not (run / "request.json").exists()
