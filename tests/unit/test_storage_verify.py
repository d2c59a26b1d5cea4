"""Reading back whole files, past the page cache where that can be."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
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
    FileDigest,
    map_file,
    sha256_file,
    use_ops,
    verify_file,
)
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps

SIZE = PIECE_BYTES + 70_001


def save(path: Path, size: int = SIZE) -> FileDigest:
    data = np.random.default_rng(5).integers(0, 256, size, np.uint8)
    path.write_bytes(data.tobytes())
    return FileDigest.of(data)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 128]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, PIECE_BYTES, SIZE])
def test_a_good_file_passes_and_its_bytes_are_counted(
    tmp_path: Path, size: int, *, direct: bool
) -> None:
    digest = save(tmp_path / "a", size)
    assert verify_file(tmp_path / "a", digest, direct=direct) == size


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("at", [0, 4096, PIECE_BYTES - 1, PIECE_BYTES, SIZE - 1])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, at: int, *, direct: bool) -> None:
    path = tmp_path / "a"
    digest = save(path)
    flip(path, at)
    with pytest.raises(DigestMismatchError) as caught:
        verify_file(path, digest, direct=direct)
    assert caught.value.piece == at // PIECE_BYTES
    assert caught.value.path == str(path)
    assert caught.value.expected == digest.pieces[at // PIECE_BYTES]


class _DirectReads(RecordingOps):
    def __init__(self) -> None:
        super().__init__()
        self.direct: list[bool] = []

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self.direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return super().preadv(fd, buffers, offset)


def test_reading_back_goes_past_the_page_cache(tmp_path: Path) -> None:
    digest = save(tmp_path / "a")
    ops = _DirectReads()
    with use_ops(ops):
        verify_file(tmp_path / "a", digest)
    assert ops.direct == [True, True]


def test_reading_through_the_cache_on_purpose_leaves_the_cache_alone(tmp_path: Path) -> None:
    digest = save(tmp_path / "a")
    ops = _DirectReads()
    with use_ops(ops):
        verify_file(tmp_path / "a", digest, direct=False)
    assert ops.direct == [False, False]
    assert ops.of("fadvise_dontneed") == []


@pytest.mark.parametrize("op", ["set_direct", "preadv"])
def test_where_direct_reads_are_refused_the_cache_is_dropped_first(tmp_path: Path, op: str) -> None:
    digest = save(tmp_path / "a", 5000)
    ops = FaultyOps(Fault(op, error="EINVAL"))
    with use_ops(ops):
        assert verify_file(tmp_path / "a", digest) == 5000
    assert ops.struck == 1
    assert ops.names("a")[-4:] == ["fadvise_dontneed", "preadv", "fadvise_dontneed", "close"]


def test_dropping_the_cache_is_only_advice(tmp_path: Path) -> None:
    digest = save(tmp_path / "a", 5000)
    ops = FaultyOps(
        Fault("set_direct", error="EINVAL"), Fault("fadvise_dontneed", error="EIO", times=2)
    )
    with use_ops(ops):
        assert verify_file(tmp_path / "a", digest) == 5000
    assert ops.struck == 3


@pytest.mark.parametrize("short", [1, 4096, 5000])
def test_short_direct_reads_are_continued_on_a_page(tmp_path: Path, short: int) -> None:
    digest = save(tmp_path / "a", 20_001)
    ops = FaultyOps(Fault("preadv", short_bytes=short))
    with use_ops(ops):
        # Odd lengths are refused by the system: what follows goes through the cache.
        assert verify_file(tmp_path / "a", digest) == 20_001
    assert ops.struck == 1


def test_errors_of_the_device_are_named(tmp_path: Path) -> None:
    digest = save(tmp_path / "a", 5000)
    for op in ("set_direct", "preadv", "open", "fstat"):
        ops = FaultyOps(Fault(op, error="EIO"))
        with use_ops(ops), pytest.raises(StorageError) as caught:
            verify_file(tmp_path / "a", digest)
        assert ops.struck == 1
        assert caught.value.path == str(tmp_path / "a")


def test_only_the_pieces_asked_for_are_read(tmp_path: Path) -> None:
    digest = save(tmp_path / "a")
    flip(tmp_path / "a", 5)
    assert verify_file(tmp_path / "a", digest, pieces=[1]) == SIZE - PIECE_BYTES
    assert verify_file(tmp_path / "a", digest, pieces=[]) == 0
    with pytest.raises(DigestMismatchError):
        verify_file(tmp_path / "a", digest, pieces={0})


@pytest.mark.parametrize("pieces", [[2], [-1], [0, 5]])
def test_pieces_that_the_file_doesnt_have_are_refused(tmp_path: Path, pieces: list[int]) -> None:
    digest = save(tmp_path / "a")
    with pytest.raises(UsageError):
        verify_file(tmp_path / "a", digest, pieces=pieces)


def test_progress_adds_up_to_the_file(tmp_path: Path) -> None:
    digest = save(tmp_path / "a")
    told: list[int] = []
    verify_file(tmp_path / "a", digest, progress=told.append)
    assert sorted(told) == [SIZE - PIECE_BYTES, PIECE_BYTES]


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_another_size_is_corrupt_before_anything_is_read(tmp_path: Path, size: int) -> None:
    """Case 1: a file of 0 bytes, or torn."""
    digest = save(tmp_path / "a")
    os.truncate(tmp_path / "a", size)
    with use_ops(RecordingOps()) as ops, pytest.raises(CorruptFileError) as caught:
        verify_file(tmp_path / "a", digest)
    assert isinstance(ops, RecordingOps)
    assert not isinstance(caught.value, DigestMismatchError)
    assert (caught.value.expected, caught.value.found) == (SIZE, size)
    assert ops.of("preadv") == []


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    digest = FileDigest.of(b"abc")
    with pytest.raises(NotFoundError):
        verify_file(tmp_path / "none", digest)
    with pytest.raises(NotFoundError):
        sha256_file(tmp_path / "none")
    with pytest.raises(NotFoundError):
        map_file(tmp_path / "none")


def test_what_isnt_a_file_is_foreign(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ForeignFileError):
            verify_file(path, FileDigest.of(b""))


def test_no_threads_at_all_is_refused_for_verifying(tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        verify_file(tmp_path / "a", FileDigest.of(b""), threads=0)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_sha256_is_what_sha256sum_says(tmp_path: Path, size: int) -> None:
    save(tmp_path / "a", size)
    assert sha256_file(tmp_path / "a") == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()


@pytest.mark.parametrize("size", [0, 5000])
def test_a_mapped_file_is_read_only_and_equal(tmp_path: Path, size: int) -> None:
    save(tmp_path / "a", size)
    array = map_file(tmp_path / "a")
    assert array.tobytes() == (tmp_path / "a").read_bytes()
    assert not array.flags.writeable
