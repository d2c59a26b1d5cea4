"""Generations that somebody made who knows the format: refused by name, in bounded memory.

Every digest in them is right. Nothing outside the run directory is touched.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_ckpt.errors import DistCkptError, ForeignFileError, NoUsableGenerationError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME
from dist_ckpt.runs import Depth, check_generation
from dist_ckpt.seeding import kept_generators
from helpers.generating import part_of, write_generation
from helpers.hostile import (
    FILES,
    NEWER,
    OLDER,
    SHARD,
    STATE,
    Small,
    Victim,
    encode_other,
    forge,
    little_memory,
    reseal,
    tail_of,
    victim,
    with_tail,
)
from helpers.reliability import record_fault
from helpers.run_dirs import call, ended_run, options_of
from helpers.trainers import train


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


def forge_many(folder: Path, count: int) -> None:
    """Whatever the JSON says, there is a resume or a named error, and never a third."""
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", time.time_ns() % 10**9))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    harmed = victim(folder)
    whole = {name: (harmed.home / name).read_bytes() for name in FILES}
    small, told = Small(), {"resumed": 0, "skipped": 0, "refused": 0}
    for number in range(count):
        name = forge(harmed.home, random.Random(f"{seed}/{number}"))
        try:
            with little_memory():
                finding = check_generation(harmed.store, NEWER, Depth())
                resumed, _ = harmed.resume(small)
            told["skipped" if resumed.skipped else "resumed"] += 1
            if finding.faults:
                assert resumed.step == OLDER, f"{number}: {finding.faults}"
        except DistCkptError:
            told["refused"] += 1  # it isn't this model's, or of a later version
        except Exception as error:
            # Torch's scheduler speaks for itself where its state means nothing to it.
            if "while giving scheduler its saved state" not in getattr(error, "__notes__", ()):
                error.add_note(f"forgery {number} of seed {seed}, in {name}")
                raise
            told["refused"] += 1
        finally:
            for file, data in whole.items():
                (harmed.home / file).write_bytes(data)
            small = small if number % 20 else Small()
    print(f"{count} forgeries: {told}")
    assert min(told.values()) > 0, told
    what = "forged JSON with digests that fit"
    record_fault("Bad bytes", what, count, "resumed, passed over or refused by name")


def test_forged_json_is_resumed_or_refused_by_name_in_bounded_memory(tmp_path: Path) -> None:
    forge_many(tmp_path / "run", 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forgeries_by_the_ten_thousands(tmp_path: Path) -> None:
    forge_many(tmp_path / "run", 20_000)


# What somebody may put in the place of files


def swap_shards_of_steps(harmed: Victim) -> None:
    shutil.copyfile(harmed.store.path(OLDER) / SHARD, harmed.home / SHARD)


def swap_states_of_steps(harmed: Victim) -> None:
    shutil.copyfile(harmed.store.path(OLDER) / STATE, harmed.home / STATE)


def replay_the_manifest(harmed: Victim) -> None:
    """A resume point of the same step, of a save that isn't this one."""
    other = victim(harmed.run_dir.parent / "other")
    point = other.store.manifest(NEWER)
    data = encode_other(point, id="e" * 32)
    (harmed.home / RESUME_POINT_NAME).write_bytes(data)


def replay_an_older_manifest(harmed: Victim) -> None:
    shutil.copyfile(harmed.store.path(OLDER) / RESUME_POINT_NAME, harmed.home / RESUME_POINT_NAME)


def shard_of_another_run(harmed: Victim, step: int) -> bytes:
    """Return the shard of a run that trained the same model longer; not a byte is made up."""
    other = Small()
    for _ in range(4):
        other.step()
    run_dir = harmed.run_dir.parent / "other"
    write_generation(run_dir, [part_of(other.captured)], step=step, id_="f" * 32)
    data = (GenerationStore(run_dir).path(step) / SHARD).read_bytes()
    own = (harmed.home / SHARD).read_bytes()
    assert len(data) == len(own), "the shapes are the same"
    assert data[8:] != own[8:], "the values aren't"
    return data


def take_a_shard_of_another_run(harmed: Victim) -> None:
    (harmed.home / SHARD).write_bytes(shard_of_another_run(harmed, NEWER))


def take_the_older_generation_whole(harmed: Victim) -> None:
    shutil.rmtree(harmed.home)
    shutil.copytree(harmed.store.path(OLDER), harmed.home)


def swap_a_state_and_vouch_for_it(harmed: Victim) -> None:
    reseal(harmed.home, {STATE: (harmed.store.path(OLDER) / STATE).read_bytes()})


def point_a_tensor_out_of_its_file(harmed: Victim) -> None:
    body = json.loads((harmed.home / INDEX_NAME).read_bytes())
    key = next(k for k, e in body["manifest"].items() if e["type"] == "ShardedTensor")
    body["manifest"][key]["shards"][0]["tensor"]["location"] = "../step_000050/rank_00000.shard"
    reseal(harmed.home, {INDEX_NAME: json.dumps(body).encode()})


