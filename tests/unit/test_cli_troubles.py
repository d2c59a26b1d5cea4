"""What ``status`` and ``show`` say of a run that isn't as it should be."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dist_ckpt.history import History, read_journal
from helpers.faulty_ops import Fault
from helpers.run_dirs import call, ended_run, options_of
from helpers.trainers import Job, train


def test_saves_that_keep_failing_are_told_with_count_time_and_cause(tmp_path: Path) -> None:
    run = tmp_path / "live"
    full = Fault("pwrite", "*.shard", nth=2, times=20, error="ENOSPC")
    with Job(options_of(run, until=10_000, every=5, step_secs=0.02), faults={0: [full]}) as job:
        job.wait_until(lambda: job.stderr().count("was not saved") >= 2)
        called = call("status", run, "--json", "--max-age", "60")
        failing = called.json["saves_failing"]
        assert failing["count"] >= 2
        assert time.time() - 60 < failing["since"] < time.time()
        assert "ENOSPC" in failing["error"]
        # Alive and training, but nothing is saved: that isn't health.
        assert (called.status, called.json["alive"], called.json["healthy"]) == (1, True, False)
        text = call("status", run).out
        assert "FAILING" in text
        assert "saves failed, since" in text
        job.wait_until(lambda: len(job.strikes()) == 20)
        job.wait_until(lambda: call("status", run, "--json").json["saves_failing"] is None)
        assert call("status", run, "--json", "--max-age", "60").json["healthy"] is True


def test_a_newest_generation_that_is_damaged_is_named_and_not_counted_on(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    shard = run / "checkpoints/step_000012/rank_00000.state"
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-1])
    document = call("status", run, "--json").json
    assert (document["committed_step"], document["verified_step"]) == (8, 8)
    assert document["lost_steps"] == 4
    assert list(document["damaged"]) == ["12"]
    text = call("status", run).out
    assert "DAMAGED    step 12: " in text
    for step in (4, 8):
        (run / f"checkpoints/step_{step:06d}/resume_point.json").unlink()
    document = call("status", run, "--json").json
    assert document["committed_step"] is None
    assert list(document["damaged"]) == ["12", "8", "4"]
    assert "none that can be used" in call("status", run).out


def test_of_an_error_of_many_lines_the_first_is_shown_and_the_rest_counted(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    error = "This isn't the run that was saved (2 differences):\n  config.a: 1\n  config.b: 2\n"
    with History(run, "small", 2) as history:
        history.journal.append("save_failed", step=13, error=error)
        history.journal.append("attempt_failed", error=error)
    facts = run / "run.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "attempt": 2}))
    text = call("status", run).out
    first = "This isn't the run that was saved (2 differences):"
    rest = "(and 2 more lines: `--json` and the journal have all)"
    told = [line for line in text.splitlines() if first in line]
    assert len(told) == 2
    assert all(line.endswith(f"{first} {rest}") for line in told)
    assert "\\n" not in text
    assert call("status", run, "--json").json["saves_failing"]["error"] == error


def test_what_was_set_aside_is_told(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    (run / "archive/faulty_000012").mkdir(parents=True)
    assert call("status", run, "--json").json["set_aside"] == ["faulty_000012"]
    assert "archive/: faulty_000012" in call("status", run).out


def test_losses_that_are_missing_are_counted(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    assert call("status", run, "--json").json["losses_missing"] is None
    assert "losses     12 up to it\n" in call("show", run).out
    loss = run / "small.loss.json"
    loss.write_bytes(loss.read_bytes().partition(b"[8,")[0].rstrip(b" ,\n") + b"]")
    gap = call("status", run, "--json").json["losses_missing"]
    assert (gap["num_logged"], gap["num_found"], gap["last_found"]) == (12, 7, 7)
    told = "5 of the 12 losses up to step 12 are missing from the loss file (the last is of step 7)"
    assert f"LOSSES     {told}" in call("status", run).out
    assert told in call("show", run).out
    assert told in call("show", run, "--json").json["losses_missing"]
    assert call("show", f"{run}@4", "--json").json["losses_missing"] is None
    loss.unlink()
    assert "12 of the 12 losses" in call("status", run).out
    loss.write_text("garbage")
    assert call("show", run).status == 0


def test_losses_of_a_file_that_was_put_back_are_no_longer_missed(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    loss = run / "small.loss.json"
    copy = loss.read_bytes()
    loss.write_text("[]")
    train(options_of(run, until=12))
    assert [e["found"] for e in read_journal(run) if e["event"] == "losses_missing"] == [0]
    assert "12 of the 12 losses" in call("status", run).out
    loss.write_bytes(copy.partition(b",\n[8,")[0] + b"]")
    told = "5 of the 12 losses up to step 12 are missing from the loss file (the last is of step 7)"
    assert told in call("status", run).out
    assert told in call("loss", run).out
    loss.write_bytes(copy)
    train(options_of(run, until=16))
    for command in ("status", "show", "loss"):
        assert "missing from the loss file" not in call(command, run).out
    assert call("status", run, "--json").json["losses_missing"] is None
    assert call("loss", run, "--json").json["runs"][0]["losses_missing"] is None


def test_losses_that_were_put_back_after_a_save_without_them_are_no_longer_missed(
    tmp_path: Path,
) -> None:
    run = ended_run(tmp_path)
    loss = run / "small.loss.json"
    copy = loss.read_bytes()
    loss.write_text("[]")
    train(options_of(run, until=16))
    assert "12 of the 12 losses up to step 12" in call("status", run).out
    loss.write_bytes(copy[:-1] + b"," + loss.read_bytes()[1:])
    assert call("status", run, "--json").json["losses_missing"] is None


def test_losses_that_were_changed_are_noticed(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    loss = run / "small.loss.json"
    loss.write_text(loss.read_text().replace("[3, ", "[3, 1"))
    assert "up to step 12 aren't those that were logged" in call("status", run).out


def test_losses_of_another_run_are_not_missed_in_a_copy(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    for name in ("small.journal.jsonl", "small.loss.json"):
        (run / name).unlink()
    assert call("status", run, "--json").json["losses_missing"] is None


def test_what_a_resume_found_missing_stays_told(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    with History(run, "small", 2) as history:
        history.loss.append(7, 1.0)  # voids the five behind it
        mark = {"losses": 12, "last_step": 12, "digest": "another"}
        gap = history.gap(12, mark)
    assert gap is not None
    assert (gap.num_missing, gap.last_found) == (5, 7)
    assert "5 of the 12 losses" in call("status", run).out
