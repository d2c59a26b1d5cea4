"""Prepare → commit or abort in the right order of syncs; what is verified, retired, set aside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.generations import GenerationStore, tell_vanished
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps
from helpers.generating import SAVE_ID, adam_part, change_byte, write_generation

PART = adam_part({"w": torch.arange(6.0).reshape(2, 3)})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "r"


def made(run_dir: Path, *steps: int, verified: bool = True) -> GenerationStore:
    store = GenerationStore(run_dir)
    for step in steps:
        write_generation(run_dir, [PART], step=step)
        if verified:
            store.mark_verified(step, "test")
    return store


def put_bin(run_dir: Path, step: int, text: str = "bin") -> None:
    path = run_dir / f"step_{step:06d}.bin"
    path.write_text(text)
    path.with_name(f"{path.name}.sha256").write_text(f"sum of {text}")


def tree(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


class Order:
    """What was recorded, by the position of each call."""

    def __init__(self, ops: RecordingOps) -> None:
        self.calls = [(c.op, c.path, c.args) for c in ops.calls]

    def first(self, op: str, path: Path) -> int:
        return next(i for i, c in enumerate(self.calls) if c[:2] == (op, str(path)))

    def last(self, op: str, path: Path) -> int:
        return max(i for i, c in enumerate(self.calls) if c[:2] == (op, str(path)))

    def has(self, op: str, path: Path) -> bool:
        return any(c[:2] == (op, str(path)) for c in self.calls)


# Commit


def test_files_are_synced_before_their_directory_and_that_before_the_name(run_dir: Path) -> None:
    """Case 1: a power cut can't leave a name for files that aren't there."""
    with use_ops(RecordingOps()) as ops:
        write_generation(run_dir, [PART, PART])
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    home = run_dir / "checkpoints"
    temporary = home / f".tmp-step_000100-{SAVE_ID[:8]}"
    rename = order.first("rename", temporary)
    directory = order.last("fsync", temporary)
    for name in (home / "step_000100").iterdir():
        assert order.last("fsync", temporary / name.name) < directory, name.name
        assert order.last("pwrite", temporary / name.name) < directory
    assert directory < rename < order.last("fsync", home)
    assert order.calls[rename][2] == (home / "step_000100",)


def test_the_resume_point_is_written_last(run_dir: Path) -> None:
    with use_ops(RecordingOps()) as ops:
        write_generation(run_dir, [PART, PART])
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    temporary = run_dir / "checkpoints" / f".tmp-step_000100-{SAVE_ID[:8]}"
    begun = order.first("open", temporary / RESUME_POINT_NAME)
    for name in (run_dir / "checkpoints" / "step_000100").iterdir():
        if name.name != RESUME_POINT_NAME:
            assert order.last("fsync", temporary / name.name) < begun


def test_the_first_save_makes_every_name_that_leads_to_it_durable(run_dir: Path) -> None:
    with use_ops(RecordingOps()) as ops:
        GenerationStore(run_dir).create()
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    for directory in (run_dir.parent, run_dir, run_dir / "checkpoints"):
        assert order.first("mkdir", directory) < order.last("fsync", directory.parent)
    assert (run_dir.stat().st_mode & 0o777) == 0o700


def test_a_parent_that_may_not_be_looked_into_is_no_reason_to_fail(run_dir: Path) -> None:
    run_dir.parent.mkdir()
    ops = FaultyOps(Fault("open", "runs", error="EACCES"))
    with use_ops(ops):
        GenerationStore(run_dir).create()
    assert ops.struck == 1
    with use_ops(FaultyOps(Fault("fsync", "runs", error="EIO"))), pytest.raises(StorageError):
        GenerationStore(run_dir.parent / "other").create()


def test_a_later_save_costs_no_sync_of_the_parents(run_dir: Path) -> None:
    store = made(run_dir, 100)
    store.prepare(200, "0" * 8)
    with use_ops(RecordingOps()) as ops:
        store.prepare(300, "0" * 8)
    assert isinstance(ops, RecordingOps)
    assert ops.of("fsync") == []


def test_names_that_a_killed_attempt_made_and_did_not_sync_are_made_durable(run_dir: Path) -> None:
    """It was killed between mkdir and sync; the next one finds them, and a power cut takes them."""
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "archive/rewound_000100").mkdir(parents=True)
    for make in (
        lambda: GenerationStore(run_dir).create(),
        lambda: GenerationStore(run_dir).make_home("rewound_000100"),
    ):
        with use_ops(RecordingOps()) as ops:
            make()
        assert isinstance(ops, RecordingOps)
        synced = {call.path for call in ops.of("fsync")}
        assert {str(run_dir), str(run_dir.parent), str(run_dir.parent.parent)} <= synced
    assert str(run_dir / "archive") in synced


def test_committed_files_are_read_only_for_the_user_alone(run_dir: Path) -> None:
    store = made(run_dir, 100)
    for path in store.path(100).iterdir():
        assert path.stat().st_mode & 0o777 == 0o400, path.name
    assert store.path(100).stat().st_mode & 0o777 == 0o700


def test_a_step_that_is_committed_is_never_committed_again(run_dir: Path) -> None:
    store = made(run_dir, 100)
    before = {path: path.read_bytes() for path in store.path(100).iterdir()}
    with pytest.raises(StorageError, match="step_000100"):
        write_generation(run_dir, [PART], id_="f" * 32)
    assert {path: path.read_bytes() for path in store.path(100).iterdir()} == before


@pytest.mark.parametrize(
    "fault",
    [
        Fault("fsync", ".tmp-step_*", error="EIO"),
        Fault("rename", ".tmp-step_*", error="EIO"),
        Fault("pwrite", RESUME_POINT_NAME, error="ENOSPC"),
        Fault("fsync", INDEX_NAME, error="EIO"),
    ],
    ids=lambda f: f"{f.op} {f.path}",
)
def test_a_commit_that_fails_leaves_no_generation_and_can_be_aborted(
    run_dir: Path, fault: Fault
) -> None:
    """Case 4, and every other refusal on the way."""
    store = made(run_dir, 50)
    ops = FaultyOps(fault)
    with use_ops(ops), pytest.raises(StorageError):
        write_generation(run_dir, [PART])
    assert ops.struck == 1
    assert store.steps() == [50]
    (left,) = (name for name in os.listdir(store.directory) if name.startswith(".tmp-"))
    store.abort(store.directory / left)
    assert os.listdir(store.directory) == ["step_000050"]
    store.abort(store.directory / left)  # gone already is fine


def test_a_commit_whose_last_sync_failed_says_so_though_the_generation_is_there(
    run_dir: Path,
) -> None:
    store = made(run_dir, 50)
    ops = FaultyOps(Fault("fsync", "checkpoints", nth=2, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError, match="sync"):
        write_generation(run_dir, [PART])
    assert ops.struck == 1
    assert store.steps() == [50, 100]
    store.verify(store.manifest(100))
    assert store.verified_at(100) is None


def test_a_bin_without_a_generation_is_never_taken_for_the_new_ones(run_dir: Path) -> None:
    store = made(run_dir, 50)
    put_bin(run_dir, 100, "of an abandoned past")
    write_generation(run_dir, [PART], step=100)
    assert not store.bin_path(100).exists()
    moved = run_dir / "archive" / "leftover_000100"
    assert tree(moved) == {"step_000100.bin", "step_000100.bin.sha256"}
    assert (moved / "step_000100.bin").read_text() == "of an abandoned past"


# Listing and checking


def test_steps_are_numbers_not_text(run_dir: Path) -> None:
    """Case 5: steps 9900 and 10000, and one beyond six digits."""
    store = made(run_dir, 10_000, 9_900, 1_000_000)
    assert store.steps() == [9_900, 10_000, 1_000_000]


def test_times_never_order(run_dir: Path) -> None:
    """Case 7: reversed and equal times of change."""
    store = made(run_dir, 100, 200, 300)
    for step, when in ((100, 3e9), (200, 1e9), (300, 1e9)):
        os.utime(store.path(step), (when, when))
    assert store.steps() == [100, 200, 300]


def test_only_exact_names_are_generations(run_dir: Path) -> None:
    store = made(run_dir, 100)
    for name in ("step_7", "step_0000007", "step_000007.bin", "step_00000x", ".tmp-step_000009-1"):
        (store.directory / name).mkdir()
    assert store.steps() == [100]
    assert GenerationStore(run_dir / "nowhere").steps() == []


def test_a_resume_point_in_another_steps_directory_is_refused(run_dir: Path) -> None:
    store = made(run_dir, 100)
    store.path(100).rename(store.path(200))
    with pytest.raises(CorruptFileError, match="of step 100, in the directory of step 200"):
        store.manifest(200)


def test_a_missing_generation_is_not_found(run_dir: Path) -> None:
    with pytest.raises(NotFoundError):
        made(run_dir, 100).manifest(200)


@pytest.mark.parametrize("name", ["rank_00000.shard", "rank_00000.state", INDEX_NAME])
def test_a_changed_byte_in_any_file_is_found(run_dir: Path, name: str) -> None:
    store = made(run_dir, 100)
    point = store.manifest(100)
    store.verify(point)
    change_byte(store.path(100) / name, 20)
    with pytest.raises(DigestMismatchError, match=name.replace(".", r"\.")):
        store.verify(point)


def test_a_file_of_another_length_or_none_is_found_without_reading(run_dir: Path) -> None:
    """Case 3: one rank's shard is missing. Case 1: a file is short."""
    store = made(run_dir, 100)
    point = store.manifest(100)
    path = store.path(100) / "rank_00000.state"
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CorruptFileError, match="bytes instead of"):
        store.check_files(point)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"rank_00000\.state is missing"):
        store.check_files(point)


