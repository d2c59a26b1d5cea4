"""Shards: direct writes in pieces, digests, what is left behind when something fails."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dist_ckpt.errors import NoSpaceError, SettingError, StorageError
from dist_ckpt.storage import (
    PAGE_BYTES,
    PIECE_BYTES,
    Arena,
    FileDigest,
    Ops,
    round_up,
    use_ops,
    verify_file,
    write_shard,
)
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps

SIZES = [
    0,
    1,
    4095,
    4096,
    4097,
    PIECE_BYTES - 1,
    PIECE_BYTES,
    PIECE_BYTES + 1,
    3 * PIECE_BYTES + 12_345,
]


@pytest.fixture(scope="module")
def arena() -> Arena:
    made = Arena(4 * PIECE_BYTES)
    made.array[:] = np.random.default_rng(7).integers(0, 256, made.size_bytes, np.uint8)
    return made


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", SIZES)
def test_a_shard_holds_exactly_the_bytes_of_the_buffer(
    tmp_path: Path, arena: Arena, size: int
) -> None:
    path = tmp_path / "a.shard"
    digest = write_shard(path, arena.array, size)
    data = arena.array[:size].tobytes()
    assert path.read_bytes() == data
    assert digest == FileDigest.of(data)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_digests_are_xxh3_128_of_each_piece_and_of_the_digests(
    tmp_path: Path, arena: Arena
) -> None:
    size = PIECE_BYTES + 5
    digest = write_shard(tmp_path / "a", arena.array, size)
    data = arena.array[:size].tobytes()
    pieces = [xxhash.xxh3_128(data[:PIECE_BYTES]), xxhash.xxh3_128(data[PIECE_BYTES:])]
    assert digest.size_bytes == size
    assert digest.pieces == tuple(piece.hexdigest() for piece in pieces)
    whole = xxhash.xxh3_128(b"".join(piece.digest() for piece in pieces))
    assert digest.whole == "xxh3_128:" + whole.hexdigest()


def test_a_part_of_an_arena_from_a_page_on_can_be_written(tmp_path: Path, arena: Arena) -> None:
    part = arena.array[3 * PAGE_BYTES :]
    write_shard(tmp_path / "a", part, 5000)
    assert (tmp_path / "a").read_bytes() == part[:5000].tobytes()


def test_the_file_is_private_while_it_is_written(tmp_path: Path, arena: Arena) -> None:
    with use_ops(RecordingOps()) as ops:
        write_shard(tmp_path / "a", arena.array, 10)
    assert isinstance(ops, RecordingOps)
    flags, mode = ops.of("open")[0].args
    assert mode == 0o600
    assert flags & os.O_EXCL
    assert flags & os.O_NOFOLLOW


class _WatchDirect(Ops):
    """Notes for each write whether O_DIRECT was on, what was written and by which thread."""

    def __init__(self) -> None:
        self.writes: list[tuple[bool, int, int, int]] = []

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
        import fcntl

        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.writes.append((direct, offset, len(data), threading.get_ident()))
        return super().pwrite(fd, data, offset)


def test_pieces_are_written_past_the_page_cache(tmp_path: Path, arena: Arena) -> None:
    size = 2 * PIECE_BYTES + 100
    with use_ops(_WatchDirect()) as ops:
        write_shard(tmp_path / "a", arena.array, size)
    assert isinstance(ops, _WatchDirect)
    assert sorted((direct, offset, length) for direct, offset, length, _ in ops.writes) == [
        (True, 0, PIECE_BYTES),
        (True, PIECE_BYTES, PIECE_BYTES),
        (True, 2 * PIECE_BYTES, PAGE_BYTES),
    ]


def test_one_piece_is_written_by_the_calling_thread(tmp_path: Path, arena: Arena) -> None:
    with use_ops(_WatchDirect()) as ops:
        write_shard(tmp_path / "a", arena.array, PIECE_BYTES)
    assert isinstance(ops, _WatchDirect)
    assert [thread for *_, thread in ops.writes] == [threading.get_ident()]


def test_several_pieces_are_written_by_several_threads(tmp_path: Path, arena: Arena) -> None:
    slow = FaultyOps(Fault("pwrite", times=None, delay_secs=0.05))
    with use_ops(slow):
        write_shard(tmp_path / "a", arena.array, 4 * PIECE_BYTES, threads=4)
    assert slow.struck == 4
    assert len({call.thread for call in slow.of("pwrite")}) > 1


def test_the_order_is_allocate_write_cut_mode_sync_close(tmp_path: Path, arena: Arena) -> None:
    with use_ops(RecordingOps()) as ops:
        write_shard(tmp_path / "a", arena.array, 100)
    assert isinstance(ops, RecordingOps)
    assert ops.names("a") == [
        "open",
        "fallocate",
        "set_direct",
        "pwrite",
        "ftruncate",
        "fchmod",
        "fsync",
        "close",
    ]


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_where_direct_io_is_refused_at_opening_it_goes_through_the_cache(
    tmp_path: Path, arena: Arena, error: str
) -> None:
    ops = FaultyOps(Fault("set_direct", error=error))
    with use_ops(ops):
        digest = write_shard(tmp_path / "a", arena.array, PIECE_BYTES + 17)
    assert ops.struck == 1
    assert verify_file(tmp_path / "a", digest) == PIECE_BYTES + 17
    assert ops.of("pwrite")[-1].args[0] in (PIECE_BYTES, 17)  # true bytes, no padding


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_where_direct_io_is_refused_at_the_first_write_it_goes_through_the_cache(
    tmp_path: Path, arena: Arena, error: str
) -> None:
    ops = FaultyOps(Fault("pwrite", error=error))
    with use_ops(ops):
        digest = write_shard(tmp_path / "a", arena.array, 3 * PIECE_BYTES + 17)
    assert ops.struck == 1
    assert [call.args for call in ops.of("set_direct")] == [(True,), (False,)]
    assert (tmp_path / "a").read_bytes() == arena.array[: 3 * PIECE_BYTES + 17].tobytes()
    assert len(digest.pieces) == 4


def test_a_refusal_that_goes_on_through_the_cache_is_an_error(tmp_path: Path, arena: Arena) -> None:
    ops = FaultyOps(Fault("pwrite", error="EINVAL", times=None))
    with use_ops(ops), pytest.raises(StorageError) as caught:
        write_shard(tmp_path / "a", arena.array, 10)
    assert ops.struck == 2
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("short", [1, 4095, 4096, 5000, 1_000_000])
def test_short_writes_are_continued(tmp_path: Path, arena: Arena, short: int) -> None:
    size = PIECE_BYTES + 9000
    ops = FaultyOps(Fault("pwrite", times=3, short_bytes=short))
    with use_ops(ops):
        digest = write_shard(tmp_path / "a", arena.array, size)
    assert ops.struck == 3
    assert (tmp_path / "a").read_bytes() == arena.array[:size].tobytes()
    assert verify_file(tmp_path / "a", digest) == size


def test_a_write_that_takes_nothing_is_an_error_and_not_an_endless_loop(
    tmp_path: Path, arena: Arena
) -> None:
    ops = FaultyOps(Fault("pwrite", times=None, short_bytes=0))
    with use_ops(ops), pytest.raises(StorageError, match="took no bytes"):
        write_shard(tmp_path / "a", arena.array, 10)
    assert ops.struck == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", ["EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_native_preallocation_is_fine(
    tmp_path: Path, arena: Arena, error: str
) -> None:
    ops = FaultyOps(Fault("fallocate", error=error))
    with use_ops(ops):
        write_shard(tmp_path / "a", arena.array, 5000)
    assert ops.struck == 1
    assert (tmp_path / "a").read_bytes() == arena.array[:5000].tobytes()


FAILURES = [
    (Fault("open", "a", error="EACCES"), StorageError),
    (Fault("fallocate", error="EIO"), StorageError),
    (Fault("fallocate", error="ENOSPC"), NoSpaceError),
    (Fault("set_direct", error="EIO"), StorageError),
    (Fault("pwrite", nth=2, error="ENOSPC"), NoSpaceError),
    (Fault("pwrite", nth=3, error="EDQUOT"), NoSpaceError),
    (Fault("pwrite", nth=1, error="EIO"), StorageError),
    (Fault("ftruncate", error="EIO"), StorageError),
    (Fault("fchmod", error="EPERM"), StorageError),
    (Fault("fsync", error="EIO"), StorageError),
    (Fault("close", "a", error="EIO"), StorageError),
]


@pytest.mark.parametrize(
    ("fault", "kind"), FAILURES, ids=[f"{fault.op}-{fault.error}" for fault, _ in FAILURES]
)
def test_after_any_failure_the_file_is_gone_and_the_error_says_what_failed(
    tmp_path: Path, arena: Arena, fault: Fault, kind: type[StorageError]
) -> None:
    """Case 4: a full disk leaves nothing behind."""
    path = tmp_path / "a"
    before = open_descriptors()
    ops = FaultyOps(fault)
    with use_ops(ops), pytest.raises(kind) as caught:
        write_shard(path, arena.array, 3 * PIECE_BYTES + 1)
    assert ops.struck == 1
    assert os.listdir(tmp_path) == []
    assert fault.error is not None
    assert caught.value.errno == getattr(errno, fault.error)
    assert caught.value.path == str(path)
    assert caught.value.operation
    assert caught.value.next_step
    # The close that the fault replaced left its descriptor open: that one isn't ours.
    assert open_descriptors() == before


def test_a_failed_sync_is_not_tried_again(tmp_path: Path, arena: Arena) -> None:
    ops = FaultyOps(Fault("fsync", error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        write_shard(tmp_path / "a", arena.array, 10)
    assert ops.struck == 1
    assert ops.names().count("fsync") == 1
    assert ops.names().count("fdatasync") == 0
    assert not (tmp_path / "a").exists()


def test_no_more_pieces_are_handed_out_after_an_error(tmp_path: Path, arena: Arena) -> None:
    ops = FaultyOps(Fault("pwrite", nth=1, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        write_shard(tmp_path / "a", arena.array, 4 * PIECE_BYTES, threads=1)
    assert len(ops.of("pwrite")) == 1


def test_an_interruption_waits_for_the_threads_and_removes_the_file(
    tmp_path: Path, arena: Arena
) -> None:
    class Interrupted(RecordingOps):
        def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().pwrite(fd, data, offset)

    before = threading.active_count()
    with use_ops(Interrupted()), pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "a", arena.array, 4 * PIECE_BYTES)
    assert threading.active_count() == before
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_refused_and_left_alone(tmp_path: Path, arena: Arena) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(StorageError) as caught:
        write_shard(path, arena.array, 10)
    assert caught.value.errno == errno.EEXIST
    assert path.read_bytes() == b"old"


def test_a_symbolic_link_is_not_written_through(tmp_path: Path, arena: Arena) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        write_shard(tmp_path / "a", arena.array, 10)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_directory_is_an_error(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(FileNotFoundError):
        write_shard(tmp_path / "none" / "a", arena.array, 10)


@pytest.mark.parametrize(
    ("buffer", "size"),
    [
        (Arena(8192).array[1:], 10),
        (Arena(8192).array[::2], 10),
        (Arena(8192).array.reshape(2, 4096), 10),
        (Arena(8192).array, 8193),
        (Arena(8192).array, -1),
        (Arena(8192).array.view(np.float32), 10),
    ],
    ids=["unaligned", "strided", "two-dimensional", "short", "negative", "float"],
)
def test_a_buffer_that_cant_be_written_directly_is_refused(
    tmp_path: Path, buffer: np.ndarray, size: int
) -> None:
    with pytest.raises(SettingError):
        write_shard(tmp_path / "a", buffer, size)
    assert os.listdir(tmp_path) == []


def test_no_threads_at_all_is_refused(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(SettingError):
        write_shard(tmp_path / "a", arena.array, 10, threads=0)


def test_descriptors_and_threads_stay_level_over_200_writes(tmp_path: Path, arena: Arena) -> None:
    """Case 43: nothing is leaked per save."""
    write_shard(tmp_path / "warm", arena.array, 2 * PIECE_BYTES)
    descriptors, threads = open_descriptors(), threading.active_count()
    for number in range(200):
        size = 2 * PIECE_BYTES if number % 50 == 0 else 5000
        write_shard(tmp_path / "a", arena.array, size)
        (tmp_path / "a").unlink()
    assert open_descriptors() == descriptors
    assert threading.active_count() == threads


def test_too_little_space_is_found_before_the_file_is_made(tmp_path: Path, arena: Arena) -> None:
    class Full(RecordingOps):
        def statvfs(self, path: str | os.PathLike[str]) -> os.statvfs_result:
            real = list(os.statvfs(path))
            real[4] = 0
            return os.statvfs_result(real)

    with use_ops(Full()) as ops, pytest.raises(NoSpaceError) as caught:
        write_shard(tmp_path / "a", arena.array, 10_000)
    assert isinstance(ops, RecordingOps)
    assert ops.of("open") == []
    assert caught.value.need_bytes == round_up(10_000)
    assert caught.value.free_bytes == 0


def mounted(mount: Path, kind: str, options: str) -> Iterator[Path]:
    mount.mkdir()
    command = ["mount", "-t", kind, "-o", options, kind, str(mount)]
    done = subprocess.run(command, capture_output=True, check=False) if os.geteuid() == 0 else None
    if done is None or done.returncode != 0:
        pytest.skip(f"mounting a {kind} takes root and the right to mount")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)  # noqa: S607


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real file system of 24 MiB."""
    yield from mounted(tmp_path / "disk", "tmpfs", "size=24m")


