"""Every flipped bit and every cut is found by verify, and by resume, which falls back.

How many are tried: some thousands here and tens of thousands by `make soak`. The variable
``DIST_CKPT_TEST_SEED`` repeats a failure.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_ckpt.errors import CorruptFileError, DistCkptError
from dist_ckpt.export import export_bin
from dist_ckpt.resume import find_bin
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME, parse_resume_point
from dist_ckpt.runs import Depth, check_bin, check_generation
from dist_ckpt.seeding import kept_generators
from helpers.hostile import (
    FILES,
    NEWER,
    OLDER,
    SHARD,
    STATE,
    Small,
    Victim,
    cut,
    flipped,
    victim,
)
from helpers.reliability import record_fault

KIND = "Bad bytes"


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


@pytest.fixture
def harmed(tmp_path: Path) -> Iterator[Victim]:
    """In memory, where the machine has such a place: thousands of files are written."""
    memory = Path("/dev/shm")  # noqa: S108 - a private directory is made below
    base = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield victim(Path(folder) / "run")


def dice_of() -> random.Random:
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", time.time_ns() % 10**9))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    return random.Random(seed)


def check_found(harmed: Victim, small: Small, what: str) -> None:
    """Both look: the fault is named, and the older generation is what training goes on from."""
    finding = check_generation(harmed.store, NEWER, Depth())
    assert finding.faults, f"verify found nothing: {what}"
    assert finding.refused is None, what
    resumed, live = harmed.resume(small)
    assert (resumed.step, [s.step for s in resumed.skipped]) == (OLDER, [NEWER]), what
    assert live == harmed.older, what


def flip_many(harmed: Victim, count: int) -> None:
    dice, small = dice_of(), Small()
    for number in range(count):
        path = harmed.home / FILES[number % len(FILES)]
        bit = dice.randrange(8 * path.stat().st_size)
        with flipped(path, bit):
            check_found(harmed, small, f"bit {bit} of {path.name}")
        size = dice.randrange(path.stat().st_size)
        if number % 4 == 0:
            with cut(path, size):
                check_found(harmed, small, f"{path.name} cut to {size}")
    resumed, live = harmed.resume(small)
    assert (resumed.step, live) == (NEWER, harmed.newer), "the harm was undone"
    print(f"{count} flipped bits and {count // 4} cuts, all found twice")
    found = "found by verify and by a resume, the older point is resumed"
    record_fault(KIND, "a flipped bit, any file of a generation", count, found)
    record_fault(KIND, "a file of a generation cut short", -(-count // 4), found)


def test_a_flipped_bit_or_a_cut_anywhere_is_found_and_the_older_generation_is_resumed(
    harmed: Victim,
) -> None:
    """Cases 1 and 2."""
    flip_many(harmed, 120)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_flipped_bits_and_cuts_are_found_by_the_ten_thousands(harmed: Victim) -> None:
    flip_many(harmed, 20_000)


def test_every_single_bit_of_a_resume_point_counts(harmed: Victim) -> None:
    """Case 1: all of them, one by one; the file says where everything lies."""
    data = bytearray((harmed.home / RESUME_POINT_NAME).read_bytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFileError) as caught:
            parse_resume_point(bytes(data), path="x")
        assert caught.value.id in {"corrupt-file", "digest-mismatch"}, bit
        data[bit // 8] ^= 1 << bit % 8
    assert parse_resume_point(bytes(data), path="x") == harmed.store.manifest(NEWER)
    record_fault(KIND, "every single bit of a resume point", 8 * len(data), "found by its reader")


def flip_index(harmed: Victim, stride: int) -> int:
    """Return how many bits of the index its reader was tried with: one of each ``stride``."""
    path = harmed.home / INDEX_NAME
    point = harmed.store.manifest(NEWER)
    bits = range(time.time_ns() % stride, 8 * path.stat().st_size, stride)
    for bit in bits:
        with flipped(path, bit), pytest.raises(CorruptFileError) as caught:
            harmed.store.index(point)
        assert caught.value.id == "digest-mismatch", bit
    assert harmed.store.index(point)
    return len(bits)


def test_flipped_bits_all_over_an_index_are_found_by_its_reader(harmed: Victim) -> None:
    """Case 1."""
    record_fault(KIND, "a bit of an index", flip_index(harmed, 23), "found by its reader")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_single_bit_of_an_index_counts(harmed: Victim) -> None:
    record_fault(KIND, "every single bit of an index", flip_index(harmed, 1), "found by its reader")


def check_heads_and_tails(harmed: Victim, stride: int) -> None:
    """The first and the last 64 bits of what a rank wrote, and files of many lengths."""
    num_bits = num_cuts = 0
    for name in (SHARD, STATE):
        path = harmed.home / name
        last = 8 * path.stat().st_size
        for bit in (*range(0, 64, stride), *range(last - 64, last)):
            with flipped(path, bit):
                assert check_generation(harmed.store, NEWER, Depth()).faults, (name, bit)
            num_bits += 1
    for name in FILES:
        path = harmed.home / name
        full = path.stat().st_size
        between = 1 if stride == 1 else max(1, full // 40)
        for size in sorted({*range(8), *range(8, full - 9, between), *range(full - 9, full)}):
            with cut(path, size):
                assert check_generation(harmed.store, NEWER, Depth(quick=True)).faults, (name, size)
            num_cuts += 1
    with cut(harmed.home / SHARD, 0):
        check_found(harmed, Small(), "an empty shard")
    assert not check_generation(harmed.store, NEWER, Depth()).faults, "the harm was undone"
    what = "a bit of the first or last 64 of a shard or a state"
    record_fault(KIND, what, num_bits, "found by verify")
    record_fault(KIND, "a file of another length", num_cuts, "found by verify --quick")


def test_headers_tails_and_lengths_of_every_file_count(harmed: Victim) -> None:
    """Case 2: the first and last bytes of what ranks wrote; lengths from none to one byte less."""
    check_heads_and_tails(harmed, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_bit_of_headers_and_tails_and_every_length_count(harmed: Victim) -> None:
    check_heads_and_tails(harmed, 1)


def test_a_fault_in_the_mark_of_verification_means_unverified(harmed: Victim) -> None:
    harmed.store.mark_verified(NEWER, "read back")
    path = harmed.home / "verified.json"
    path.chmod(0o600)
    assert harmed.store.verified_at(NEWER) is not None
    digest = path.read_bytes().index(b"xxh3_128:")
    for bit in range(8 * digest, 8 * (digest + 9 + 32)):
        with flipped(path, bit):
            assert harmed.store.verified_at(NEWER) is None
            assert not check_generation(harmed.store, NEWER, Depth(quick=True)).faults
    sizes = range(0, path.stat().st_size, 5)
    for size in sizes:
        with cut(path, size):
            assert harmed.store.verified_at(NEWER) is None
    num_faults = 8 * (9 + 32) + len(sizes)
    record_fault(KIND, "flips and cuts of a mark of verification", num_faults, "means unverified")


def check_bins(harmed: Victim, *, stride: int) -> int:
    """Each fault was found; return how many there were."""
    num_faults = 0
    store = harmed.store
    for step in (OLDER, NEWER):
        export_bin(store, store.manifest(step), copy=True)
    path = store.bin_path(NEWER)
    path.chmod(0o600)
    sum_path = path.with_name(f"{path.name}.sha256")
    assert find_bin(store) == path
    for target, step in ((path, stride), (sum_path, 9)):
        bits = 8 * target.stat().st_size
        for bit in (*range(64), *range(64, bits, step)):
            with flipped(target, bit):
                assert check_bin(path, Depth()).faults, (target.name, bit)
                assert find_bin(store) == store.bin_path(OLDER), (target.name, bit)
            num_faults += 1
        for size in range(0, bits // 8, max(1, step // 8)):
            with cut(target, size):
                assert check_bin(path, Depth()).faults, (target.name, size)
                assert find_bin(store) == store.bin_path(OLDER), (target.name, size)
            num_faults += 1
    return num_faults


def test_flips_and_cuts_of_a_bin_or_of_its_sum_are_found(harmed: Victim) -> None:
    num_faults = check_bins(harmed, stride=61)
    record_fault(KIND, "flips and cuts of a .bin and of its sum", num_faults, "found, not imported")


def test_a_bin_whose_sum_is_anothers_is_not_imported(harmed: Victim) -> None:
    from dist_ckpt.comm import SoloComm
    from dist_ckpt.resume import import_bin

    export_bin(harmed.store, harmed.store.manifest(NEWER), copy=True)
    path, small = harmed.store.bin_path(NEWER), Small()
    before = small.values()
    path.chmod(0o600)
    with flipped(path, 8 * 30), pytest.raises(DistCkptError, match="has SHA-256"):
        import_bin(path, SoloComm(), small.captured)
    assert small.values() == before
    assert import_bin(path, SoloComm(), small.captured).step == NEWER
    assert torch.equal(
        small.captured.parameters()["0.weight"].detach(),
        torch.tensor(harmed.newer["model/0.weight"]),
    )
