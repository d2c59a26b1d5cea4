"""`ResumableLoader`: batches of a map-style dataset, resumable anywhere. No file I/O.

Part of layer 3. Checks the arguments and counts what was handed out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, default_collate

from dist_ckpt.errors import SettingError, UsageError
from dist_ckpt.loader._fetch import SeededFetch
from dist_ckpt.loader._order import MAX_SAMPLES, Part, Stream
from dist_ckpt.loader._ranks import rank_and_world_size
from dist_ckpt.loader._source import BatchSource, WorkerOptions
from dist_ckpt.loader._state import make_state, read_position
from dist_ckpt.seeding import MAX_SEED

__all__ = ["ResumableLoader"]


class ResumableLoader(Iterator[Any]):
    """An endless iterator of batches over a map-style dataset; its state is a place in a stream.

    In each epoch every sample occurs exactly once. Batches are always full: the epochs'
    permutations follow each other without a gap and are cut every ``batch_size`` samples, so a
    batch may hold the end of one epoch and the start of the next. Order and per-sample randomness
    depend on seed, epoch and sample alone: they are the same at another world size, with another
    number of workers, and after a resume. A dataset that draws from Python's, NumPy's or torch's
    CPU generator finds it seeded for the sample; where the main process fetches (``num_workers=0``)
    the generators are put back afterwards, so fetching never moves the training's own draws.
    ``collate_fn`` finds them seeded from the place of the rank's part in the stream. A generator
    that the dataset owns isn't seeded.

    ``iter(loader)`` is the loader itself: a loop that is left and entered again goes on where it
    was. ``len(loader)`` is the number of batches that cover one epoch, rounded up. An error in the
    dataset isn't a batch: the next call tries the same samples again.

    Not collective. To be used by one thread at a time; workers end with the main thread's process.

    Args:
        dataset: Has ``__getitem__`` of 0 … len - 1, and ``__len__``.
        batch_size: Samples of a batch over all ranks together. Rank r of W gets samples ``r *
            batch_size // W`` to ``(r + 1) * batch_size // W`` of it: parts differ by one sample at
            most.
        seed: 0 … 2**64 - 1; the same on all ranks.
        shuffle: False takes the samples in the dataset's order.
        num_workers: Processes that fetch ahead; 0 fetches in this process.
        collate_fn: Makes a batch of a list of samples; torch's ``default_collate`` if None.
        pin_memory: Copies batches into page-locked memory; does nothing on a machine without CUDA.
        rank: This process's number; by default that of torch.distributed, else of the environment
            (``RANK``), else 0.
        world_size: Likewise (``WORLD_SIZE``), else 1.
        prefetch_factor: Batches that each worker is ahead; 2 if None.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers are started ("fork", "spawn", "forkserver", or a
            context).
        timeout_secs: Longest wait for a batch from the workers; 0 waits for ever.

    Raises:
        SettingError: A setting makes no sense, ``batch_size`` below the world size among them.
        UsageError: The dataset isn't map-style.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        timeout_secs: float = 0.0,
    ) -> None:
        self.dataset = dataset
        self.num_workers = _whole("num_workers", num_workers, 0, 2**16)
        self.multiprocessing_context = multiprocessing_context
        rank, world_size = rank_and_world_size(rank, world_size)
        batch_size = _whole("batch_size", batch_size, 1, MAX_SAMPLES)
        if batch_size < world_size:
            raise SettingError(
                f"batch_size {batch_size} is below the world size {world_size}: some ranks would "
                "get nothing.",
                next_step="batch_size counts the samples of all ranks together; give at least one "
                "for each rank.",
                expected=f">= {world_size}",
                found=batch_size,
            )
        self._stream = Stream(
            num_samples=_count(dataset),
            batch_size=batch_size,
            seed=_whole("seed", seed, 0, MAX_SEED),
            shuffle=bool(shuffle),
            rank=rank,
            world_size=world_size,
        )
        self._source = BatchSource(
            SeededFetch(dataset, collate_fn or default_collate, self._stream.seed),
            self._stream,
            WorkerOptions(
                num_workers=self.num_workers,
                pin_memory=bool(pin_memory),
                prefetch_factor=prefetch_factor,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
                timeout_secs=timeout_secs,
            ),
        )
        self._position = 0
        self._last: Part | None = None

    @property
    def batch_size(self) -> int:
        """Samples of a batch, over all ranks together."""
        return self._stream.batch_size

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._stream.num_samples

    @property
    def seed(self) -> int:
        """What order and randomness derive from."""
        return self._stream.seed

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self._position // self._stream.num_samples

    @property
    def cursor(self) -> int:
        """Samples of `epoch` that were handed out, over all ranks.

        Below the number of samples: at the end of an epoch it is 0, and `epoch` is the next.
        """
        return self._position % self._stream.num_samples

    @property
    def last_indices(self) -> npt.NDArray[np.int64]:
        """Sample numbers of this rank's part of the last batch, in its order; empty before it."""
        runs = self._last.runs if self._last else ()
        return np.concatenate([np.empty(0, np.int64), *(run.indices for run in runs)])

    @property
    def last_epochs(self) -> npt.NDArray[np.int64]:
        """The epoch of each of `last_indices`."""
        runs = self._last.runs if self._last else ()
        filled = (np.full(len(run.indices), run.epoch, np.int64) for run in runs)
        return np.concatenate([np.empty(0, np.int64), *filled])

    def __len__(self) -> int:
        """Number of batches that cover one epoch, rounded up. The iterator itself never ends."""
        return (self._stream.num_samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return this rank's part of the next batch, and count the batch as consumed."""
        try:
            batch, part = self._source.take(self._position)
            self._position += self._stream.batch_size
        except BaseException:
            # The source has gone past what wasn't handed out: the next call starts it at the old
            # place.
            self.close()
            raise
        self._last = part
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what was handed out, as plain JSON values.

        The same on all ranks, whatever was fetched ahead. Keys: ``seed``, ``epoch``, ``cursor``,
        ``num_samples``, ``batch_size``, ``shuffle``, ``order_rule``.
        """
        return make_state(self._stream, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one that follows the saved place; workers start anew there.

        ``batch_size``, number of workers and world size may differ from the saved run's: no sample
        is repeated or left out.

        Raises:
            MismatchError: The state is another loader's, or number of samples, seed or shuffling
                differ. Nothing has changed then.
        """
        position = read_position(self._stream, state)
        self.close()
        self._position = position
        self._last = None

    def close(self) -> None:
        """The workers have ended, what they fetched ahead is dropped. Iterating starts new ones."""
        self._source.close()


def _whole(name: str, value: Any, least: int, most: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not least <= number <= most:
        raise SettingError(
            f"{name} is {value!r}; it must be a whole number from {least} to {most}.",
            next_step=f"Give another {name}.",
            expected=f"{least} … {most}",
            found=str(value),
        )
    return number


def _count(dataset: Any) -> int:
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise UsageError(
            f"ResumableLoader needs a map-style dataset; {type(dataset).__name__} has no length, "
            "or no samples by number.",
            next_step="Give it __len__ and __getitem__, or write an iterator with state_dict() and "
            "load_state_dict().",
        )
    num_samples = len(dataset)
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise SettingError(
            f"The dataset has {num_samples} samples; there must be from 1 to {MAX_SAMPLES}.",
            next_step="Check the path that it was read from.",
            expected=f"1 … {MAX_SAMPLES}",
            found=num_samples,
        )
    return num_samples
