"""Small files, growing files, and files that are streamed."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt.errors import (
    CorruptFileError,
    ForeignFileError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    UsageError,
)
from dist_ckpt.storage import (
    PIECE_BYTES,
    AppendFile,
    FileDigest,
    StreamWriter,
    read_file,
    replace_durable,
    use_ops,
    write_durable,
)
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300])
def test_a_small_file_is_whole_synced_and_read_only(tmp_path: Path, data: bytes) -> None:
    with use_ops(RecordingOps()) as ops:
        write_durable(tmp_path / "a", data)
    assert isinstance(ops, RecordingOps)
    assert (tmp_path / "a").read_bytes() == data
    assert mode_of(tmp_path / "a") == 0o400
    writes = ["pwrite"] if data else []
    assert ops.names() == ["open", *writes, "fchmod", "fsync", "close"]


def test_a_small_file_never_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(StorageError) as caught:
        write_durable(tmp_path / "a", b"new")
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("op", ["open", "pwrite", "fchmod", "fsync", "close"])
def test_a_small_file_that_fails_is_gone(tmp_path: Path, op: str) -> None:
    ops = FaultyOps(Fault(op, error="ENOSPC"))
    with use_ops(ops), pytest.raises(NoSpaceError) as caught:
        write_durable(tmp_path / "a", b"12345")
    assert ops.struck == 1
    assert os.listdir(tmp_path) == []
    assert caught.value.need_bytes in (5, None)
    assert caught.value.free_bytes > 0
    assert ops.names().count("fsync") <= 1


def test_replacing_is_write_sync_rename_and_sync_of_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "verified.json"
    replace_durable(path, b"one")
    with use_ops(RecordingOps()) as ops:
        replace_durable(path, b"two", mode=0o640)
    assert isinstance(ops, RecordingOps)
    assert path.read_bytes() == b"two"
    assert mode_of(path) == 0o640
    assert [(call.op, os.path.basename(call.path)) for call in ops.calls] == [
        ("unlink", ".verified.json.tmp"),
        ("open", ".verified.json.tmp"),
        ("pwrite", ".verified.json.tmp"),
        ("fchmod", ".verified.json.tmp"),
        ("fsync", ".verified.json.tmp"),
        ("close", ".verified.json.tmp"),
        ("rename", ".verified.json.tmp"),
        ("open", tmp_path.name),
        ("fsync", tmp_path.name),
        ("close", tmp_path.name),
    ]
    assert os.listdir(tmp_path) == ["verified.json"]


@pytest.mark.parametrize("op", ["open", "pwrite", "fchmod", "fsync", "close", "rename"])
def test_a_failed_replacement_keeps_the_old_content_and_leaves_nothing(
    tmp_path: Path, op: str
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    ops = FaultyOps(Fault(op, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        replace_durable(tmp_path / "a", b"new")
    assert ops.struck == 1
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_replacement_in_the_working_directory_needs_no_directory_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replace_durable("a", b"1")
    write_durable("b", b"2")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_a_crash_left_of_a_replacement_doesnt_hinder_the_next(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").write_bytes(b"torn")
    replace_durable(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_reading_stops_at_the_limit_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", limit_bytes=5) == b"12345"
    with use_ops(RecordingOps()) as ops, pytest.raises(CorruptFileError) as caught:
        read_file(tmp_path / "a", limit_bytes=4)
    assert isinstance(ops, RecordingOps)
    assert ops.of("preadv") == []
    assert (caught.value.expected, caught.value.found) == (4, 5)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptFileError):
        read_file(tmp_path / "huge", limit_bytes=10**6)


def test_an_empty_file_reads_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert read_file(tmp_path / "a", limit_bytes=0) == b""


def test_short_reads_of_small_files_are_continued(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    ops = FaultyOps(Fault("preadv", times=3, short_bytes=1))
    with use_ops(ops):
        assert read_file(tmp_path / "a", limit_bytes=10) == b"12345"
    assert ops.struck == 3


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("pipe", "link", "."):
        with pytest.raises(ForeignFileError) as caught:
            read_file(tmp_path / name, limit_bytes=10)
        assert caught.value.path == str(tmp_path / name)
    with pytest.raises(NotFoundError) as missing:
        read_file(tmp_path / "none", limit_bytes=10)
    assert missing.value.errno == errno.ENOENT


def test_an_unreadable_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    ops = FaultyOps(Fault("open", error="EACCES"))
    with use_ops(ops), pytest.raises(StorageError) as caught:
        read_file(tmp_path / "a", limit_bytes=10)
    assert ops.struck == 1
    assert caught.value.errno == errno.EACCES
    assert "permissions" in caught.value.next_step


def test_a_new_growing_file_is_private_and_its_name_durable(tmp_path: Path) -> None:
    with use_ops(RecordingOps()) as ops, AppendFile(tmp_path / "a") as file:
        assert file.created
        assert file.size == 0
    assert isinstance(ops, RecordingOps)
    assert mode_of(tmp_path / "a") == 0o600
    assert ops.names(tmp_path.name) == ["open", "fsync", "close"]


def test_appending_goes_on_where_the_file_ended(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one ")
    with use_ops(RecordingOps()) as ops, AppendFile(tmp_path / "a") as file:
        assert not file.created
        assert file.size == 4
        file.append(b"two ")
        file.append(b"three")
        assert file.size == 13
        file.sync()
    assert isinstance(ops, RecordingOps)
    assert (tmp_path / "a").read_bytes() == b"one two three"
    assert ops.names("a")[-2:] == ["fdatasync", "close"]


def test_the_tail_can_be_written_over(tmp_path: Path) -> None:
    """As a JSON array that is valid after each append."""
    with AppendFile(tmp_path / "a") as file:
        file.append(b"[]")
        file.overwrite_tail(1, b"[1, 2.5]]")
        assert (tmp_path / "a").read_bytes() == b"[[1, 2.5]]"
        file.overwrite_tail(file.size - 1, b",\n[2, 2.4]]")
        assert (tmp_path / "a").read_bytes() == b"[[1, 2.5],\n[2, 2.4]]"
        file.overwrite_tail(1, b"]")
        assert (tmp_path / "a").read_bytes() == b"[]"
        assert file.size == 2


def test_a_growing_file_can_be_cut(tmp_path: Path) -> None:
    with AppendFile(tmp_path / "a") as file:
        file.append(b"12345")
        file.truncate(5)
        file.truncate(2)
        file.append(b"x")
    assert (tmp_path / "a").read_bytes() == b"12x"


@pytest.mark.parametrize("at", [-1, 6])
def test_a_growing_file_isnt_changed_outside_its_bytes(tmp_path: Path, at: int) -> None:
    with AppendFile(tmp_path / "a") as file:
        file.append(b"12345")
        with pytest.raises(UsageError):
            file.overwrite_tail(at, b"x")
        with pytest.raises(UsageError):
            file.truncate(at)
    assert (tmp_path / "a").read_bytes() == b"12345"


def test_short_appends_are_continued(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("pwrite", times=2, short_bytes=1))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        file.append(b"12345")
        assert file.size == 5
    assert ops.struck == 2
    assert (tmp_path / "a").read_bytes() == b"12345"


def test_a_failed_append_leaves_the_file_as_it_was_and_usable(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("pwrite", nth=2, short_bytes=3), Fault("pwrite", nth=3, error="ENOSPC"))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        file.append(b"first\n")
        with pytest.raises(NoSpaceError):
            file.append(b"second\n")
        assert (tmp_path / "a").read_bytes() == b"first\n"
        assert file.size == 6
        file.append(b"third\n")
    assert ops.struck == 2
    assert (tmp_path / "a").read_bytes() == b"first\nthird\n"


def test_half_an_append_that_could_not_be_cut_is_cut_before_the_next(tmp_path: Path) -> None:
    """The next may be shorter than what was left behind it."""
    ops = FaultyOps(
        Fault("pwrite", nth=2, short_bytes=5),
        Fault("pwrite", nth=3, error="EIO"),
        Fault("ftruncate", times=2, error="EIO"),
    )
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        file.append(b"first\n")
        with pytest.raises(StorageError):
            file.append(b"second\n")
        assert (tmp_path / "a").read_bytes() == b"first\nsecon"
        with pytest.raises(StorageError, match="truncate"):
            file.append(b"3\n")
        file.append(b"3\n")
        file.append(b"4\n")
    assert ops.struck == 4
    assert (tmp_path / "a").read_bytes() == b"first\n3\n4\n"


def test_a_failed_sync_of_a_growing_file_is_told_once(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fdatasync", error="EIO"))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        with pytest.raises(StorageError) as caught:
            file.sync()
        assert ops.names().count("fdatasync") == 1
    assert ops.struck == 1
    assert caught.value.operation == "sync"


def test_a_closed_growing_file_is_refused(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a")
    file.close()
    file.close()
    with pytest.raises(UsageError):
        file.append(b"x")
    with pytest.raises(UsageError):
        file.sync()
    with pytest.raises(UsageError):
        file.truncate(0)


def test_a_growing_file_is_never_a_link_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "link"):
        with pytest.raises(ForeignFileError):
            AppendFile(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", [Fault("fstat", error="EIO"), Fault("fsync", error="EIO")])
def test_a_growing_file_that_cant_be_opened_leaks_nothing(tmp_path: Path, fault: Fault) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ops = FaultyOps(fault)
    with use_ops(ops), pytest.raises(StorageError):
        AppendFile(tmp_path / "a")
    assert ops.struck == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_appended_to_while_another_thread_syncs_it(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fdatasync", times=None, delay_secs=0.5))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        thread = threading.Thread(target=file.sync)
        thread.start()
        while not ops.struck:
            time.sleep(0.001)
        start = time.monotonic()
        file.append(b"1")
        assert time.monotonic() - start < 0.4
        thread.join()
    assert ops.struck == 1


def test_a_streamed_file_has_its_digests_and_sha256(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 2 * PIECE_BYTES + 77, np.uint8)
    with StreamWriter(tmp_path / "a", data.nbytes) as file:
        at = 0
        for length in (1, 0, 5_000_000, PIECE_BYTES, data.nbytes):
            file.write(data[at : at + length])
            at = min(at + length, data.nbytes)
    assert (tmp_path / "a").read_bytes() == data.tobytes()
    assert mode_of(tmp_path / "a") == 0o400
    assert file.digest == FileDigest.of(data)
    assert file.sha256 == hashlib.sha256(data.tobytes()).hexdigest()


def test_an_empty_or_exact_stream_is_a_file_too(tmp_path: Path) -> None:
    for size in (0, PIECE_BYTES):
        with StreamWriter(tmp_path / str(size), size, sha256=False) as file:
            file.write(bytes(size))
        assert file.digest == FileDigest.of(bytes(size))
        assert file.sha256 is None


def test_a_stream_of_another_length_is_refused_and_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError), StreamWriter(tmp_path / "a", 5) as file:
        file.write(b"123456")
    with pytest.raises(UsageError), StreamWriter(tmp_path / "a", 5) as file:
        file.write(b"1234")
    with pytest.raises(UsageError):
        file.write(b"5")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("op", ["open", "pwrite", "fchmod", "fsync", "close"])
def test_a_stream_that_fails_is_gone(tmp_path: Path, op: str) -> None:
    ops = FaultyOps(Fault(op, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError), StreamWriter(tmp_path / "a", 5) as file:
        file.write(b"12345")
    assert ops.struck == 1
    assert os.listdir(tmp_path) == []


def test_a_stream_left_by_an_exception_is_gone(tmp_path: Path) -> None:
    file = StreamWriter(tmp_path / "a", 5)
    with pytest.raises(ZeroDivisionError), file:
        file.write(bytes([5 // (file.written_bytes and 1)]))
    assert os.listdir(tmp_path) == []
    assert file.digest is None


def test_a_stream_without_room_never_begins(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError), StreamWriter(tmp_path / "a", 2**60):
        pass
    assert os.listdir(tmp_path) == []


def _durable(ops: FaultyOps) -> bytes:
    """Return what is on the device, if each sync that succeeded wrote what was dirty, no more."""
    disk: bytearray = bytearray()
    dirty: list[Any] = []
    for call in ops.calls:
        if call.op == "pwrite":
            dirty.append(call.args)
        elif call.op == "fdatasync":
            fails = any(call is struck for struck in ops.strikes)
            for data, offset in () if fails else dirty:
                disk[offset : offset + len(data)] = data
            dirty.clear()  # after a failure too: the kernel takes the pages for clean
    return bytes(disk)


class KeptFaultyOps(FaultyOps):
    """Remembers the bytes that were written."""

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        taken: int = super().pwrite(fd, data, offset)
        call = self.calls[-1]
        self.calls[-1] = replace(call, args=(bytes(data), offset))
        return taken


@pytest.mark.parametrize("between", [b"", b"third\n"])
def test_after_a_failed_sync_the_next_one_writes_the_bytes_anew(
    between: bytes, tmp_path: Path
) -> None:
    """A sync alone would succeed, and the bytes of the failed one would be nowhere."""
    ops = KeptFaultyOps(Fault("fdatasync", nth=2, error="EIO"))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        file.append(b"first\n")
        file.sync()
        file.append(b"second\n")
        with pytest.raises(StorageError):
            file.sync()
        assert _durable(ops) == b"first\n"
        if between:
            file.append(between)
        file.sync()
    assert ops.struck == 1
    assert _durable(ops) == b"first\nsecond\n" + between
    assert (tmp_path / "a").read_bytes() == b"first\nsecond\n" + between


def test_a_closing_bracket_that_was_written_over_is_written_anew_with_what_took_its_place(
    tmp_path: Path,
) -> None:
    ops = KeptFaultyOps(Fault("fdatasync", nth=2, times=2, error="EIO"))
    with use_ops(ops), AppendFile(tmp_path / "a") as file:
        file.append(b"[1]")
        file.sync()
        for number in (2, 3):
            file.overwrite_tail(file.size - 1, b",%d]" % number)
            with pytest.raises(StorageError):
                file.sync()
        file.sync()
    assert ops.struck == 2
    assert _durable(ops) == b"[1,2,3]"


def test_a_file_is_named_again_whole_while_another_thread_ends_a_sync(tmp_path: Path) -> None:
    path = tmp_path / "a"
    half_done, go_on = threading.Event(), threading.Event()
    with AppendFile(path) as file:
        copy = file._unsynced

        def end_sync() -> None:  # what it does, with a pause where its two parts don't agree
            end = copy.start + len(copy.data)
            copy.data.clear()
            half_done.set()
            go_on.wait(0.2)
            copy.start = end

        copy.end_sync = end_sync  # type: ignore[method-assign]
        syncing = threading.Thread(target=file.sync)

        class SyncWhileRead(FaultyOps):
            def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
                if not half_done.is_set():
                    syncing.start()
                    assert half_done.wait(10)
                return super().preadv(fd, buffers, offset)

        file.append(b"one, two")
        path.unlink()
        with use_ops(SyncWhileRead()):
            file.revive()
        go_on.set()
        syncing.join(10)
        assert half_done.is_set()
        assert path.read_bytes() == b"one, two"


def test_what_is_durable_is_kept_in_memory_no_longer(tmp_path: Path) -> None:
    with AppendFile(tmp_path / "a") as file:
        for number in range(3):
            file.append(b"x" * 1000)
            assert len(file._unsynced.data) == 1000
            file.sync()
            assert (file._unsynced.start, bytes(file._unsynced.data)) == (1000 * (number + 1), b"")
        file.truncate(10)
        file.append(b"end")
        assert (file._unsynced.start, bytes(file._unsynced.data)) == (10, b"end")