def test_a_resume_point_without_usable_digests_is_refused(run_dir: Path) -> None:
    store = GenerationStore(run_dir)
    point = write_generation(run_dir, [PART])
    files = {name: {**record, "pieces": []} for name, record in point.files.items()}
    write_generation(run_dir, [PART], step=200, files=files)
    with pytest.raises(CorruptFileError, match="no usable digests"):
        store.digests(store.manifest(200))


# verified.json


def test_a_verified_generation_says_when(run_dir: Path) -> None:
    store = made(run_dir, 100, verified=False)
    assert store.verified_at(100) is None
    store.mark_verified(100, "read back")
    when = store.verified_at(100)
    assert when is not None
    assert when > 1e9
    store.mark_verified(100, "again")


def test_a_verification_of_another_manifest_counts_as_none(run_dir: Path) -> None:
    store = made(run_dir, 100)
    write_generation(run_dir, [PART], step=200, id_="f" * 32)
    verified = (store.path(100) / "verified.json").read_bytes()
    (store.path(200) / "verified.json").write_bytes(verified)
    assert store.verified_at(100) is not None
    assert store.verified_at(200) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda body: {**body, "time": "noon"},
        lambda body: {**body, "time": 10**400},
        lambda body: {key: value for key, value in body.items() if key != "time"},
        lambda body: [body],
    ],
    ids=["text", "giant", "missing", "list"],
)
def test_an_unreadable_verification_counts_as_none(run_dir: Path, change: object) -> None:
    store = made(run_dir, 100)
    path = store.path(100) / "verified.json"
    body = json.loads(path.read_text())
    path.chmod(0o600)
    assert callable(change)
    path.write_text(json.dumps(change(body)))
    assert store.verified_at(100) is None
    path.write_text("")
    assert store.verified_at(100) is None
    path.write_text('{"time": 1e999, "resume_point": ' + json.dumps(body["resume_point"]) + "}")
    assert store.verified_at(100) is None