@pytest.fixture
def plain_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real file system without O_DIRECT, without fallocate, and that tells no size."""
    yield from mounted(tmp_path / "disk", "ramfs", "mode=700")


class _Boasting(RecordingOps):
    """Claims that there is room, so that the file system itself has to refuse."""

    def statvfs(self, path: str | os.PathLike[str]) -> os.statvfs_result:
        real = list(os.statvfs(path))
        real[4] = 2**40
        return os.statvfs_result(real)


def test_a_full_disk_is_named_beforehand_and_stays_empty(small_disk: Path, arena: Arena) -> None:
    """Case 4: a real file system, the check for space."""
    with pytest.raises(NoSpaceError) as caught:
        write_shard(small_disk / "a", arena.array, 3 * PIECE_BYTES)
    assert caught.value.free_bytes < 3 * PIECE_BYTES
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("allocate", [True, False])
def test_a_disk_that_fills_up_meanwhile_gets_its_space_back(
    small_disk: Path, arena: Arena, *, allocate: bool
) -> None:
    """Case 4: a real file system, ENOSPC by fallocate or by a write."""

    class Filling(_Boasting):
        def fallocate(self, fd: int, size_bytes: int) -> None:
            if not allocate:
                raise OSError(errno.EOPNOTSUPP, "none")
            super().fallocate(fd, size_bytes)

    free = os.statvfs(small_disk).f_bavail
    with use_ops(Filling()) as ops, pytest.raises(NoSpaceError) as caught:
        write_shard(small_disk / "a", arena.array, 3 * PIECE_BYTES)
    assert isinstance(ops, RecordingOps)
    assert bool(ops.of("pwrite")) is not allocate
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == []
    assert os.statvfs(small_disk).f_bavail == free


def test_a_shard_fits_a_small_disk_of_another_kind(small_disk: Path, arena: Arena) -> None:
    digest = write_shard(small_disk / "a", arena.array, PIECE_BYTES + 3)
    assert verify_file(small_disk / "a", digest) == PIECE_BYTES + 3


def test_a_file_system_without_direct_io_fallocate_and_size_takes_a_shard(
    plain_disk: Path, arena: Arena
) -> None:
    size = PIECE_BYTES + 3
    with use_ops(RecordingOps()) as ops:
        digest = write_shard(plain_disk / "a", arena.array, size)
    assert isinstance(ops, RecordingOps)
    # libc's emulation of fallocate would have written a byte to each block.
    lengths = sorted(call.args[0] for call in ops.of("pwrite"))
    assert lengths == [3, PIECE_BYTES]
    assert verify_file(plain_disk / "a", digest) == size
    assert (plain_disk / "a").read_bytes() == arena.array[:size].tobytes()
