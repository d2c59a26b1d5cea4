"""Positional reads: every byte where it belongs, every flipped bit found."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    ForeignFileError,
    NotFoundError,
    SettingError,
    StorageError,
    UsageError,
)
from dist_ckpt.storage import (
    PIECE_BYTES,
    Arena,
    FileDigest,
    Ops,
    Segment,
    read_piece,
    read_segments,
    use_ops,
)
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps

ROOT = Path(__file__).parents[2]
SIZE = 2 * PIECE_BYTES + 1_234_567


class Saved:
    """A file of a bit more than two pieces, its bytes and its digest."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self.path = path
        self.data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
        path.write_bytes(self.data.tobytes())
        self.digest = FileDigest.of(self.data)

    def read(
        self, ranges: list[tuple[int, int]], *, check: bool = True, threads: int = 2
    ) -> list[np.ndarray]:
        targets = [np.zeros(stop - start, np.uint8) for start, stop in ranges]
        segments = [
            Segment(start, target.data, stop - start)
            for (start, stop), target in zip(ranges, targets, strict=True)
        ]
        read_segments(self.path, segments, self.digest if check else None, threads=threads)
        return targets

    def flip(self, at: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("read") / "a.shard")


RANGES = {
    "all in one": [(0, SIZE)],
    "all in parts": [(0, 1), (1, 4097), (4097, PIECE_BYTES + 1), (PIECE_BYTES + 1, SIZE)],
    "first byte": [(0, 1)],
    "last byte": [(SIZE - 1, SIZE)],
    "across a border": [(PIECE_BYTES - 1, PIECE_BYTES + 1)],
    "exactly a piece": [(PIECE_BYTES, 2 * PIECE_BYTES)],
    "gaps": [(10, 20), (30, 40), (500_000, 500_100), (PIECE_BYTES + 7, PIECE_BYTES + 9)],
    "an empty one between": [(5, 10), (10, 10), (10, 20), (SIZE, SIZE)],
    "many small": [(at, at + 300) for at in range(100, 3_000_000, 999)],
    "nothing": [],
}


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", RANGES)
def test_every_target_gets_its_bytes(saved: Saved, name: str, *, check: bool) -> None:
    ranges = RANGES[name]
    for target, (start, stop) in zip(saved.read(ranges, check=check), ranges, strict=True):
        np.testing.assert_array_equal(target, saved.data[start:stop])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, PIECE_BYTES - 1, PIECE_BYTES])
def test_odd_sizes_read_back(tmp_path: Path, size: int) -> None:
    saved = Saved(tmp_path / "a", size)
    np.testing.assert_array_equal(saved.read([(0, size)])[0], saved.data)


def test_an_empty_file_has_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    read_segments(tmp_path / "a", [], FileDigest.of(b""))
    read_segments(tmp_path / "a", [Segment(0, None, 0)], None)


def test_only_touched_pieces_are_read(saved: Saved) -> None:
    with use_ops(RecordingOps()) as ops:
        saved.read([(PIECE_BYTES + 5, PIECE_BYTES + 6)])
    assert isinstance(ops, RecordingOps)
    offsets = [call.args[-1] for call in ops.of("preadv")]
    assert offsets
    assert all(PIECE_BYTES <= offset < 2 * PIECE_BYTES for offset in offsets)


def test_without_a_digest_large_gaps_are_not_read(saved: Saved) -> None:
    with use_ops(RecordingOps()) as ops:
        saved.read([(0, 10), (20, 30), (5_000_000, 5_000_010)], check=False)
    assert isinstance(ops, RecordingOps)
    assert [call.args for call in ops.of("preadv")] == [((10, 10, 10), 0), ((10,), 5_000_000)]


