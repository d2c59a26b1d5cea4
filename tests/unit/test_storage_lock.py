"""The run lock, between real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_ckpt.errors import ForeignFileError, LockedError, StorageError, UsageError
from dist_ckpt.storage import RunLock, lock_holder, use_ops
from helpers.faulty_ops import Fault, FaultyOps

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time
from dist_ckpt.storage import RunLock
lock = RunLock(sys.argv[1])
lock.acquire({"pid": os.getpid(), "host": "here"})
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("free", flush=True)
sys.stdin.readline()
"""
TRIER = """
import json, sys
from dist_ckpt.errors import LockedError
from dist_ckpt.storage import RunLock
try:
    RunLock(sys.argv[1]).acquire({"pid": 0})
except LockedError as error:
    print(json.dumps(error.to_json()))
"""


@contextmanager
def holder_of(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Give another process that holds the lock; a line on its stdin makes it let go."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def test_a_second_process_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with holder_of(path) as child:
        tried = subprocess.run(
            [sys.executable, "-c", TRIER, str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        error = json.loads(tried.stdout)
        assert error["id"] == "locked"
        assert error["holder"] == {"pid": child.pid, "host": "here"}
        assert str(child.pid) in error["message"]
        assert error["path"] == str(path)


def test_the_lock_is_free_after_its_holder_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with holder_of(path) as child:
        with pytest.raises(LockedError):
            RunLock(path).acquire({"pid": 1})
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.returncode == -signal.SIGKILL
        assert path.read_text()  # the text outlives the lock and doesn't count
        assert lock_holder(path) is None
        lock = RunLock(path)
        lock.acquire({"pid": os.getpid()})
        assert lock_holder(path) == {"pid": os.getpid()}
        lock.release()


def test_the_lock_is_free_after_it_was_released(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with holder_of(path) as child:
        assert lock_holder(path) == {"pid": child.pid, "host": "here"}
        tell(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "free\n"
        assert lock_holder(path) is None
        lock = RunLock(path)
        lock.acquire({})
        lock.release()


def test_a_lock_can_be_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with holder_of(path) as child:
        threading.Timer(0.4, tell, (child,)).start()
        lock = RunLock(path)
        start = time.monotonic()
        lock.acquire({"pid": 5}, wait_secs=10)
        assert 0.2 < time.monotonic() - start < 5
        assert lock_holder(path) == {"pid": 5}
        lock.release()


def test_two_jobs_in_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "run.lock"), RunLock(tmp_path / "run.lock")
    first.acquire({"job": "first"})
    with pytest.raises(LockedError) as caught:
        second.acquire({"job": "second"})
    assert caught.value.holder == {"job": "first"}
    first.release()
    second.acquire({"job": "second"})
    assert lock_holder(tmp_path / "run.lock") == {"job": "second"}
    second.release()


def test_a_lock_is_taken_once_and_released_any_number_of_times(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock")
    lock.release()
    lock.acquire({})
    with pytest.raises(UsageError):
        lock.acquire({})
    lock.check()
    lock.release()
    lock.release()
    with pytest.raises(LockedError):
        lock.check()
    lock.acquire({})
    lock.check()
    lock.release()


def test_any_thread_may_release_and_check(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock")
    lock.acquire({})
    errors: list[BaseException] = []

    def work() -> None:
        try:
            lock.check()
            lock.release()
        except Exception as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert lock_holder(tmp_path / "run.lock") is None


def test_a_removed_lock_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = RunLock(path)
    lock.acquire({"pid": 1})
    lock.check()
    path.unlink()
    with pytest.raises(LockedError, match="removed"):
        lock.check()
    lock.release()


def test_a_lock_file_that_somebody_else_locked_anew_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = RunLock(path)
    lock.acquire({"pid": 1})
    path.unlink()
    with holder_of(path) as child:
        with pytest.raises(LockedError, match="replaced") as caught:
            lock.check()
        assert caught.value.holder == {"pid": child.pid, "host": "here"}
    lock.release()


def test_the_lock_file_is_private(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock")
    lock.acquire({})
    assert (tmp_path / "run.lock").stat().st_mode & 0o777 == 0o600
    lock.release()


def test_a_forked_child_doesnt_keep_the_lock(tmp_path: Path) -> None:
    """Loader workers outlive a killed trainer for a moment."""
    code = (
        "import os, sys, time, signal\n"
        "from dist_ckpt.storage import RunLock\n"
        "lock = RunLock(sys.argv[1]); lock.acquire({})\n"
        "if os.fork() == 0:\n"
        "    time.sleep(3); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=20)
    assert done.returncode == -signal.SIGKILL
    assert lock_holder(path) is None


def test_nobody_holds_a_lock_that_was_never_made(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "none") is None


def test_a_holder_that_cant_be_read_is_still_a_holder(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    for text in ("", "not json", "[1]", "x" * 100_000):
        path.write_text(text)
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert lock_holder(path) == {}
            with pytest.raises(LockedError, match="unnamed") as caught:
                RunLock(path).acquire({})
            assert caught.value.holder is None


def test_looking_at_a_lock_doesnt_turn_a_trainer_away(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.08, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        lock = RunLock(path)
        lock.acquire({"pid": 1})
        assert lock_holder(path) == {"pid": 1}
        lock.release()


def test_a_file_system_without_locks_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    ops = FaultyOps(Fault("flock", error="ENOLCK"))
    with use_ops(ops), pytest.raises(StorageError) as caught:
        lock_holder(tmp_path / "run.lock")
    assert ops.struck == 1
    assert caught.value.errno == errno.ENOLCK


def test_a_holder_that_cant_be_written_leaves_the_lock_free(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    ops = FaultyOps(Fault("pwrite", error="EIO"))
    lock = RunLock(path)
    with use_ops(ops), pytest.raises(StorageError) as caught:
        lock.acquire({"pid": 1})
    assert ops.struck == 1
    assert caught.value.errno == errno.EIO
    assert lock_holder(path) is None
    lock.acquire({"pid": 2})
    assert lock_holder(path) == {"pid": 2}
    lock.release()


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_a_holder_that_finds_no_room_holds_the_lock_without_a_name(
    tmp_path: Path, error: str
) -> None:
    """The disk is full, and who frees it has to hold the lock."""
    path = tmp_path / "run.lock"
    ops = FaultyOps(Fault("pwrite", short_bytes=3), Fault("pwrite", nth=2, error=error))
    lock = RunLock(path)
    with use_ops(ops):
        lock.acquire({"pid": 1, "started": 5.0})
    assert ops.struck == 2
    assert path.read_bytes() == b""  # no half of a name either
    assert lock_holder(path) == {}
    lock.check()
    with pytest.raises(LockedError, match=r"in use by another process \(unnamed\)") as caught:
        RunLock(path).acquire({"pid": 2})
    assert caught.value.holder is None
    path.unlink()
    lock.retake()  # with the name that there was no room for
    assert lock_holder(path) == {"pid": 1, "started": 5.0}
    lock.release()
    assert lock_holder(path) is None


def test_a_missing_run_directory_or_a_foreign_lock_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        RunLock(tmp_path / "none" / "run.lock").acquire({})
    assert not (tmp_path / "none").exists()
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(StorageError):
        RunLock(tmp_path / "run.lock").acquire({})
    with pytest.raises(ForeignFileError):
        lock_holder(tmp_path / "run.lock")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignFileError):
        RunLock(tmp_path / "link").acquire({})
    assert not (tmp_path / "elsewhere").exists()
