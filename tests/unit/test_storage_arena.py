"""The arena: aligned, private, populated, not inherited."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dist_ckpt.errors import StorageError, UsageError
from dist_ckpt.storage import PAGE_BYTES, Arena


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (5_000_000, 5_001_216)]
)
def test_an_arena_is_whole_pages_aligned_and_zero(asked: int, given: int) -> None:
    arena = Arena(asked)
    assert arena.size_bytes == given == len(arena.array)
    assert arena.array.dtype == np.uint8
    assert arena.array.flags.writeable
    assert arena.array.ctypes.data % PAGE_BYTES == 0
    assert not arena.array.any()


def test_populating_takes_the_memory_and_keeps_the_contents() -> None:
    arena = Arena(32 * 2**20)
    arena.array[12_345] = 7
    before = resident_bytes()
    arena.populate()
    assert resident_bytes() - before > 24 * 2**20
    assert arena.array[12_345] == 7
    assert np.count_nonzero(arena.array) == 1


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def test_populating_lets_other_threads_run() -> None:
    arena = Arena(512 * 2**20)
    waits: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            waits.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    arena.populate()
    took = time.perf_counter() - start
    done.set()
    thread.join()
    # A call that held the GIL would show as one wait of nearly all that time.
    assert len(waits) > 2
    assert max(waits) < max(0.05, 0.9 * took)


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_DONTFORK is Linux")
def test_a_forked_child_has_no_arena() -> None:
    code = (
        "import os\n"
        "from dist_ckpt.storage import Arena\n"
        "arena = Arena(4096); arena.array[0] = 1\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(int(arena.array[0]))\n"
        "print(os.waitpid(pid, 0)[1], arena.array[0])\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    status, kept = child.stdout.split()
    assert os.WTERMSIG(int(status)) == signal.SIGSEGV
    assert kept == "1"


def test_an_arena_lies_in_huge_pages_where_the_kernel_has_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this kernel gives no huge pages")
    arena = Arena(16 * 2**20)
    arena.populate()
    address = f"{arena.array.ctypes.data:x}-"
    with open("/proc/self/smaps") as file:
        text = file.read()
    entry = text[text.index("\n" + address) :]
    flags = entry[entry.index("VmFlags:") :].splitlines()[0].split()
    assert "hg" in flags
    assert "dc" in flags  # not copied on fork


def test_memory_that_cant_be_had_is_a_storage_error() -> None:
    with pytest.raises(StorageError) as caught:
        Arena(2**60)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.operation == "allocate"
    assert caught.value.size_bytes == 2**60
    with pytest.raises(StorageError):
        Arena(2**80)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError):
        Arena(-1)


def test_a_closed_arena_gives_its_memory_back_and_is_refused() -> None:
    arena = Arena(64 * 2**20)
    arena.populate()
    before = resident_bytes()
    arena.close()
    arena.close()
    assert before - resident_bytes() > 48 * 2**20
    with pytest.raises(UsageError):
        _ = arena.array


def test_a_view_outlives_a_closed_arena() -> None:
    arena = Arena(8192)
    view = arena.array[:10]
    view[:] = 9
    arena.close()
    assert view.tolist() == [9] * 10