def name_a_file_outside(harmed: Victim) -> None:
    point = harmed.store.manifest(NEWER)
    files = {f"../{name}" if name == SHARD else name: item for name, item in point.files.items()}
    (harmed.home / RESUME_POINT_NAME).write_bytes(encode_other(point, files=files))


def nest_deeply(harmed: Victim) -> None:
    tensors, body = tail_of((harmed.home / STATE).read_bytes())
    node: list[object] = []
    for _ in range(300):
        node = [node]
    body["values"]["values"]["data"] = node
    reseal(harmed.home, {STATE: with_tail(tensors, body)})


def nest_beyond_all_bounds(harmed: Victim) -> None:
    (harmed.home / RESUME_POINT_NAME).write_bytes(b'{"a":' * 10**6)


def claim_tensors_of_giant_size(harmed: Victim) -> None:
    tensors, body = tail_of((harmed.home / STATE).read_bytes())
    body["tensors"] = [[0, "float32", [2**62]]]
    reseal(harmed.home, {STATE: with_tail(tensors, body)})


def claim_empty_tensors_that_cannot_be(harmed: Victim) -> None:
    tensors, body = tail_of((harmed.home / STATE).read_bytes())
    body["tensors"] = [[0, "float32", [0, 2**62, 2**62]] for _ in body["tensors"]]
    reseal(harmed.home, {STATE: with_tail(tensors, body)})


def claim_the_same_bytes_many_times(harmed: Victim) -> None:
    tensors, body = tail_of((harmed.home / STATE).read_bytes())
    body["tensors"] = [[0, "uint8", [len(tensors)]]] * 1000
    reseal(harmed.home, {STATE: with_tail(tensors, body)})


def claim_a_tail_longer_than_the_file(harmed: Victim) -> None:
    data = (harmed.home / STATE).read_bytes()
    reseal(harmed.home, {STATE: data[:-8] + (2**63).to_bytes(8, "little")})


def write_utf_16(harmed: Victim) -> None:
    path = harmed.home / RESUME_POINT_NAME
    path.write_bytes(path.read_text().encode("utf-16"))


def write_a_key_twice(harmed: Victim) -> None:
    path = harmed.home / RESUME_POINT_NAME
    path.write_bytes(path.read_bytes().replace(b'"step": 100,', b'"step": 100,\n "step": 100,'))


def link_a_shard(harmed: Victim) -> None:
    shutil.move(harmed.home / SHARD, harmed.run_dir.parent / "elsewhere.shard")
    (harmed.home / SHARD).symlink_to(harmed.run_dir.parent / "elsewhere.shard")


def link_the_manifest(harmed: Victim) -> None:
    shutil.move(harmed.home / RESUME_POINT_NAME, harmed.run_dir.parent / "elsewhere.json")
    (harmed.home / RESUME_POINT_NAME).symlink_to(harmed.run_dir.parent / "elsewhere.json")


def link_the_generation(harmed: Victim) -> None:
    shutil.move(harmed.home, harmed.run_dir.parent / "elsewhere")
    harmed.home.symlink_to(harmed.run_dir.parent / "elsewhere")


def put_a_pipe(harmed: Victim) -> None:
    (harmed.home / INDEX_NAME).unlink()
    os.mkfifo(harmed.home / INDEX_NAME)


DEEDS = (
    swap_shards_of_steps,
    swap_states_of_steps,
    replay_the_manifest,
    replay_an_older_manifest,
    take_a_shard_of_another_run,
    take_the_older_generation_whole,
    swap_a_state_and_vouch_for_it,
    point_a_tensor_out_of_its_file,
    name_a_file_outside,
    nest_deeply,
    nest_beyond_all_bounds,
    claim_tensors_of_giant_size,
    claim_empty_tensors_that_cannot_be,
    claim_the_same_bytes_many_times,
    claim_a_tail_longer_than_the_file,
    write_utf_16,
    write_a_key_twice,
    link_a_shard,
    link_the_manifest,
    link_the_generation,
    put_a_pipe,
)
#: Right by every digest, so that only whoever reads the values can tell.
UNSEEN_BY_VERIFY = {
    nest_deeply,
    claim_empty_tensors_that_cannot_be,
}


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_the_older_generation_is_resumed_after(
    deed: Callable[[Victim], None], tmp_path: Path
) -> None:
    """Cases 1, 3 and 38."""
    harmed = victim(tmp_path / "run")
    deed(harmed)
    outside = snapshot_outside(harmed)
    with little_memory(256 << 20):
        finding = check_generation(harmed.store, NEWER, Depth())
        resumed, live = harmed.resume()
    assert bool(finding.faults) or deed in UNSEEN_BY_VERIFY, "verify saw nothing"
    assert (resumed.step, [s.step for s in resumed.skipped]) == (OLDER, [NEWER])
    assert live == harmed.older
    assert str(harmed.home) in resumed.skipped[0].reason or "saved state" in (
        resumed.skipped[0].reason
    )
    assert snapshot_outside(harmed) == outside
    what = deed.__name__.replace("_", " ")
    record_fault("Bad bytes", f"somebody may {what}", 1, "the older point is resumed")


