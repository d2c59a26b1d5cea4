"""Fetching one part of a batch, seeded sample by sample, in the main process or in a worker.

What a worker is given lies here at module level, so that it can be sent to one that is spawned.
Runs the user's dataset and ``collate_fn``; touches signals of worker processes only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from dist_ckpt.loader._order import Part
from dist_ckpt.seeding import derive_key, mix, seed_generators

__all__ = ["SeededFetch", "WorkerInit", "hand_on", "held_back"]

_PURPOSE_SAMPLE = 1
_PURPOSE_COLLATE = 2
_PR_SET_PDEATHSIG = 1

# torchrun signals whole process groups: what ends or wakes the trainer reaches its workers too, and
# a worker that dies of it takes the last save with it. The trainer alone decides when workers end.
_TRAINERS_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)


class SeededFetch(Dataset[Any]):
    """Maps a `Part` to its collated samples, each fetched with generators seeded for it alone."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed

    def __getitem__(self, part: Part) -> Any:
        """Return ``collate_fn`` of the samples of ``part``; leaves the generators anywhere.

        A sample finds Python's, NumPy's and torch's CPU generators seeded from (seed, epoch,
        index); ``collate_fn`` from (seed, position of the part's first sample). The dataset's own
        ``__getitems__`` isn't used: samples fetched together couldn't be seeded one by one.
        """
        samples = []
        for run in part.runs:
            key = derive_key(self._seed, run.epoch, _PURPOSE_SAMPLE)
            for index in run.indices.tolist():
                seed_generators(mix(key, index))
                samples.append(self.dataset[index])
        seed_generators(derive_key(self._seed, part.start, _PURPOSE_COLLATE))
        return self._collate_fn(samples)


def hand_on(batch: Any) -> Any:
    """Return ``batch``: `SeededFetch` has collated it already."""
    return batch


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back the trainer's signals in this thread, and in processes started in the block.

    A worker is deaf to them before its first instruction; `WorkerInit` then ignores them for good.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Called in each worker before its first sample; the user's own ``worker_init_fn`` comes last.

    Attributes:
        user_fn: The user's function of the worker's number, or None.
        die_with_trainer: Whether the worker ends the instant its trainer does. Linux ties that to
            the *thread* that started the worker, so it is asked for only where this was the main
            thread.
    """

    user_fn: Callable[[int], object] | None
    die_with_trainer: bool

    def __call__(self, worker_id: int) -> None:
        """Make the worker deaf to the trainer's signals, and mortal with the trainer."""
        for number in _TRAINERS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TRAINERS_SIGNALS)
        if self.die_with_trainer:
            _die_with_trainer()
        info = get_worker_info()
        if info is not None:
            # A user's worker_init_fn, or a dataset, that asks for its copy of the dataset means the
            # user's own.
            object.__setattr__(info, "dataset", vars(info.dataset)["dataset"])
        if self.user_fn is not None:
            self.user_fn(worker_id)


def _die_with_trainer() -> None:
    trainer = multiprocessing.parent_process()
    # Under a fork server the parent is that server; torch's own watch (every 5 s) has to do there.
    if trainer is None or sys.platform != "linux" or os.getppid() != trainer.pid:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if not trainer.is_alive():  # it died before the request was made
        os._exit(1)
