"""Which generations a real resume has proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.history import proven_steps
from helpers.run_dirs import call, ended_run

RESUMED = {"event": "resumed", "attempt": 2, "step": 4}
REPLAYED = {
    "event": "replayed", "attempt": 2, "step": 9, "resumed_step": 4, "agreed": 3, "of": 3,
    "first_difference": None, "first_step": 5, "complete": True, "comparable": True,
}  # fmt: skip


def test_a_replay_that_agreed_proves_what_it_resumed_from() -> None:
    assert proven_steps([RESUMED, REPLAYED]) == {4: "3 of 3 replayed losses, attempt 2"}


@pytest.mark.parametrize(
    "changes",
    [
        {"agreed": 2},
        {"agreed": 0, "of": 0},
        {"first_difference": 7},
        {"complete": False},
        {"comparable": False},
        {"resumed_step": 0},
        {"attempt": 3},
        {"agreed": True, "of": 1},
    ],
)
def test_less_than_all_proves_nothing(changes: dict[str, Any]) -> None:
    assert proven_steps([RESUMED, {**REPLAYED, **changes}]) == {}


def test_a_resume_with_a_part_left_out_proves_nothing() -> None:
    left_out = {"event": "restored_with", "attempt": 2, "step": 4, "omit": ["rng"], "accept": []}
    assert proven_steps([RESUMED, left_out, REPLAYED]) == {}
    assert proven_steps([RESUMED, {**left_out, "omit": []}, REPLAYED]) != {}


@pytest.mark.parametrize("event", ["saved", "faulty", "skipped"])
def test_what_took_its_place_isnt_proven(event: str) -> None:
    assert proven_steps([RESUMED, REPLAYED, {"event": event, "attempt": 3, "step": 4}]) == {}
    assert proven_steps([RESUMED, REPLAYED, {"event": event, "attempt": 3, "step": 8}]) != {}


def test_what_a_rewind_set_aside_isnt_there_any_more() -> None:
    rewound = {"event": "rewound", "attempt": 3, "step": 2, "set_aside": [4, 8]}
    assert proven_steps([RESUMED, REPLAYED, rewound]) == {}


def test_ls_and_show_tell_what_is_proven(tmp_path: Path) -> None:
    import json

    run_dir = ended_run(tmp_path)
    with (run_dir / "small.journal.jsonl").open("a") as journal:
        journal.writelines(
            json.dumps({"time": 1.0, **event}) + "\n" for event in (RESUMED, REPLAYED)
        )
    rows = call("ls", run_dir, "--json").json["generations"]
    assert [row["proven"] for row in rows] == ["3 of 3 replayed losses, attempt 2", None, None]
    assert "3 of 3 replayed losses" in call("ls", run_dir).out.splitlines()[1]
    assert call("show", f"{run_dir}@4", "--json").json["proven"] == rows[0]["proven"]
    assert "proven     3 of 3 replayed losses" in call("show", f"{run_dir}@4").out
    assert call("show", f"{run_dir}@8", "--json").json["proven"] is None


def test_a_journal_that_cant_be_read_proves_nothing_and_stops_no_listing(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "small.journal.jsonl").unlink()
    (run_dir / "small.journal.jsonl").mkdir()
    called = call("ls", run_dir, "--json")
    assert (called.status, called.json["generations"][0]["proven"]) == (0, None)
