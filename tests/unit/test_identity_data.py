"""Recognising data: digests of samples, what must not move, and what is said when it can't be."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from dist_ckpt.identity import _data
from dist_ckpt.identity._data import describe_data
from dist_ckpt.identity._sample import UndigestibleError, sample_digest
from dist_ckpt.loader import ResumableLoader


class Rows(Dataset[Any]):
    def __init__(self, num_samples: int = 100, *, shift: float = 0.0) -> None:
        self.num_samples = num_samples
        self.shift = shift
        self.fetched_by: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        self.fetched_by.append(os.getpid())
        noise = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return {"x": torch.full((3,), index + self.shift), "y": np.int64(index), "noise": noise}


class Feed:
    """Any object with a dataset."""

    def __init__(self, dataset: Any, num_workers: int = 0) -> None:
        self.dataset = dataset
        self.num_workers = num_workers


def told(data: Any, limit_secs: float = 20.0) -> tuple[dict[str, Any] | None, list[str]]:
    notes: list[str] = []
    return describe_data(data, limit_secs, notes), notes


def test_a_dataset_is_told_by_length_and_a_digest_of_sixteen_samples() -> None:
    dataset = Rows()
    found, notes = told(Feed(dataset))
    assert found is not None
    assert not notes
    assert (found["id"], found["length"], found["samples"]) == (None, 100, 16)
    assert found["digest"].startswith("sha256:")
    assert len(dataset.fetched_by) == 32
    assert told(Feed(Rows()))[0] == found


def test_other_data_of_the_same_length_has_another_digest() -> None:
    """Case 47: data swapped under a resume, the same length."""
    found, other = told(Feed(Rows()))[0], told(Feed(Rows(shift=0.5)))[0]
    assert found is not None
    assert other is not None
    assert found["length"] == other["length"]
    assert found["digest"] != other["digest"]


def test_the_digest_does_not_depend_on_what_reads_the_data() -> None:
    feeds = [
        Feed(Rows()),
        DataLoader(Rows(), batch_size=4, shuffle=True),
        DataLoader(Rows(), batch_size=4, num_workers=1),
        ResumableLoader(Rows(), 4),
        ResumableLoader(Rows(), 4, num_workers=2),
        Feed(Subset(Rows(), range(100))),
    ]
    digests = [told(feed) for feed in feeds]
    assert all(notes == [] for _, notes in digests)
    assert len({found["digest"] for found, _ in digests if found}) == 1


def test_looking_moves_neither_the_generators_nor_the_loader() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the global generator is the point
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    batches = ResumableLoader(Rows(), 4)
    told(batches)
    assert (batches.epoch, batches.cursor) == (0, 0)
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_data_of_a_loader_with_workers_is_not_fetched_in_this_process() -> None:
    # A file that is opened at the first fetch would be shared with all workers forked later.
    dataset = Rows()
    found, _ = told(Feed(dataset, num_workers=2))
    assert found is not None
    assert found["digest"]
    assert dataset.fetched_by == []
    assert not multiprocessing.active_children()


def test_a_sample_that_differs_when_fetched_again_leaves_the_length_alone() -> None:
    class Counting(Rows):
        def __getitem__(self, index: int) -> Any:
            self.fetched_by.append(0)
            return len(self.fetched_by)

    found, notes = told(Feed(Counting()))
    assert found == {"id": None, "length": 100, "digest": None, "samples": 0}
    assert "its length alone (100): a sample that was fetched twice differs" in notes[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_slow_data_leaves_the_length_alone_within_the_limit(num_workers: int) -> None:
    class Slow(Rows):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.1)
            return index

    started = time.monotonic()
    found, notes = told(Feed(Slow(), num_workers), limit_secs=0.25)
    assert time.monotonic() - started < 1.5
    assert found == {"id": None, "length": 100, "digest": None, "samples": 0}
    assert "longer than 0.25 s" in notes[0]


def test_a_fetch_that_never_ends_is_killed_where_workers_fetch() -> None:
    class Stuck(Rows):
        def __getitem__(self, index: int) -> Any:
            time.sleep(100)

    started = time.monotonic()
    found, notes = told(Feed(Stuck(), 1), limit_secs=0.2)
    assert time.monotonic() - started < 3
    assert found is not None
    assert found["digest"] is None
    assert "longer than 0.2 s" in notes[0]
    assert not multiprocessing.active_children()


def test_a_fetch_that_not_even_sigkill_ends_is_told_of_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stuck in the kernel: here it just isn't killed."""

    class Stuck(Rows):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60)

    kept: list[Any] = []

    def keep(child: Any) -> None:
        kept.append(child)

    monkeypatch.setattr(_data, "_GONE_SECS", 0.1)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "kill", keep)
    try:
        with pytest.warns(UserWarning, match="not gone after SIGKILL"):
            found, _ = told(Feed(Stuck(), 1), limit_secs=0.1)
        assert found is not None
        assert found["digest"] is None
        assert not multiprocessing.active_children(), "or the exit would wait for it"
        assert kept[0].is_alive()
    finally:
        monkeypatch.undo()
        kept[0].kill()
        kept[0].join(20)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_fetch_leaves_the_length_alone_and_says_why(num_workers: int) -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk is away")

    found, notes = told(Feed(Failing(), num_workers))
    assert found is not None
    assert found["digest"] is None
    assert "the disk is away" in notes[0]


