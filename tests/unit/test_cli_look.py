"""``dist-ckpt ls``, ``status``, ``show``."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.history import History
from dist_ckpt.runs import _listing, list_rows, open_run
from dist_ckpt.storage import RunLock
from helpers.generating import change_byte
from helpers.run_dirs import (
    CONFIG,
    call,
    ended_run,
    killed_run,
    options_of,
    snapshot_of,
    write_manifest,
)
from helpers.trainers import Job, train


def change_facts(run_dir: Path, **changes: Any) -> None:
    path = run_dir / "run.json"
    facts = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(facts))


def evidence(document: dict[str, Any], what: str) -> Any:
    return next((found for found in document["evidence"] if found["what"] == what), None)


# ls


def test_a_fact_of_another_kind_in_run_json_says_nothing(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    odd: Any
    for odd in ("2", [2], True, {"a": 2}):
        change_facts(run_dir, world_size=odd, pid=odd, attempt=odd, host=[odd])
        called = call("status", run_dir)
        assert (called.status, called.out.splitlines()[0]) == (0, "small: dead (attempt 1)")
        document = call("status", run_dir, "--json").json
        assert [document[key] for key in ("world_size", "pid", "host")] == [None, None, None]


def test_ls_shows_each_generation(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "pins.json").write_text('{"8": "before the pivot"}')
    called = call("ls", run_dir)
    assert (called.status, called.err) == (0, "")
    head, *lines = called.out.splitlines()
    assert head.split() == [
        "step", "age", "reason", "ranks", "bytes", "verified", "pinned", "proven"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == ["4", "8", "12"]
    assert "before the pivot" in lines[1]
    assert lines[0].endswith("-")


def test_ls_as_json_has_all_facts(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    document = call("ls", run_dir, "--json").json
    assert (document["run"], document["path"]) == ("small", str(run_dir))
    row = document["generations"][0]
    assert row.keys() == {
        "step", "time", "age_secs", "reasons", "world_size", "bytes", "verified_at", "pinned",
        "proven", "fault", "sizes_compared",
    }  # fmt: skip
    assert row["step"] == 4
    assert row["reasons"] == ["cadence"]
    assert row["bytes"] == open_run(run_dir).generation(4).manifest.num_bytes
    assert row["verified_at"] >= row["time"]
    assert (row["pinned"], row["proven"], row["fault"]) == (None, None, None)


def test_the_parent_of_runs_names_them(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number in range(7):
        (runs / f"r{number}").mkdir(parents=True)
        (runs / f"r{number}" / "run.json").write_text("{}")
    (runs / "other").mkdir()
    for command in ("ls", "status", "verify", "show"):
        called = call(command, runs)
        assert called.status == 2
        named = ", ".join(str(runs / f"r{number}") for number in range(5))
        assert f"Below it lie {named} and 2 more: name one of them." in called.err
    assert "Below it" not in call("ls", runs / "other").err


def test_ls_of_a_run_that_has_saved_nothing_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    called = call("ls", run_dir)
    assert (called.status, called.out) == (0, f"{run_dir} has no generation yet.\n")
    assert call("ls", run_dir, "--json").json["generations"] == []


def test_ls_shows_a_broken_manifest_and_ends_with_1(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000008/resume_point.json", 300)
    called = call("ls", run_dir)
    assert called.status == 1
    assert "UNREADABLE" in called.out.splitlines()[2]
    rows = call("ls", run_dir, "--json").json["generations"]
    assert [row["fault"] is not None for row in rows] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("rank_00000.shard", lambda path: os.truncate(path, 50), "has 50 bytes where 1,940 were"),
        ("rank_00000.state", lambda path: path.unlink(), "is missing"),
        (".snapshot_metadata", lambda path: path.unlink(), "is missing"),
        (".snapshot_metadata", lambda path: os.truncate(path, 9), "has 9 bytes where"),
        ("rank_00000.shard", lambda path: (path.unlink(), path.mkdir()), "isn't a file"),
    ],
)
@pytest.mark.parametrize("verified", [True, False])
def test_ls_shows_files_of_another_size_and_ends_with_1(
    tmp_path: Path, name: str, fault: Callable[[Path], object], told: str, verified: bool
) -> None:
    run_dir = ended_run(tmp_path)
    path = run_dir / "checkpoints/step_000012" / name
    os.chmod(path, 0o600)
    fault(path)
    if not verified:
        (path.parent / "verified.json").unlink()
    called = call("ls", run_dir)
    assert called.status == 1
    assert "DAMAGED" in called.out.splitlines()[3]
    assert str(path) in called.out.splitlines()[-1]
    assert told in called.out.splitlines()[-1]
    rows = call("ls", run_dir, "--json").json["generations"]
    assert [row["fault"] is not None for row in rows] == [False, False, True]
    assert (rows[2]["step"], rows[2]["reasons"]) == (12, ["cadence", "last"])
    assert all(row["sizes_compared"] for row in rows)
    status = call("status", run_dir)
    assert "DAMAGED" in status.out
    assert "committed  step 8" in status.out


def test_ls_compares_the_sizes_of_the_newest_where_there_are_too_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_listing, "_MAX_SIZES", 6)
    run_dir = ended_run(tmp_path)
    (run_dir / "checkpoints/step_000004/rank_00000.state").unlink()
    rows = list_rows(open_run(run_dir).store)
    assert [row.sizes_compared for row in rows] == [False, True, True]
    assert [row.fault for row in rows] == [None, None, None]


def test_a_run_whose_generations_vanished_is_told_of_by_all(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    told = f"{run_dir} has no generation, though the journal tells of step 12."
    listed = call("ls", run_dir)
    assert (listed.status, listed.out.splitlines()[0]) == (1, told)
    assert "Is the disk mounted?" in listed.out
    assert call("ls", run_dir, "--json").json["vanished"] == told
    status = call("status", run_dir)
    assert status.status == 0
    assert f"VANISHED   {told}" in status.out
    assert "committed  nothing any more" in status.out
    assert call("status", run_dir, "--json").json["vanished"] == told
    for address in (run_dir, f"{run_dir}@8", f"{run_dir}@latest"):
        shown = call("show", address)
        assert (shown.status, shown.err.splitlines()[0]) == (2, f"dist-ckpt: {told}")


def test_a_run_that_began_anew_on_purpose_has_lost_nothing(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    with (run_dir / "small.journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write('{"time": 1.0, "attempt": 2, "event": "fresh_start", "step": 0}\n')
    assert call("ls", run_dir).status == 0
    assert call("status", run_dir, "--json").json["vanished"] is None


def test_text_from_a_file_cannot_drive_the_terminal(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    generation = open_run(run_dir).generation(8)
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e\r\n[red]"
    write_manifest(generation.path, generation.manifest, reasons=(hostile,), run=hostile)
    for command in ("ls", "show"):
        out = call(command, f"{run_dir}@8").out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
        assert r"\x1b]0;owned\x07" in out
        assert "[red]" in out


# status


def test_a_run_that_came_to_its_end_is_ended(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    called = call("status", run_dir, "--json")
    document = called.json
    assert (document["state"], document["alive"]) == ("ended", False)
    assert '"state": "ended"' in called.out  # as the probes for Kubernetes look for it
    assert (document["last_step"], document["committed_step"]) == (12, 12)
    assert (document["verified_step"], document["lost_steps"]) == (12, 0)
    assert document["generations_that_fit"] > 0
    text = call("status", run_dir).out
    assert text.startswith("small: ended (attempt 1, 1 rank)\n")
    assert "attempt 1 ended at step 12" in text


def test_a_killed_run_is_dead_and_says_by_what_evidence(tmp_path: Path) -> None:
    """Case 53: after a SIGKILL nothing on disk says "running" any more, whatever run.json says."""
    run_dir = killed_run(tmp_path)
    before = snapshot_of(run_dir)
    called = call("status", run_dir)
    assert called.status == 0
    assert called.out.startswith("small: dead (attempt 2, 1 rank)\n")
    document = call("status", run_dir, "--json").json
    assert (document["state"], document["alive"]) == ("dead", False)
    assert evidence(document, "lock")["alive"] is False
    assert evidence(document, "process")["alive"] is False
    assert f"no process {document['pid']}" in evidence(document, "process")["text"]
    assert "no end in the journal" in evidence(document, "journal")["text"]
    assert "step 14 was logged" in evidence(document, "last step")["text"]
    assert (document["last_step"], document["committed_step"]) == (14, 12)
    assert document["lost_steps"] == 2
    assert snapshot_of(run_dir) == before


def test_a_pid_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    change_facts(run_dir, pid=os.getpid(), start_time=1)
    document = call("status", run_dir, "--json").json
    assert document["state"] == "dead"
    assert "another process now" in evidence(document, "process")["text"]


def test_a_run_on_another_host_cannot_be_judged(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    change_facts(run_dir, host="elsewhere.example", pid=os.getpid())
    document = call("status", run_dir, "--json").json
    assert (document["state"], document["alive"]) == ("unknown", None)
    assert "elsewhere.example" in evidence(document, "process")["text"]
    assert "can't be judged" in evidence(document, "process")["text"]
    # The last step's age is all that a probe can go by.
    assert call("status", run_dir, "--max-age", "1e6").status == 0
    assert call("status", run_dir, "--max-age", "0").status == 1


def test_a_held_lock_is_alive_whatever_else_is_said(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"pid": 1, "host": "container"})
    try:
        document = call("status", run_dir, "--json").json
    finally:
        lock.release()
    assert document["state"] == "running"
    assert "pid 1 on container" in evidence(document, "lock")["text"]
    assert call("status", run_dir, "--json").json["state"] == "dead"


def test_a_reader_of_the_lock_is_not_taken_for_its_holder(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    with (run_dir / "run.lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as another `status` does
        assert call("status", run_dir, "--json").json["state"] == "dead"


@pytest.mark.parametrize(
    "data", ["", "[]", '{"pid": "x", "attempt": []}', "\0" * 100, "[" * 10_000]
)
def test_a_hostile_run_file_is_survived(tmp_path: Path, data: str) -> None:
    run_dir = killed_run(tmp_path)
    path = run_dir / "run.json"
    path.unlink()
    path.write_text(data)
    called = call("status", run_dir, "--json")
    assert called.status == 0
    assert called.json["alive"] is not True


@pytest.mark.parametrize(
    "line",
    [
        "[1]", "nonsense", "\0\0",
        '{"event": ["saved"], "step": {}, "time": "now", "attempt": [2]}',
        '{"event": "saved", "step": 1e400, "time": 1e400, "attempt": null}',
        '{"event": "saved", "step": 13, "time": 1e400, "attempt": [2]}',
        '{"event": "attempt_ended", "step": "\\u001b[2J", "reason": [], "attempt": 2}',
    ],
)  # fmt: skip
def test_a_hostile_journal_is_survived(tmp_path: Path, line: str) -> None:
    run_dir = killed_run(tmp_path)
    with (run_dir / "small.journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(f"{line}\n{line}\n")
    for command in (["status"], ["loss", "--replays"], ["save"]):
        called = call(*command, run_dir)
        assert "should not happen" not in called.err
        assert "\x1b" not in called.out + called.err
        assert call(*command, run_dir, "--json").json


def test_a_manifest_of_hostile_numbers_is_survived(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    generation = open_run(run_dir).generation(8)
    identity = {"config": [1], "data": {"id": {"x": []}}, "code": "none", "versions": {}}
    write_manifest(generation.path, generation.manifest, identity=identity, parent={}, time=10**30)
    for command in ("ls", "status"):
        assert call(command, run_dir).status == 0
        assert call(command, run_dir, "--json").status == 0
    shown = call("show", f"{run_dir}@8", "--json")
    assert (shown.status, shown.json["error"]["id"]) == (1, "corrupt-file")
    assert "'time'" in shown.json["error"]["message"]


def test_a_live_run_is_seen_working_and_a_probe_tells_when_it_hangs(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with Job(options_of(run_dir, until=10_000, every=5, step_secs=0.01)) as job:
        job.wait_for_step(25)
        document = call("status", run_dir, "--json", "--max-age", "5").json
        assert (document["state"], document["alive"], document["healthy"]) == (
            "running",
            True,
            True,
        )
        assert evidence(document, "process")["alive"] is True
        assert document["pid"] == job.pid()
        assert document["last_step"] >= 20
        assert 0.005 < document["secs_per_step"] < 1
        assert document["lost_secs"] < 5
        text = call("status", run_dir).out
        assert "and the one in flight" in text
        assert "steps a minute" in text

        job.send(signal.SIGSTOP)
        time.sleep(0.3)
        hanging = call("status", run_dir, "--json", "--max-age", "0.2")
        assert (hanging.status, hanging.json["state"]) == (1, "suspended")
        assert hanging.json["alive"] is True
        assert f"kill -CONT {job.pid()}" in call("status", run_dir).out
        asked = call("save", run_dir, "--json", "--timeout", "5")
        assert (asked.status, asked.json["error"]["id"]) == (2, "not-running")
        assert f"kill -CONT {job.pid()}" in asked.json["error"]["next_step"]
        assert hanging.json["healthy"] is False
        job.send(signal.SIGKILL)
        job.wait()
        assert call("status", run_dir, "--max-age", "1e6").status == 1


def test_a_stopped_run_names_its_signal(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with Job(options_of(run_dir, until=10_000, step_secs=0.01)) as job:
        job.wait_for_step(3)
        job.send(signal.SIGTERM)
        assert job.wait() == [0]
    text = call("status", run_dir).out
    assert text.startswith("live: stopped")
    assert "SIGTERM" in text


def test_a_run_that_failed_names_its_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    with Job(options_of(run_dir, raise_at=6)) as job:
        assert job.wait() == [1]
    called = call("status", run_dir)
    assert called.status == 0
    assert called.out.startswith("live: failed")
    assert "gives up" in called.out


def test_a_command_that_changes_the_loss_file_makes_no_step_newer(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    loss = run_dir / "small.loss.json"
    for step, words in ((4, ["rewind", f"{run_dir}@4"]), (12, ["undelete", run_dir, "12"])):
        before = loss.stat().st_mtime_ns
        assert call(*words).status == 0
        assert loss.stat().st_mtime_ns != before
        generation = open_run(run_dir).generation(step)
        document = call("status", run_dir, "--json").json
        assert (document["last_step"], document["committed_step"]) == (step, step)
        assert document["last_step_age_secs"] == document["committed_age_secs"]
        assert document["last_step_age_secs"] == pytest.approx(
            time.time() - generation.manifest.time, abs=60
        )


def test_a_probe_says_why_its_status_is_1(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    os.utime(run_dir / "small.loss.json", (1.0, 1.0))
    called = call("status", run_dir, "--max-age", "60")
    assert called.status == 1
    told = called.out.splitlines()[-1]
    assert told.startswith("  healthy    no, so status 1: it isn't alive (dead); step 14 is ")
    assert told.endswith(" s old, more than 60 s")
    assert "healthy" not in call("status", run_dir).out
    assert len(call("status", run_dir, "--max-age", "60", "--json").json["ailments"]) == 2
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"pid": 1, "host": "container"})
    try:
        called = call("status", run_dir, "--max-age", "1e12")
    finally:
        lock.release()
    assert (called.status, called.out.splitlines()[-1].split()) == (0, ["healthy", "yes"])


def test_a_new_attempt_has_the_whole_age_for_its_first_step(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    os.utime(run_dir / "small.loss.json", (1.0, 1.0))
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"pid": 1, "host": "container"})
    try:
        young = call("status", run_dir, "--json", "--max-age", "600")
        assert young.json["last_step_age_secs"] > 1e6  # the old attempt's step
        assert 0 < young.json["attempt_age_secs"] < 600
        assert (young.status, young.json["ailments"]) == (0, [])
        hanging = call("status", run_dir, "--json", "--max-age", "0")
        assert hanging.status == 1
        assert "step 14 is " in hanging.json["ailments"][0]
    finally:
        lock.release()


def test_lost_steps_that_are_computed_again_are_signs_of_life_and_tell_no_speed(
    tmp_path: Path,
) -> None:
    run_dir = killed_run(tmp_path)
    losses = dict(open_run(run_dir).loss())
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"pid": 1, "host": "container"})
    try:
        with (run_dir / "small.journal.jsonl").open("a", encoding="utf-8") as journal:
            for event in (  # long ago
                {"time": 1.0, "event": "attempt_started", "step": None},
                {"time": 2.0, "event": "resumed", "step": 12, "replays_until": 14},
                {"time": 4.5, "event": "saved", "step": 13},
            ):
                journal.write(f"{json.dumps({**event, 'attempt': 3})}\n")
        with History(run_dir, "small", 3) as history:
            history.begin(12)
            os.utime(run_dir / "small.loss.json", (1.0, 1.0))
            hung = call("status", run_dir, "--json", "--max-age", "60")
            assert (hung.status, hung.json["replays_until"]) == (1, 14)
            (ailment,) = hung.json["ailments"]
            assert ailment.startswith("the last lost step (up to 14) that came out again is ")
            history.record(13, losses[13], {})
            found = call("status", run_dir, "--json", "--max-age", "60")
        assert (found.status, found.json["ailments"]) == (0, [])
        assert (found.json["last_step"], found.json["lost_steps"]) == (14, 2)
        assert found.json["last_step_age_secs"] < 60
        assert found.json["secs_per_step"] == 2.5
        told = evidence(found.json, "last step")["text"]
        assert told.startswith("step 14 was logged, or one before it came out again as logged, 0.")
    finally:
        lock.release()


def test_a_start_tells_up_to_where_it_replays(tmp_path: Path) -> None:
    run_dir = killed_run(tmp_path)
    train(options_of(run_dir, until=14))
    journal = open_run(run_dir).journal()
    begun = [event for event in journal if event["event"] in ("fresh_start", "resumed")]
    assert [event["replays_until"] for event in begun] == [None, None, 14]
    assert call("status", run_dir, "--json").json["replays_until"] is None  # it is over


@pytest.mark.parametrize("age", ["-1", "nan"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, age: str) -> None:
    called = call("status", ended_run(tmp_path), "--max-age", age, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "setting")


def test_status_is_about_a_run_and_not_about_a_generation(tmp_path: Path) -> None:
    called = call("status", f"{ended_run(tmp_path)}@8")
    assert called.status == 2
    assert "this command is about a run" in called.err


# show


def test_show_tells_all_of_a_resume_point(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    document = call("show", f"{run_dir}@8", "--json").json
    point = open_run(run_dir).generation(8).manifest
    assert (document["step"], document["id"]) == (8, point.id)
    assert document["parent"]["step"] == 4
    assert (document["attempt"], document["reasons"]) == (1, ["cadence"])
    assert (document["world_size"], document["stateless"]) == (1, [])
    assert document["files"].keys() == {"rank_00000.shard", "rank_00000.state"}
    assert document["identity"]["config"] == CONFIG
    assert document["identity"].keys() >= {"config", "data", "code", "versions"}
    assert document["canonical"]["is_shard"] is True
    assert document["canonical"]["bin"] == str(run_dir / "step_000008.bin")
    assert document["verified_at"] is not None
    assert "tensors" not in document
    text = call("show", f"{run_dir}@8").out
    for word in (point.id, "cadence", "rank_00000.shard", "lr: 0.01", "torch: ", "config"):
        assert word in text
    structure = document["identity"]["structure"]
    assert f"structure  digest: {structure['digest']}\n           ties: []\n" in text


@pytest.mark.parametrize(
    ("structure", "told"),
    [
        (
            {"parameters": {"a": "float32[2]"}, "digest": "sha256:0", "ties": [["a", "b"]]},
            'digest: sha256:0\n           ties: [["a", "b"]]\n',
        ),
        ({"digest": "sha256:0"}, "digest: sha256:0\n"),
        (None, "-\n"),
        ([1], "[1]\n"),
    ],
)
def test_show_tells_of_any_structure_its_digest_and_ties(
    tmp_path: Path, structure: Any, told: str
) -> None:
    run_dir = ended_run(tmp_path)
    generation = open_run(run_dir).generation(8)
    identity = {**generation.manifest.identity, "structure": structure}
    write_manifest(generation.path, generation.manifest, identity=identity)
    assert f"structure  {told}config" in call("show", f"{run_dir}@8").out


def test_show_lists_tensors_with_their_places(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    tensors = call("show", run_dir, "--tensors", "--json").json["tensors"]
    first = tensors[0]
    assert (first["key"], first["dtype"], first["shape"]) == ("model/0.weight", "float32", [16, 6])
    assert first["where"] == [
        {"file": "rank_00000.shard", "offsets": [0, 0], "sizes": [16, 6], "bytes": [8, 392]}
    ]
    lines = call("show", run_dir, "--tensors").out.splitlines()
    assert any(line.split()[:2] == ["model/0.weight", "float32"] for line in lines)


def test_show_of_a_broken_manifest_is_status_1(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    change_byte(run_dir / "checkpoints/step_000008/resume_point.json", 300)
    called = call("show", f"{run_dir}@8", "--json")
    assert called.status == 1
    assert called.json["error"]["id"] in {"digest-mismatch", "corrupt-file"}


def test_show_takes_a_bin(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    document = call("show", run_dir / "step_000008.bin", "--json").json
    assert (document["step"], document["num_params"]) == (8, 161)
    assert document["bytes"] == 8 + 12 * 161
    assert "161 parameters" in call("show", run_dir / "step_000008.bin").out
    (tmp_path / "torn.bin").write_bytes(b"\x08\0\0\0")
    assert call("show", tmp_path / "torn.bin").status == 1
