"""Files gone through from front to back: right in any order, compared piece by piece, bounded."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt import storage
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    NoSpaceError,
    SettingError,
    UsageError,
)
from dist_ckpt.storage import PIECE_BYTES, Buffers, FileDigest, ForwardReader, ForwardWriter
from helpers.generating import change_byte

SIZE = 2 * PIECE_BYTES + 12345


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    """Chunks of a quarter of a piece."""
    found = Buffers(6, 6 * PIECE_BYTES // 4)
    assert found.chunk_bytes == PIECE_BYTES // 4
    yield found
    found.close()


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("direct", [False, True])
def test_ranges_in_any_order_are_read_right(
    path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor, direct: bool
) -> None:
    source = random.Random(1)
    digest = FileDigest.of(content)
    reader = ForwardReader(path, digest, buffers, pool, direct=direct)
    for _ in range(12):
        start = source.randrange(SIZE)
        stop = source.randrange(start, min(SIZE, start + 3 * PIECE_BYTES // 2) + 1)
        got = b"".join(part.tobytes() for part in reader.read(start, stop))
        assert got == content[start:stop]
    reader.finish()
    assert reader.compared <= {0, 1, 2}
    reader.close()


def test_from_front_to_back_each_byte_is_read_once(
    path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    class Counting(storage.Ops):
        num_bytes = 0

        def preadv(self, fd: int, buffers: object, offset: int) -> int:
            got = super().preadv(fd, buffers, offset)  # type: ignore[arg-type]
            Counting.num_bytes += got
            return got

    with storage.use_ops(Counting()):
        reader = ForwardReader(path, FileDigest.of(content), buffers, pool)
        for start in range(0, SIZE, 999_983):
            list(reader.read(start, min(start + 999_983, SIZE)))
        reader.finish()
        reader.close()
    assert Counting.num_bytes == SIZE
    assert reader.compared == {0, 1, 2}


@pytest.mark.parametrize("at", [PIECE_BYTES + 5, 2 * PIECE_BYTES - 1])
def test_a_piece_that_was_touched_is_compared_to_its_end(
    path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor, at: int
) -> None:
    digest = FileDigest.of(content)
    path.chmod(0o600)
    change_byte(path, at)
    reader = ForwardReader(path, digest, buffers, pool)
    list(reader.read(0, 10))
    reader.finish()  # another piece: nothing is wrong with it
    list(reader.read(PIECE_BYTES, PIECE_BYTES + 2))
    with pytest.raises(DigestMismatchError) as caught:
        reader.finish()
    assert (caught.value.path, caught.value.piece) == (str(path), 1)
    reader.close()


def test_a_file_of_another_size_is_refused_and_one_that_shrinks_is_noticed(
    path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    digest = FileDigest.of(content)
    reader = ForwardReader(path, digest, buffers, pool)
    os.truncate(path, SIZE - 1)
    with pytest.raises(CorruptFileError, match="expected"):
        list(reader.read(2 * PIECE_BYTES, SIZE))
    reader.close()
    with pytest.raises(CorruptFileError, match="expected"):
        ForwardReader(path, digest, buffers, pool)
    for _ in range(6):
        buffers.take()  # all came back


def test_what_is_written_is_there_with_zeros_in_between_and_its_digest(
    tmp_path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    path = tmp_path / "new"
    gap = PIECE_BYTES // 2 + 77
    with ForwardWriter(path, SIZE + gap + 9, buffers, pool) as writer:
        data = np.frombuffer(content, np.uint8)
        at = 0
        for length in (1, 4096, PIECE_BYTES - 3, 100_001):
            writer.write(at, data[at : at + length])
            at += length
        writer.write(at + gap, data[at:])
    wanted = content[:at] + bytes(gap) + content[at:] + bytes(9)
    assert path.read_bytes() == wanted
    assert writer.digest == FileDigest.of(wanted)
    assert path.stat().st_mode & 0o777 == 0o400
    for _ in range(6):
        buffers.take()  # all came back


def test_the_sum_is_taken_beside_the_writing(
    tmp_path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    with (
        ThreadPoolExecutor(1) as hasher,
        ForwardWriter(tmp_path / "new", SIZE, buffers, pool, hasher=hasher) as writer,
    ):
        writer.write(0, np.frombuffer(content, np.uint8))
    assert writer.sha256 == hashlib.sha256(content).hexdigest()
    for _ in range(6):
        buffers.take()  # all came back


def test_an_empty_file_is_a_file(
    tmp_path: Path, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    with ForwardWriter(tmp_path / "empty", 0, buffers, pool) as writer:
        pass
    assert writer.digest == FileDigest.of(b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_after_an_error_the_file_is_gone(
    tmp_path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    path = tmp_path / "new"

    def fill() -> None:
        with ForwardWriter(path, SIZE, buffers, pool) as writer:
            writer.write(0, np.frombuffer(content, np.uint8))
            raise RuntimeError("from the body")

    with pytest.raises(RuntimeError, match="from the body"):
        fill()
    assert not path.exists()


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(
    tmp_path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    class Full(storage.Ops):
        strikes = 0

        def pwrite(self, fd: int, data: object, offset: int) -> int:
            if offset >= PIECE_BYTES:
                Full.strikes += 1
                raise OSError(28, "full")
            return super().pwrite(fd, data, offset)  # type: ignore[arg-type]

    with (
        storage.use_ops(Full()),
        pytest.raises(NoSpaceError),
        ForwardWriter(tmp_path / "new", SIZE, buffers, pool) as writer,
    ):
        writer.write(0, np.frombuffer(content, np.uint8))
    assert Full.strikes
    assert not (tmp_path / "new").exists()
    for _ in range(6):
        buffers.take()  # all came back


def test_going_back_in_a_file_that_is_written_is_refused(
    tmp_path: Path, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:

    def fill() -> None:
        with ForwardWriter(tmp_path / "new", 100, buffers, pool) as writer:
            writer.write(10, np.zeros(10, np.uint8))
            writer.write(5, np.zeros(10, np.uint8))

    with pytest.raises(UsageError, match="front to back"):
        fill()
    assert not (tmp_path / "new").exists()


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(SettingError, match="Give at least 7 MiB"):
        Buffers(100, 2**20)


class FewThreads:
    """Lets so many threads be started; the system refuses more."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = count
        self.num_refused = 0
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if not self.left:
                self.num_refused += 1
                raise RuntimeError("can't start new thread")
            self.left -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