def test_a_dying_fetch_leaves_the_length_alone() -> None:
    class Dying(Rows):
        def __getitem__(self, index: int) -> Any:
            os._exit(3)

    found, notes = told(Feed(Dying(), 1))
    assert found is not None
    assert found["length"] == 100
    assert "died" in notes[0]


def test_an_iterable_dataset_is_never_read() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

    class Counted(Endless):
        def __len__(self) -> int:
            return 7

    found, notes = told(Feed(Endless()))
    assert found is None
    assert "Give data_id=" in notes[0]
    found, notes = told(Feed(Counted()))
    assert found is not None
    assert (found["length"], found["digest"]) == (7, None)
    assert "by number" in notes[0]


def test_what_has_no_dataset_is_said() -> None:
    found, notes = told(iter([1, 2]))
    assert found is None
    (note,) = notes
    assert "list_iterator has no dataset of known length. Give data_id=." in note


def test_small_and_empty_datasets_are_told_too() -> None:
    found, notes = told(Feed([1, 2, 3]))
    assert found is not None
    assert found["samples"] == 3
    assert not notes
    found, notes = told(Feed([]))
    assert found == {"id": None, "length": 0, "digest": None, "samples": 0}
    assert "empty" in notes[0]


@dataclass
class Pair:
    left: Any
    right: Any


def test_samples_that_differ_have_different_digests() -> None:
    grid = torch.arange(6.0)
    samples: list[Any] = [
        None, True, 1, 1.0, -0.0, 0.0, 1j, "1", b"1", "", b"", [], {}, set(), [1], [[1]], [1, 1],
        ["ab", "c"], ["a", "bc"], {"a": 1}, {"a": 2}, {"b": 1}, {1}, {1, 2}, Pair(1, 2), Pair(2, 1),
        grid, grid.view(2, 3), grid.double(), grid.bfloat16(), grid.flip(0), grid.numpy(),
        grid.numpy().reshape(3, 2), np.float64(2.0), np.array(2.0), np.array(["a", None], object),
        np.array(["2020"], "datetime64[D]"), torch.tensor(3), torch.zeros(0), float("nan"), 2**70,
    ]  # fmt: skip
    digests = [sample_digest(sample) for sample in samples]
    assert len(set(digests)) == len(samples)
    assert digests == [sample_digest(sample) for sample in samples]


def test_samples_that_mean_the_same_have_the_same_digest() -> None:
    assert sample_digest({"a": 1, "b": 2}) == sample_digest({"b": 2, "a": 1})
    assert sample_digest({3, 1, 2}) == sample_digest(frozenset([1, 2, 3]))
    assert sample_digest((1, 2)) == sample_digest([1, 2])
    grid = torch.arange(6.0).view(2, 3)
    assert sample_digest(grid.t().contiguous().t()) == sample_digest(grid)
    assert sample_digest(np.arange(3, dtype=">i4")) == sample_digest(np.arange(3, dtype="<i4"))


def test_an_image_has_a_digest() -> None:
    images = pytest.importorskip("PIL.Image")
    image, other = images.new("RGB", (4, 2), "red"), images.new("RGB", (2, 4), "red")
    assert sample_digest(image) == sample_digest(image.copy()) != sample_digest(other)


def test_a_value_without_a_digest_is_named() -> None:
    with pytest.raises(UndigestibleError, match=r"builtins\.object"):
        sample_digest([object()])
    with pytest.raises(UndigestibleError, match="layout"):
        sample_digest(torch.eye(2).to_sparse())
    _, notes = told(Feed([object()]))
    assert "holds a builtins.object" in notes[0]