def test_verifying_leaves_the_generations_own_files_as_they_are(run_dir: Path) -> None:
    store = made(run_dir, 100, verified=False)
    before = {path.name: path.read_bytes() for path in store.path(100).iterdir()}
    store.mark_verified(100, "read back")
    after = {path.name: path.read_bytes() for path in store.path(100).iterdir()}
    assert after.pop("verified.json")
    assert after == before


# Retiring


def test_to_retire_is_to_take_the_name_away_first(run_dir: Path) -> None:
    """Case 31: no half of a generation has its name at any instant."""
    store = made(run_dir, 100, 200)
    put_bin(run_dir, 100)
    with use_ops(RecordingOps()) as ops:
        store.retire(100)
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    rename = order.first("rename", store.path(100))
    (trash,) = order.calls[rename][2]
    assert Path(trash).name.startswith(".tmp-trash-step_000100-")
    bin_gone = order.first("unlink", store.bin_path(100))
    sum_gone = order.first("unlink", Path(f"{store.bin_path(100)}.sha256"))
    assert sum_gone < bin_gone < order.last("fsync", run_dir) < rename
    synced = next(i for i, call in enumerate(order.calls) if i > rename and call[0] == "fsync")
    unlinks = [
        i for i, call in enumerate(order.calls) if call[0] == "unlink" and str(trash) in call[1]
    ]
    assert order.calls[synced][1] == str(store.directory)
    assert unlinks
    assert synced < min(unlinks)
    assert store.steps() == [200]
    left = {path for path in tree(run_dir) if "pins.lock" not in path}
    assert left == {path for path in left if "step_000200" in path}