class OnceOps(storage.Ops):
    """Notes where was written; the first write waits until another was made."""

    def __init__(self, *, waits: bool) -> None:
        self.offsets: list[int] = []
        self.written_late = 0
        self.waited = not waits
        self._other = threading.Event()
        self._fd = -1
        self._is_closed = False

    def pwrite(self, fd: int, data: object, offset: int) -> int:
        self._fd = fd
        self.written_late += self._is_closed
        self.offsets.append(offset)
        if offset:
            self._other.set()
        elif not self.waited:
            self.waited = self._other.wait(20)
        return super().pwrite(fd, data, offset)  # type: ignore[arg-type]

    def close(self, fd: int) -> None:
        self._is_closed |= fd == self._fd
        super().close(fd)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_where_no_more_threads_can_be_started_each_chunk_is_still_written_once(
    tmp_path: Path,
    content: bytes,
    buffers: Buffers,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    ops = OnceOps(waits=count == 2)
    threads = FewThreads(count, monkeypatch)  # the first is the sum's, the second writes
    with (
        ThreadPoolExecutor(3) as pool,
        ThreadPoolExecutor(1) as hasher,
        storage.use_ops(ops),
        ForwardWriter(tmp_path / "new", SIZE, buffers, pool, hasher=hasher) as writer,
    ):
        writer.write(0, np.frombuffer(content, np.uint8))
    assert threads.num_refused
    assert ops.waited
    assert not ops.written_late
    assert sorted(ops.offsets) == list(range(0, SIZE, buffers.chunk_bytes))
    assert (tmp_path / "new").read_bytes() == content
    assert writer.sha256 == hashlib.sha256(content).hexdigest()
    assert writer.digest == FileDigest.of(content)
    for _ in range(6):
        buffers.take()  # all came back


def test_a_sum_that_cant_be_taken_leaves_no_file(
    tmp_path: Path, content: bytes, buffers: Buffers, pool: ThreadPoolExecutor
) -> None:
    class Broken:
        strikes = 0

        def update(self, _data: object) -> None:
            Broken.strikes += 1
            raise MemoryError

    with ThreadPoolExecutor(1) as hasher:
        writer = ForwardWriter(tmp_path / "new", SIZE, buffers, pool, hasher=hasher)
        writer._sha256 = Broken()  # type: ignore[assignment]
        with pytest.raises(MemoryError), writer:
            writer.write(0, np.frombuffer(content, np.uint8))
    assert Broken.strikes
    assert not (tmp_path / "new").exists()
