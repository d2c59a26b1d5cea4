"""The seam, and the recorder and faults that tests put there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_ckpt import storage
from dist_ckpt.errors import NoSpaceError, StorageError
from dist_ckpt.storage import Ops, get_ops, make_dir, read_file, use_ops, write_durable
from helpers.faulty_ops import (
    ENVIRONMENT,
    Fault,
    FaultyOps,
    RecordingOps,
    faults_environment,
    install_from_environment,
    read_strikes,
)

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_these() -> None:
    assert sorted(storage.__all__, key=str.lower) == sorted(
        [
            *("PAGE_BYTES", "PIECE_BYTES", "AppendFile", "Arena", "Buffers", "FileDigest"),
            *("ForwardReader", "ForwardWriter", "Ops", "RunLock", "Segment", "StreamWriter"),
            *("check_space", "device_of", "digest_bytes", "exists", "file_size"),
            *("for_each", "free_bytes", "get_ops", "hand_on", "is_dir"),
            *("last_moved", "link_or_copy", "list_names", "lock_holder", "longest_name_bytes"),
            *("lstat", "make_dir", "map_file", "no_memory", "read_file", "read_head"),
            *("read_piece", "read_segments", "remove_tree", "rename", "rename_durable"),
            *("replace_durable", "require_no_link", "round_up", "sha256_file", "share_file"),
            *("sync_dir", "sync_file", "sync_names", "unlink"),
            *("use_ops", "verify_file", "write_durable", "write_shard"),
        ],
        key=str.lower,
    )
    assert all(hasattr(storage, name) for name in storage.__all__)


def test_the_seam_is_replaced_inside_the_with_and_put_back_after() -> None:
    before = get_ops()
    with use_ops(RecordingOps()) as outer:
        assert get_ops() is outer
        with use_ops(Ops()) as inner:
            assert get_ops() is inner
        assert get_ops() is outer
    assert get_ops() is before


def test_the_seam_is_put_back_after_an_error() -> None:
    before = get_ops()
    with pytest.raises(ValueError, match="inside"), use_ops(Ops()):
        raise ValueError("inside")
    assert get_ops() is before


def test_a_recorder_sees_each_operation_with_its_path(tmp_path: Path) -> None:
    with use_ops(RecordingOps()) as ops:
        make_dir(tmp_path / "d")
        write_durable(tmp_path / "d" / "f", b"12345")
        read_file(tmp_path / "d" / "f", limit_bytes=10)
    assert isinstance(ops, RecordingOps)
    assert ops.names() == [
        *("mkdir", "open", "pwrite", "fchmod", "fsync", "close"),
        *("open", "fstat", "preadv", "close"),
    ]
    assert ops.of("pwrite", "*/d/f")[0].args == (5, 0)
    assert ops.names("d") == ["mkdir"]


def test_a_fault_strikes_at_the_nth_call_on_its_path_only(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("pwrite", "*.shard", nth=2, error="ENOSPC"))
    with use_ops(ops):
        write_durable(tmp_path / "a.json", b"1")
        write_durable(tmp_path / "a.shard", b"1")
        write_durable(tmp_path / "b.json", b"1")
        with pytest.raises(NoSpaceError):
            write_durable(tmp_path / "b.shard", b"1")
        write_durable(tmp_path / "c.shard", b"1")
    assert [call.path for call in ops.strikes] == [str(tmp_path / "b.shard")]
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.shard", "b.json", "c.shard"]


def test_a_fault_can_strike_for_ever(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fsync", nth=2, times=None, error="EIO"))
    with use_ops(ops):
        write_durable(tmp_path / "a", b"1")
        for name in "bcd":
            with pytest.raises(StorageError):
                write_durable(tmp_path / name, b"1")
    assert ops.struck == 3


def test_a_short_write_is_continued_by_storage(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("pwrite", short_bytes=2))
    with use_ops(ops):
        write_durable(tmp_path / "a", b"12345")
    assert ops.struck == 1
    assert [call.args for call in ops.of("pwrite")] == [(5, 0), (3, 2)]
    assert (tmp_path / "a").read_bytes() == b"12345"


def test_a_slow_operation_takes_its_time_and_is_done(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fsync", delay_secs=0.1))
    start = time.monotonic()
    with use_ops(ops):
        write_durable(tmp_path / "a", b"1")
    assert time.monotonic() - start >= 0.1
    assert ops.struck == 1
    assert (tmp_path / "a").exists()


def test_no_faults_in_the_environment_install_nothing() -> None:
    before = get_ops()
    assert install_from_environment({}) is None
    assert get_ops() is before


def run_child(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


CHILD = """
import gc
from helpers.faulty_ops import install_from_environment
from dist_ckpt.storage import write_durable
install_from_environment()
gc.collect()
for name in "abc":
    write_durable(f"{DIR}/{name}", b"data")
"""


def test_a_child_kills_itself_at_the_operation_that_the_environment_names(tmp_path: Path) -> None:
    """Case 2: SIGKILL between two system calls."""
    log = tmp_path / "strikes.jsonl"
    faults = [Fault("fsync", "*/b", kill=True)]
    child = run_child(f"DIR = {str(tmp_path)!r}\n{CHILD}", faults_environment(faults, log=log))
    assert child.returncode == -signal.SIGKILL
    (strike,) = read_strikes(log)
    assert strike["call"]["op"] == "fsync"
    assert strike["call"]["path"] == str(tmp_path / "b")
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


def test_a_child_gets_errors_from_the_environment(tmp_path: Path) -> None:
    log = tmp_path / "strikes.jsonl"
    faults = [Fault("pwrite", "c", error="EIO")]
    child = run_child(f"DIR = {str(tmp_path)!r}\n{CHILD}", faults_environment(faults, log=log))
    assert child.returncode == 1
    assert "StorageError" in child.stderr
    assert len(read_strikes(log)) == 1


def test_the_library_itself_never_looks_at_the_faults_of_the_environment(tmp_path: Path) -> None:
    code = CHILD.replace("install_from_environment()\n", "", 1).replace(
        "from helpers.faulty_ops import install_from_environment\n", ""
    )
    code = code.replace("install_from_environment()", "")
    faults = faults_environment([Fault("*", error="EIO", times=None)])
    assert ENVIRONMENT in faults
    child = run_child(f"DIR = {str(tmp_path)!r}\n{code}", faults)
    assert child.returncode == 0, child.stderr
    assert (tmp_path / "c").read_bytes() == b"data"


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    fd = Ops().open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_preallocation_takes_the_whole_size(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        Ops().fallocate(fd, 100_000)
        assert os.fstat(fd).st_size == 100_000
        with pytest.raises(OSError, match="Invalid argument"):
            Ops().fallocate(fd, 0)
    finally:
        os.close(fd)
