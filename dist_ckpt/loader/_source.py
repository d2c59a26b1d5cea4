"""Where batches come from: torch's DataLoader over an endless sampler, and the life of its workers.

Part of layer 3. Starts and ends processes; no file I/O.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import process
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from dist_ckpt.errors import SettingError
from dist_ckpt.loader._fetch import SeededFetch, WorkerInit, hand_on, held_back
from dist_ckpt.loader._order import Part, Stream
from dist_ckpt.seeding import kept_generators

__all__ = ["BatchSource", "WorkerOptions"]


_MOST_SECS = 1e9  # 31 years
_PATIENCE_SECS = 2.0  # for a worker in the middle of a fetch, when they are ended
_GONE_SECS = 10.0  # from SIGKILL to giving up: a process stuck in the kernel can't be waited for


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How batches are fetched; what each means is said by ``ResumableLoader``."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], object] | None
    multiprocessing_context: Any
    timeout_secs: float

    def __post_init__(self) -> None:
        """Refuse a time that no wait can be told, before the first batch is waited for."""
        secs: Any = self.timeout_secs
        is_number = isinstance(secs, int | float) and not isinstance(secs, bool)
        if not (is_number and 0 <= secs <= _MOST_SECS):
            raise SettingError(
                f"timeout_secs is {secs!r}; it must be a number of seconds from 0 to 1e9.",
                next_step="Leave it out to wait for ever.",
                expected="0 … 1e9",
                found=str(secs),
            )


class BatchSource:
    """Batches from one position of the stream on, until it is closed; then from another."""

    def __init__(self, fetch: SeededFetch, stream: Stream, options: WorkerOptions) -> None:
        self._fetch = fetch
        self._stream = stream
        self._options = options
        self._iterator: Any = None
        self._asked: deque[Part] = deque()  # parts that the iterator was asked for, oldest first
        self._owner_pid = os.getpid()

    def take(self, position: int) -> tuple[Any, Part]:
        """Return the batch at ``position`` and what it consists of.

        Between two calls of `close` each call's position must be the one after the last one's.
        """
        # Fetching in this process seeds its generators; workers have generators of their own.
        with nullcontext() if self._options.num_workers else kept_generators():
            if self._iterator is None:
                self._iterator = self._start(position)
            batch = next(self._iterator)
        return batch, self._asked.popleft()

    def close(self) -> None:
        """The workers have ended, and what they fetched ahead is dropped."""
        iterator, self._iterator = self._iterator, None
        self._asked.clear()
        if iterator is None or self._owner_pid != os.getpid():  # a fork's copy owns no workers
            return
        if self._options.num_workers:
            _end_workers(iterator)

    def __del__(self) -> None:
        if getattr(self, "_iterator", None) is not None:
            self.close()

    def _start(self, position: int) -> Any:
        options = self._options
        only_with_workers: dict[str, Any] = {}
        if options.num_workers:
            main_thread = threading.current_thread() is threading.main_thread()
            only_with_workers = {
                "prefetch_factor": options.prefetch_factor,
                "worker_init_fn": WorkerInit(options.worker_init_fn, main_thread),
                "multiprocessing_context": options.multiprocessing_context,
                "timeout": options.timeout_secs,
            }
        loader: DataLoader[Any] = DataLoader(
            self._fetch,
            batch_size=None,  # the sampler's items are whole parts
            sampler=_Asked(self._stream.parts(position), self._asked),
            num_workers=options.num_workers,
            collate_fn=hand_on,
            pin_memory=options.pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),  # or iter() draws from the global one
            **only_with_workers,
        )
        if not options.num_workers:
            return iter(loader)
        _close_at_exit(self)
        with held_back():
            return iter(loader)


def _end_workers(iterator: Any) -> None:
    workers = list(getattr(iterator, "_workers", ()))
    # torch reports a killed worker as the trainer's error; from here on that is done on purpose.
    if getattr(iterator, "_worker_pids_set", False):
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # noqa: SLF001 - no public way to end workers for good
    # torch waits 10 s for each worker that is stuck in a fetch, and then only sends SIGTERM, which
    # they ignore.
    timer = threading.Timer(_PATIENCE_SECS, _kill, (workers,))
    timer.start()
    try:
        iterator._shutdown_workers()  # noqa: SLF001 - as above; dropping it waits for a collection
    finally:
        timer.cancel()
        timer.join()
        _kill(workers)
        _wait_gone(workers)


def _wait_gone(workers: list[Any]) -> None:
    ends = time.monotonic() + _GONE_SECS
    for worker in workers:
        worker.join(max(0.0, ends - time.monotonic()))
    if left := [worker for worker in workers if worker.is_alive()]:
        for worker in left:
            # Or the exit of this process waits for it.
            process._children.discard(worker)  # type: ignore[attr-defined] # noqa: SLF001
        warnings.warn(
            "dist_ckpt: loader workers are not gone after SIGKILL and are left alone, pids "
            f"{[worker.pid for worker in left]}: look at the disk that they read from.",
            stacklevel=2,
        )


def _kill(workers: list[Any]) -> None:
    # Doesn't wait: the timer's thread must not take the exit status that the other one waits for.
    for worker in workers:
        worker.kill()


class _Asked:
    """An endless sampler that notes each part it hands to the fetching side."""

    def __init__(self, parts: Iterator[Part], asked: deque[Part]) -> None:
        self._parts = parts
        self._asked = asked

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            self._asked.append(part)
            yield part


_with_workers: weakref.WeakSet[BatchSource] = weakref.WeakSet()


def _close_all() -> None:
    for source in list(_with_workers):
        source.close()


def _close_at_exit(source: BatchSource) -> None:
    # multiprocessing's own hook sends SIGTERM to daemons and waits for them: ours ignore it, so
    # they must be gone before. Hooks run last registered first, and torch imported multiprocessing
    # long ago.
    if not _with_workers:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _with_workers.add(source)
