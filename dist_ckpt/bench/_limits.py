"""What the machine can do at best, without any of the work of a checkpoint. Layer 7.

Plain system calls, not those of `storage`: a limit that shares code with what it is the limit of
would hide that code's cost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt.bench._contender import drop_cache
from dist_ckpt.storage import Arena, round_up

__all__ = ["Limits", "SmallCopies"]

_PIECE_BYTES = 16 << 20
_WRITE_THREADS = (1, 2, 4)
_READ_THREADS = 2


class Limits:
    """One rank's part of the bytes, copied, written and read in the quickest way known.

    Args:
        num_bytes: This rank's part.
        path: A file of this rank, made and replaced.
    """

    def __init__(self, num_bytes: int, path: Path) -> None:
        self._path = path
        self._num_bytes = num_bytes
        # As torch has them, in small pages: from huge ones a copy would be a tenth quicker.
        self._source = torch.ones(num_bytes, dtype=torch.uint8).numpy()
        self._arena = Arena(round_up(num_bytes))
        self._arena.populate()
        self._threads = 4
        for _ in range(2):
            self._copy()

    def choose_threads(self) -> int:
        """Return with how many threads a write is quickest here; `write` uses as many."""
        secs = {}
        for threads in _WRITE_THREADS:
            self._threads = threads
            secs[threads] = self.write()
        self._threads = min(secs, key=lambda threads: secs[threads])
        return self._threads

    def memcpy(self) -> float:
        """Return the seconds of a copy between warm pages, on one thread."""
        self._copy()  # both sides may have been cold, or the host's pages elsewhere
        return _timed(self._copy)

    def write(self) -> float:
        """Return the seconds of a durable new file: O_DIRECT where it can be had."""
        self._path.unlink(missing_ok=True)
        return _timed(self._write)

    def read_warm(self) -> float:
        """Return the seconds of positional reads from the page cache into warm memory."""
        with self._path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            self._read(os.O_RDONLY)
        return _timed(lambda: self._read(os.O_RDONLY))

    def read_cold(self) -> float:
        """Return the seconds of reads from the device."""
        drop_cache(self._path)
        return _timed(lambda: self._read(os.O_RDONLY | _direct(self._path)))

    def close(self) -> None:
        """Give memory and file back."""
        self._arena.close()
        self._path.unlink(missing_ok=True)

    def _copy(self) -> None:
        np.copyto(self._arena.array[: self._num_bytes], self._source)

    def _write(self) -> None:
        size = round_up(self._num_bytes)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.close(fd)
        fd = os.open(self._path, os.O_WRONLY | _direct(self._path))
        try:
            os.posix_fallocate(fd, 0, size)
            view = self._arena.array.data

            def put(at: int) -> int:
                return os.pwrite(fd, view[at : min(at + _PIECE_BYTES, size)], at)

            _in_pieces(size, self._threads, put)
            os.fsync(fd)
        finally:
            os.close(fd)
        parent = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

    def _read(self, flags: int) -> None:
        size = round_up(self._num_bytes)
        fd = os.open(self._path, flags)
        try:
            view = self._arena.array.data

            def get(at: int) -> int:
                return os.preadv(fd, [view[at : min(at + _PIECE_BYTES, size)]], at)

            _in_pieces(size, 4 if flags != os.O_RDONLY else _READ_THREADS, get)
        finally:
            os.close(fd)


class SmallCopies:
    """Copies many small tensors into one buffer, in each way that libraries offer."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = [tensor.view(-1) for tensor in tensors]
        numel = sum(tensor.numel() for tensor in self._tensors)
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._target = torch.zeros(numel)
        self._array = self._target.numpy()
        counts = [tensor.numel() for tensor in self._tensors]
        self._parts = list(torch.split(self._target, counts))

    def measure(self) -> dict[str, float]:
        """Return the seconds of each way."""

        def foreach() -> None:
            torch._foreach_copy_(self._parts, self._tensors)

        return {
            "np.concatenate": _timed(lambda: np.concatenate(self._arrays, out=self._array)),
            "torch.cat": _timed(lambda: torch.cat(self._tensors, out=self._target)),
            "foreach_copy": _timed(foreach),
        }


def pinned_copy_secs(num_bytes: int) -> float | None:
    """Return the seconds of a copy from the GPU into pinned memory, None without a GPU."""
    if not torch.cuda.is_available():
        return None
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return _timed(copy)


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _direct(path: Path) -> int:
    """Return O_DIRECT where the file system takes it, else 0."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


def _in_pieces(size: int, threads: int, work: Callable[[int], int]) -> None:
    starts = iter(range(0, size, _PIECE_BYTES))
    lock = threading.Lock()
    faults: list[str] = []

    def drain() -> None:
        while not faults:
            with lock:
                at = next(starts, None)
            if at is None:
                return
            try:
                done = work(at)
            except OSError as error:
                faults.append(str(error))
            else:
                if done != min(_PIECE_BYTES, size - at):
                    faults.append(f"{done} bytes at {at}")

    helpers = [threading.Thread(target=drain, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    drain()
    for helper in helpers:
        helper.join()
    if faults:
        raise OSError(f"a limit can't be measured: {faults[0]}")