def test_many_small_targets_take_few_calls(saved: Saved) -> None:
    ranges = [(at, at + 64) for at in range(0, 640_000, 64)]
    with use_ops(RecordingOps()) as ops:
        saved.read(ranges, check=False)
    assert isinstance(ops, RecordingOps)
    assert len(ops.of("preadv")) == 10  # 10,000 targets, 1,024 a call


def test_a_range_without_a_target_is_only_checked(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a", 100_000)
    segment = Segment(5, None, 10)
    read_segments(saved.path, [segment], saved.digest)
    saved.flip(50_000)
    with pytest.raises(DigestMismatchError):
        read_segments(saved.path, [segment], saved.digest)
    read_segments(saved.path, [segment], None)


@pytest.mark.parametrize("at", [0, 15, 25, PIECE_BYTES - 1, PIECE_BYTES, SIZE - 1])
def test_a_flipped_bit_in_a_touched_piece_is_found(tmp_path: Path, at: int) -> None:
    saved = Saved(tmp_path / "a")
    saved.flip(at)
    piece = at // PIECE_BYTES
    # In a target or in the gap beside it: the piece is checked whole.
    ranges = [(10, 20), (PIECE_BYTES + 10, PIECE_BYTES + 20), (SIZE - 30, SIZE - 20)]
    with pytest.raises(DigestMismatchError) as caught:
        saved.read(ranges)
    assert caught.value.piece == piece
    assert caught.value.expected == saved.digest.pieces[piece]
    assert caught.value.found != caught.value.expected
    assert caught.value.path == str(saved.path)


def test_a_flipped_bit_in_a_piece_that_is_not_touched_is_not_looked_for(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a")
    saved.flip(PIECE_BYTES + 5)
    np.testing.assert_array_equal(saved.read([(0, 10)])[0], saved.data[:10])


@pytest.mark.parametrize("short", [1, 100, 4096, 1_000_000])
def test_short_reads_are_continued(saved: Saved, short: int) -> None:
    ops = FaultyOps(Fault("preadv", times=3, short_bytes=short))
    ranges = [(0, 50), (50, 3000), (4000, SIZE)]
    with use_ops(ops):
        targets = saved.read(ranges)
    assert ops.struck == 3
    for target, (start, stop) in zip(targets, ranges, strict=True):
        np.testing.assert_array_equal(target, saved.data[start:stop])


def test_a_file_of_another_size_is_refused_before_reading(tmp_path: Path) -> None:
    """Case 1: a file cut to 0 bytes."""
    saved = Saved(tmp_path / "a", 5000)
    os.truncate(saved.path, 0)
    with use_ops(RecordingOps()) as ops, pytest.raises(CorruptFileError) as caught:
        saved.read([(0, 10)])
    assert isinstance(ops, RecordingOps)
    assert (caught.value.expected, caught.value.found) == (5000, 0)
    assert ops.of("preadv") == []


def test_a_range_behind_the_end_is_refused_without_a_digest(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a", 5000)
    with pytest.raises(CorruptFileError) as caught:
        saved.read([(4990, 5001)], check=False)
    assert (caught.value.expected, caught.value.found) == (5001, 5000)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a", 5000)
    ops = FaultyOps(Fault("preadv", times=None, short_bytes=0))
    with use_ops(ops), pytest.raises(CorruptFileError):
        saved.read([(0, 5000)])
    assert ops.struck == 2


def test_an_error_of_the_device_is_named(saved: Saved) -> None:
    ops = FaultyOps(Fault("preadv", nth=2, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError) as caught:
        saved.read([(0, SIZE)])
    assert ops.struck == 1
    assert caught.value.operation == "read"


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(10, None, 5), Segment(0, None, 5)],
        [Segment(0, None, 5), Segment(4, None, 5)],
        [Segment(-1, None, 5)],
        [Segment(0, None, -5)],
        [Segment(0, memoryview(bytearray(4)), 5)],
        [Segment(0, memoryview(b"12345"), 5)],
        [Segment(0, np.zeros(5, np.float32).data, 20)],
        [Segment(0, np.zeros((2, 2), np.uint8).data, 4)],
        [Segment(0, np.zeros(8, np.uint8)[::2].data, 4)],
    ],
    ids=["order", "overlap", "before", "negative", "short", "read-only", "float", "2-d", "strided"],
)
def test_segments_that_cant_be_meant_are_refused(saved: Saved, segments: list[Segment]) -> None:
    with pytest.raises(UsageError):
        read_segments(saved.path, segments, saved.digest)


def test_no_threads_at_all_is_refused_for_reading(saved: Saved) -> None:
    with pytest.raises(SettingError):
        read_segments(saved.path, [], None, threads=0)


def test_a_missing_file_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        read_segments(tmp_path / "none", [], None)
    assert caught.value.path == str(tmp_path / "none")


def test_a_symbolic_link_is_not_read(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved.path)
    with pytest.raises(ForeignFileError):
        read_segments(tmp_path / "link", [], None)


def test_errors_call_the_file_by_its_label(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a", 5000)
    saved.flip(0)
    with pytest.raises(DigestMismatchError, match="rank 3's shard"):
        read_segments(saved.path, [Segment(0, None, 1)], saved.digest, path_label="rank 3's shard")


def test_descriptors_and_threads_stay_level_over_many_reads(saved: Saved) -> None:
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(50):
        saved.read([(0, 10), (PIECE_BYTES, PIECE_BYTES + 10)], check=False)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_100_000_small_tensors_are_read_a_thousand_at_a_time(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a", 100_000 * 100)
    target = np.zeros(100_000 * 100, np.uint8)
    view = target.data
    segments = [Segment(at, view[at : at + 100], 100) for at in range(0, len(view), 100)]
    ops = RecordingOps()
    with use_ops(ops):
        read_segments(saved.path, segments, saved.digest)
    np.testing.assert_array_equal(target, saved.data)
    assert 0 < len(ops.of("preadv")) < len(segments) / 500


class Cold(Ops):
    """Pieces with these numbers aren't in the page cache; notes what is read past it."""

    def __init__(self, *cold: int) -> None:
        self.cold = cold
        self.direct: set[int] = set()
        self.past: list[int] = []

    def is_cached(self, fd: int, offset: int) -> bool:
        del fd
        return offset // PIECE_BYTES not in self.cold

    def set_direct(self, fd: int, on: bool) -> None:
        super().set_direct(fd, on)
        if on:
            self.direct.add(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        if fd in self.direct:
            self.past.append(offset // PIECE_BYTES)
        return super().preadv(fd, buffers, offset)

    def close(self, fd: int) -> None:
        self.direct.discard(fd)
        super().close(fd)


def read_direct(saved: Saved, ranges: list[tuple[int, int]], ops: Ops) -> list[np.ndarray]:
    targets = [np.zeros(stop - start, np.uint8) for start, stop in ranges]
    segments = [Segment(a, t.data, b - a) for (a, b), t in zip(ranges, targets, strict=True)]
    with use_ops(ops):
        read_segments(saved.path, segments, saved.digest, direct=True)
    return targets


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_what_isnt_cached_is_read_past_the_cache_with_the_same_bytes(
    ranges: list[tuple[int, int]], saved: Saved
) -> None:
    ops = Cold(1, 2)
    for (start, stop), found in zip(ranges, read_direct(saved, ranges, ops), strict=True):
        assert (found == saved.data[start:stop]).all()
    touched = {at // PIECE_BYTES for start, stop in ranges for at in range(start, stop, 4096)}
    touched |= {(stop - 1) // PIECE_BYTES for start, stop in ranges if stop > start}
    assert set(ops.past) == touched & {1, 2}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("begin", "order"), [(0.0, [0, 1, 2]), (0.5, [1, 2, 0]), (0.99, [2, 0, 1])]
)
def test_reading_begins_where_it_is_told_and_reads_everything(
    begin: float, order: list[int], check: bool, saved: Saved
) -> None:
    target = np.zeros(SIZE, np.uint8)
    pieces: list[int] = []

    class Noting(Ops):
        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            pieces.append(offset // PIECE_BYTES)
            return super().preadv(fd, buffers, offset)

    with use_ops(Noting()):
        read_segments(
            saved.path,
            [Segment(0, target.data, SIZE)],
            saved.digest if check else None,
            threads=1,
            begin=begin,
        )
    assert (target == saved.data).all()
    assert list(dict.fromkeys(pieces)) == order


@pytest.mark.parametrize("cold", [(), (0, 1, 2)], ids=["cached", "cold"])
def test_a_piece_is_read_whole_and_compared(cold: tuple[int, ...], tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a.shard")
    buffer = Arena(PIECE_BYTES).array
    ops = Cold(*cold)
    with use_ops(ops):
        for number in range(len(saved.digest.pieces)):
            start, stop = saved.digest.piece_range(number)
            read_piece(saved.path, saved.digest, number, buffer)
            assert (buffer[: stop - start] == saved.data[start:stop]).all()
        assert set(ops.past) == set(cold)
        saved.flip(PIECE_BYTES + 5)
        with pytest.raises(DigestMismatchError) as caught:
            read_piece(saved.path, saved.digest, 1, buffer)
    assert caught.value.piece == 1


def test_a_piece_of_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a.shard")
    other = replace(saved.digest, size_bytes=SIZE + 1)
    with pytest.raises(CorruptFileError):
        read_piece(saved.path, other, 0, Arena(PIECE_BYTES).array)


def test_a_disk_that_fails_at_the_look_into_the_cache_is_named_by_the_read(saved: Saved) -> None:
    class Failing(Cold):
        def is_cached(self, fd: int, offset: int) -> bool:
            del fd, offset
            raise OSError(errno.EIO, "no")

    (found,) = read_direct(saved, [(0, SIZE)], Failing())
    assert (found == saved.data).all()
    faults = FaultyOps(Fault("preadv", error="EIO"), Fault("is_cached", error="EIO"))
    with use_ops(faults), pytest.raises(StorageError):
        read_segments(saved.path, [Segment(0, None, SIZE)], saved.digest, direct=True)
    assert {call.op for call in faults.strikes} == {"is_cached", "preadv"}


def test_a_flipped_bit_is_found_past_the_cache_too(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "a.shard")
    saved.flip(PIECE_BYTES + 5)
    ops = Cold(0, 1, 2)
    with pytest.raises(DigestMismatchError) as caught:
        read_direct(saved, [(0, SIZE)], ops)
    assert caught.value.piece == 1
    assert 1 in ops.past


def test_where_direct_reads_are_refused_a_cold_piece_comes_through_the_cache(saved: Saved) -> None:
    class Refusing(Cold):
        num_refused = 0

        def set_direct(self, fd: int, on: bool) -> None:
            del fd, on
            self.num_refused += 1
            raise OSError(errno.EINVAL, "no")

    ops = Refusing(0, 1, 2)
    (found,) = read_direct(saved, [(0, SIZE)], ops)
    assert (found == saved.data).all()
    assert ops.num_refused


def test_a_python_without_the_flag_that_asks_the_cache_reads_as_well(tmp_path: Path) -> None:
    """Builds for an older libc lack ``os.RWF_NOWAIT``."""
    saved = Saved(tmp_path / "a.shard", 100_000)
    code = f"""
import os
del os.RWF_NOWAIT
from dist_ckpt.storage import FileDigest, Segment, read_segments
data, found = open({str(saved.path)!r}, "rb").read(), bytearray({saved.data.nbytes})
segment = Segment(0, memoryview(found), len(found))
read_segments({str(saved.path)!r}, [segment], FileDigest.of(data), direct=True)
assert found == data
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