def test_a_shard_of_another_run_that_a_forged_manifest_vouches_for_is_told_by_a_signature_alone(
    tmp_path: Path,
) -> None:
    """Of the same step and shapes: a shard is a `.bin`, and says of itself no more than that."""
    pytest.importorskip("cryptography")
    from helpers.signing import Signed

    signed = Signed(tmp_path)
    harmed = signed.run
    reseal(harmed.home, {SHARD: shard_of_another_run(harmed, NEWER)})
    assert not check_generation(harmed.store, NEWER, Depth()).faults
    resumed, live = harmed.resume()
    assert (resumed.step, list(resumed.skipped)) == (NEWER, [])
    assert live not in (harmed.older, harmed.newer), "the other run's values"
    assert signed.verify() == ["signature"]
    assert signed.resume() == (OLDER, ["signature"])
    what = "somebody may vouch for a shard of another run, of the same step"
    record_fault("Bad bytes", what, 1, "passed over where signatures are required, not elsewhere")


def test_a_shard_of_another_step_that_a_forged_manifest_vouches_for_is_passed_over(
    tmp_path: Path,
) -> None:
    """Its first bytes say of which step it is: no two steps make one resume point."""
    harmed = victim(tmp_path / "run")
    reseal(harmed.home, {SHARD: shard_of_another_run(harmed, NEWER + 1)})
    resumed, live = harmed.resume()
    assert check_generation(harmed.store, NEWER, Depth()).faults
    assert (resumed.step, live) == (OLDER, harmed.older)
    what = "somebody may vouch for a shard of another run, of another step"
    record_fault("Bad bytes", what, 1, "the older point is resumed")


def snapshot_outside(harmed: Victim) -> dict[str, tuple[int, bytes]]:
    """What lies beside the run directory."""
    found = {}
    for path in sorted(harmed.run_dir.parent.rglob("*")):
        is_inside = path.is_relative_to(harmed.run_dir)
        if not is_inside and path.is_file() and not path.is_symlink():
            found[str(path)] = (path.stat().st_mtime_ns, path.read_bytes())
    return found


def test_a_generation_that_is_a_link_is_not_marked_verified_and_only_its_name_is_removed(
    tmp_path: Path,
) -> None:
    harmed = victim(tmp_path / "run")
    link_the_generation(harmed)
    outside = snapshot_outside(harmed)
    assert outside, "there is something to be left alone"
    with pytest.raises(ForeignFileError, match="symbolic link"):
        harmed.store.mark_verified(NEWER, "read back")
    assert harmed.store.verified_at(NEWER) is None
    harmed.store.retire(NEWER)
    assert harmed.store.steps() == [OLDER]
    assert snapshot_outside(harmed) == outside


def test_a_generation_that_a_user_names_may_be_a_link(tmp_path: Path) -> None:
    harmed = victim(tmp_path / "run")
    link = tmp_path / "latest"
    link.symlink_to(harmed.home)
    assert call("verify", link).status == 0
    assert call("show", link).status == 0


def test_where_nothing_usable_is_left_nothing_is_begun_anew(tmp_path: Path) -> None:
    harmed = victim(tmp_path / "run")
    for step in (OLDER, NEWER):
        (harmed.store.path(step) / SHARD).write_bytes(b"")
    with pytest.raises(NoUsableGenerationError, match="None of the 2"):
        harmed.resume()


def test_a_start_passes_over_a_journal_that_tells_nonsense(tmp_path: Path) -> None:
    """Case 41: old bytes stay, also of lines that nobody understands."""
    run_dir = ended_run(tmp_path)
    path = run_dir / f"{run_dir.name}.journal.jsonl"
    nonsense = [b"{}", b"[]", b'{"event": 7}', b'{"event": "saved"}', b'{"attempt": "x"}']
    nonsense += [b'{"event": "saved", "step": "../x", "attempt": 1}', b'{"event":"a","time":1e999}']
    nonsense += [b'{"event": "saved", "step": -1}', b"\xff\xfe", b'{"a":' * 2000]
    before = path.read_bytes() + b"\n".join(nonsense) + b"\n"
    path.write_bytes(before)
    train(options_of(run_dir, until=16))
    assert path.read_bytes().startswith(before)
    assert GenerationStore(run_dir).steps()[-1] == 16
    for command in ("ls", "status", "show", "loss", "verify"):
        assert call(command, run_dir).status == 0, command