@pytest.mark.parametrize("op", ["unlink", "rename", "fsync", "rmdir"])
def test_a_retirement_that_fails_is_finished_by_the_next_or_by_cleaning(
    run_dir: Path, op: str
) -> None:
    store = made(run_dir, 100, 200)
    put_bin(run_dir, 100)
    ops = FaultyOps(Fault(op, "*", error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        store.retire(100)
    assert ops.struck == 1
    assert store.steps() in ([200], [100, 200])
    if 100 in store.steps():
        store.verify(store.manifest(100))
        store.retire(100)
    store.clean()
    assert os.listdir(store.directory) == ["step_000200"]
    assert set(os.listdir(run_dir)) == {"checkpoints", "pins.lock"}
    store.verify(store.manifest(200))


# Setting aside


def test_what_is_set_aside_is_whole_in_the_archive(run_dir: Path) -> None:
    store = made(run_dir, 100, 200)
    put_bin(run_dir, 200)
    where = store.set_aside(200, "faulty_000200")
    assert where == run_dir / "archive" / "faulty_000200" / "step_000200"
    assert store.steps() == [100]
    assert not store.bin_path(200).exists()
    assert {"step_000200.bin", "step_000200.bin.sha256"} < set(os.listdir(where.parent))
    assert RESUME_POINT_NAME in os.listdir(where)


def test_what_is_set_aside_never_replaces_what_was(run_dir: Path) -> None:
    store = GenerationStore(run_dir)
    homes = []
    for _ in range(3):
        write_generation(run_dir, [PART])
        homes.append(store.set_aside(100, "faulty_000100").parent.name)
    assert homes == ["faulty_000100", "faulty_000100-2", "faulty_000100-3"]
    put_bin(run_dir, 100, "first")
    write_generation(run_dir, [PART], step=50)  # no generation of step 100: its .bin is left over
    write_generation(run_dir, [PART])
    assert (run_dir / "archive" / "leftover_000100" / "step_000100.bin").read_text() == "first"
    put_bin(run_dir, 100, "second")
    where = store.set_aside(100, "leftover_000100")
    assert where.parent.name == "leftover_000100-2"
    assert (where.parent / "step_000100.bin").read_text() == "second"
    assert (run_dir / "archive" / "leftover_000100" / "step_000100.bin").read_text() == "first"


def test_several_steps_lie_side_by_side_under_one_label(run_dir: Path) -> None:
    store = made(run_dir, 100, 200, 300)
    for step in (200, 300):
        store.set_aside(step, "rewind_to_000100")
    home = run_dir / "archive" / "rewind_to_000100"
    assert sorted(os.listdir(home)) == ["step_000200", "step_000300"]


@pytest.mark.parametrize("how", ["retire", "set_aside"])
def test_the_names_of_newer_ones_are_durable_before_an_older_one_loses_its(
    run_dir: Path, how: str
) -> None:
    """Whoever committed it may have been killed before the sync; a command comes after."""
    made(run_dir, 100, 200)
    store = GenerationStore(run_dir)
    with use_ops(RecordingOps()) as ops:
        if how == "retire":
            assert store.retire(100)
        else:
            store.set_aside(100, "faulty_000100")
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    moved = [
        i for i, call in enumerate(order.calls) if call[:2] == ("rename", str(store.path(100)))
    ]
    assert len(moved) == 1
    assert order.first("fsync", store.directory) < moved[0]


def test_the_archives_names_are_durable_before_anything_moves_there(run_dir: Path) -> None:
    """Nothing vanishes into thin air: a power cut leaves it at one place or the other."""
    store = made(run_dir, 100)
    put_bin(run_dir, 100)
    store.create()  # syncs as well
    with use_ops(RecordingOps()) as ops:
        store.set_aside(100, "faulty_000100")
    assert isinstance(ops, RecordingOps)
    order = Order(ops)
    archive, home = run_dir / "archive", run_dir / "archive" / "faulty_000100"
    assert order.first("mkdir", archive) < order.first("fsync", run_dir)
    assert order.first("mkdir", home) < order.first("fsync", archive)
    renames = [i for i, call in enumerate(order.calls) if call[0] == "rename"]
    assert max(order.first("fsync", run_dir), order.first("fsync", archive)) < min(renames)
    for at in renames:  # the new name is durable before the old one's going is
        syncs = [call[1] for call in order.calls[at + 1 :] if call[0] == "fsync"]
        assert syncs[:2] == [str(home), os.path.dirname(order.calls[at][1])]


# Cleaning


def test_cleaning_removes_what_was_interrupted_and_nothing_else(run_dir: Path) -> None:
    """Case 2: temporary remains go at the next start."""
    store = made(run_dir, 100)
    (store.directory / ".tmp-step_000200-abcd").mkdir()
    (store.directory / ".tmp-step_000200-abcd" / "rank_00000.shard").write_text("torn")
    (store.directory / ".tmp-trash-step_000050-abcd").mkdir()
    (run_dir / ".tmp-step_000100.bin").write_text("torn")
    for name in (".tmp-mine", "notes.txt", "step_000100.bin"):
        (run_dir / name).write_text("the user's")
    removed = store.clean()
    assert sorted(removed) == [
        ".tmp-step_000100.bin",
        ".tmp-step_000200-abcd",
        ".tmp-trash-step_000050-abcd",
    ]
    assert os.listdir(store.directory) == ["step_000100"]
    assert sorted(os.listdir(run_dir)) == [
        ".tmp-mine",
        "checkpoints",
        "notes.txt",
        "step_000100.bin",
    ]
    assert GenerationStore(run_dir / "nowhere").clean() == []


# Pins


def test_pins_are_read_as_numbers(run_dir: Path) -> None:
    store = made(run_dir, 100)
    assert store.pins() == {}
    (run_dir / "pins.json").write_text('{"100": "paper", "9900": ""}')
    assert store.pins() == {100: "paper", 9900: ""}


@pytest.mark.parametrize("text", ['{"x": "y"}', '{"-1": ""}', "[100]", "", '{"²": ""}'])
def test_pins_that_cannot_be_read_are_an_error_rather_than_no_pins(
    run_dir: Path, text: str
) -> None:
    """Case 54: what can't be understood must not let everything be retired."""
    store = made(run_dir, 100)
    (run_dir / "pins.json").write_text(text)
    with pytest.raises(CorruptFileError):
        store.pins()


# Vanished


@pytest.mark.parametrize(
    ("events", "aside", "told"),
    [
        ([], False, None),
        ([], True, "it had some; set aside in archive/: faulty_000004"),
        (["fresh_start"], False, None),
        (["fresh_start", "saved"], False, "the journal tells of step 7"),
        (["saved", "skipped"], True, "the journal tells of step 7; set aside"),
        (["saved", "fresh_start"], True, None),
        (["fresh_start", "faulty"], True, "it had some; set aside"),
        (["saved", "fresh_start", "saved"], False, "the journal tells of step 7"),
    ],
)
def test_generations_that_vanished_are_known_by_the_journal_and_what_was_set_aside(
    run_dir: Path, events: list[str], *, aside: bool, told: str | None
) -> None:
    """Beginning anew on purpose, and being killed before the first save, needs saying once."""
    store = GenerationStore(run_dir)
    store.create()
    if aside:
        store.make_home("faulty_000004")
    journal = [{"event": event, "step": 7} for event in events]
    found = tell_vanished(store, journal)
    assert found is None if told is None else (found is not None and told in found)
    write_generation(run_dir, [PART])
    assert tell_vanished(store, journal) is None
