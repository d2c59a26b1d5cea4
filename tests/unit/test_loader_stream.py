"""What ResumableLoader hands out, and where it goes on: order, parts, epochs, states, draws."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from dist_ckpt.errors import MismatchError, SettingError, UsageError
from dist_ckpt.loader import ResumableLoader, permutation
from dist_ckpt.seeding import seed_generators


class Numbers:
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return index


class Drawing(Numbers):
    """Sample i is i and a draw of each of the three global generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        noise = float(np.random.rand())  # noqa: NPY002 - the global generator is the point
        return index, random.random(), noise, float(torch.rand((), dtype=torch.float64))


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loader(dataset: Any, batch_size: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(dataset, batch_size, collate_fn=as_list, **options)


def take(batches: ResumableLoader, num_batches: int) -> list[Any]:
    """Return the samples of the next ``num_batches`` batches in one list."""
    return [sample for _ in range(num_batches) for sample in next(batches)]


def draws() -> tuple[Any, ...]:
    """Return what the three generators would draw next, which moves them."""
    return random.random(), np.random.rand(4).tolist(), torch.rand(4).tolist()  # noqa: NPY002


def test_the_permutation_rule_never_changes() -> None:
    """A frozen rule: old runs go on in the same order for ever."""
    assert permutation(10, seed=0, epoch=0).tolist() == [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]
    assert permutation(10, seed=0, epoch=1).tolist() == [1, 9, 0, 3, 4, 8, 7, 6, 2, 5]
    assert permutation(10, seed=2**64 - 1, epoch=2**33).tolist() == [7, 2, 9, 4, 1, 3, 6, 5, 0, 8]
    assert permutation(1, seed=3, epoch=3).tolist() == [0]


def test_the_draws_of_a_sample_never_change() -> None:
    """A frozen rule: what the generators draw for (seed 7, epoch 0, sample 0 … 1)."""
    batches = loader(Drawing(2), 2, seed=7, shuffle=False)
    assert next(batches) == [
        (0, 0.5589374873143012, 0.22877409024565898, 0.5266374578735943),
        (1, 0.5127937582028381, 0.09924253061202082, 0.7417216002552924),
    ]


def test_a_permutation_of_ten_million_samples_is_compact_and_complete() -> None:
    order = permutation(10_000_000, seed=1, epoch=0)
    assert order.dtype == np.int32
    assert np.bincount(order, minlength=len(order)).max() == 1
    # Not near the identity, and not the same twice.
    assert abs(np.corrcoef(order[:100_000], np.arange(100_000))[0, 1]) < 0.02
    assert not np.array_equal(order[:1000], permutation(10_000_000, seed=1, epoch=1)[:1000])


def test_every_sample_occurs_once_in_each_epoch_and_epochs_differ() -> None:
    batches = loader(Numbers(10), 5)
    epochs = [take(batches, 2) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == permutation(10, seed=0, epoch=0).tolist()


def test_batches_are_always_full_and_cross_the_end_of_an_epoch() -> None:
    batches = loader(Numbers(7), 4)
    sizes, samples, epochs = [], [], []
    for _ in range(7):
        batch = next(batches)
        sizes.append(len(batch))
        samples += batch
        assert batches.last_indices.tolist() == batch
        epochs += batches.last_epochs.tolist()
    assert sizes == [4] * 7
    assert epochs == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 7
    for epoch in range(4):
        assert sorted(samples[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_a_batch_may_be_larger_than_the_dataset() -> None:
    batches = loader(Numbers(3), 8)
    samples = take(batches, 3)
    assert Counter(samples) == dict.fromkeys(range(3), 8)
    assert (batches.epoch, batches.cursor) == (8, 0)


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert take(loader(Numbers(5), 3, shuffle=False), 3) == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_samples_are_collated_by_torch_unless_told_otherwise() -> None:
    batches = ResumableLoader(Numbers(6), 3, shuffle=False)
    assert torch.equal(next(batches), torch.tensor([0, 1, 2]))


def test_length_is_the_number_of_batches_that_cover_an_epoch() -> None:
    assert [len(ResumableLoader(Numbers(n), 4)) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_a_loop_that_was_left_goes_on_where_it_was() -> None:
    batches, whole = loader(Numbers(9), 2), take(loader(Numbers(9), 2), 5)
    seen = []
    for batch in batches:
        seen += batch
        if len(seen) == 4:
            break
    for batch in batches:
        seen += batch
        if len(seen) == 10:
            break
    assert seen == whole


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ranks_parts_put_together_are_the_batch_at_world_size_one(world_size: int) -> None:
    alone = loader(Drawing(11), 7)
    ranks = [loader(Drawing(11), 7, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(6):
        parts = [next(rank) for rank in ranks]
        assert [sample for part in parts for sample in part] == next(alone)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        states = [rank.state_dict() for rank in ranks]
        assert all(state == alone.state_dict() for state in states)


def test_a_state_of_four_ranks_goes_on_at_two_and_at_four_again() -> None:
    """Case 35: the state is the whole job's, so fewer ranks drop nothing of it."""
    whole = take(loader(Numbers(13), 6), 9)
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world_size in (4, 2, 4):
        ranks = [loader(Numbers(13), 6, rank=r, world_size=world_size) for r in range(world_size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(3):
            seen += [sample for rank in ranks for sample in next(rank)]
        state = ranks[-1].state_dict()
    assert seen == whole


def test_a_batch_size_below_the_world_size_is_refused() -> None:
    with pytest.raises(SettingError, match="batch_size 3 is below the world size 4") as caught:
        ResumableLoader(Numbers(9), 3, rank=0, world_size=4)
    assert caught.value.found == 3


def test_a_resume_inside_a_later_epoch_goes_on_in_the_same_order() -> None:
    """Case 12: cut inside epoch 2; the epoch isn't reset."""
    straight = loader(Numbers(10), 4)
    take(straight, 6)
    assert (straight.epoch, straight.cursor) == (2, 4)
    state = json.loads(json.dumps(straight.state_dict(), allow_nan=False))
    resumed = loader(Numbers(10), 4)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.cursor) == (2, 4)
    assert take(resumed, 12) == take(straight, 12)


def test_what_was_handed_out_before_a_save_is_not_handed_out_again() -> None:
    """Case 13: the consumed rows are exactly once, cut after any number of batches."""
    whole = take(loader(Numbers(12), 3), 8)
    for cut in range(9):
        first = loader(Numbers(12), 3)
        seen = take(first, cut)
        second = loader(Numbers(12), 3)
        second.load_state_dict(first.state_dict())
        assert seen + take(second, 8 - cut) == whole


def test_three_resumes_with_the_same_seed_replay_nothing() -> None:
    """Case 14: a fixed seed, given anew at every resume, doesn't start the order anew."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for _ in range(4):
        batches = loader(Numbers(20), 5, seed=42)
        if state is not None:
            batches.load_state_dict(state)
        seen += take(batches, 1)
        state = batches.state_dict()
    assert sorted(seen) == list(range(20))


def test_a_state_saved_on_the_exact_end_of_an_epoch_neither_repeats_nor_skips() -> None:
    """Case 37: the end of epoch 0 is the start of epoch 1, written in one way and read in both."""
    straight = loader(Numbers(8), 4)
    take(straight, 2)
    state = straight.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 0)
    following = take(straight, 4)
    for epoch, cursor in ((1, 0), (0, 8)):
        resumed = loader(Numbers(8), 4)
        resumed.load_state_dict({**state, "epoch": epoch, "cursor": cursor})
        assert take(resumed, 4) == following


def test_another_batch_size_goes_on_in_the_same_stream() -> None:
    whole = take(loader(Numbers(10), 1), 34)
    batches = loader(Numbers(10), 4)
    seen = take(batches, 4)
    smaller = loader(Numbers(10), 3)
    smaller.load_state_dict(batches.state_dict())
    assert seen + take(smaller, 6) == whole


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 30),
    batch_sizes=st.lists(st.integers(4, 9), min_size=1, max_size=4),
    world_sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    num_batches=st.integers(0, 5),
)
def test_any_sequence_of_resumes_consumes_one_and_the_same_stream(
    num_samples: int, batch_sizes: list[int], world_sizes: list[int], num_batches: int
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for batch_size, world in zip(batch_sizes, world_sizes, strict=False):
        ranks = [loader(Numbers(num_samples), batch_size, rank=r, world_size=world)
                 for r in range(world)]  # fmt: skip
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(num_batches):
            seen += [sample for rank in ranks for sample in next(rank)]
        state = ranks[0].state_dict()
    assert seen == take(loader(Numbers(num_samples), 1), len(seen))


def test_fetching_leaves_the_trainings_generators_as_they_were() -> None:
    """Case 11: a dataset that draws at fetch; the training's own draws don't notice."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is the point
    expected = draws()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    batches = loader(Drawing(6), 3)
    take(batches, 3)
    batches.load_state_dict(batches.state_dict())
    take(batches, 1)
    assert draws() == expected


def test_a_dataset_that_draws_goes_on_bit_equal_whatever_was_drawn_between() -> None:
    """Case 11: the next batch after a resume is bit-equal, its random parts too."""
    straight = loader(Drawing(6), 3, seed=5)
    take(straight, 3)
    state, following = straight.state_dict(), take(straight, 4)
    torch.manual_seed(99)
    resumed = loader(Drawing(6), 3, seed=5)
    resumed.load_state_dict(state)
    assert take(resumed, 4) == following


def test_draws_differ_between_samples_epochs_seeds_and_generators() -> None:
    samples = take(loader(Drawing(20), 4), 10) + take(loader(Drawing(20), 4, seed=1), 10)
    numbers = [number for sample in samples for number in sample[1:]]
    assert len(set(numbers)) == len(numbers) == 240


def test_a_collate_function_that_draws_is_seeded_by_its_place() -> None:
    def drawing(samples: list[int]) -> float:
        return random.random()

    straight = ResumableLoader(Numbers(8), 4, collate_fn=drawing)
    expected = [next(straight) for _ in range(4)]
    assert len(set(expected)) == 4
    resumed = ResumableLoader(Numbers(8), 4, collate_fn=drawing)
    next(resumed)
    resumed.load_state_dict(resumed.state_dict())
    assert [next(resumed) for _ in range(3)] == expected[1:]


def test_another_global_bit_generator_of_numpy_is_seeded_too() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        first, again = loader(Drawing(4), 4, seed=1), loader(Drawing(4), 4, seed=1)
        samples, state = next(first), np.random.get_state(legacy=False)  # noqa: NPY002
        np.random.standard_normal()  # noqa: NPY002 - the second of two is kept for the next call
        assert np.random.get_state(legacy=False)["has_gauss"]  # noqa: NPY002
        state = np.random.get_state(legacy=False)  # noqa: NPY002
        assert next(again) == samples
        assert np.random.get_state(legacy=False) == state  # noqa: NPY002
        seed_generators(5)
        drawn = np.random.standard_normal()  # noqa: NPY002
        seed_generators(5)
        assert np.random.standard_normal() == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_an_error_in_the_dataset_costs_no_sample_and_no_generator_state() -> None:
    class Failing(Numbers):
        broken = True

        def __getitem__(self, index: int) -> int:
            random.random()
            if index == 5 and self.broken:
                raise OSError("the disk is away")
            return index

    dataset = Failing(8)
    batches = loader(dataset, 2, shuffle=False)
    assert take(batches, 2) == [0, 1, 2, 3]
    random.seed(4)
    before = random.getstate()
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            next(batches)
        assert batches.cursor == 4
    assert random.getstate() == before
    dataset.broken = False
    assert take(batches, 2) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_samples": 9}, "num_samples"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"order_rule": 2}, "order_rule"),
    ],
)
def test_a_state_of_another_stream_is_refused_by_name(change: dict[str, Any], key: str) -> None:
    batches = loader(Numbers(8), 2)
    take(batches, 1)
    state = batches.state_dict()
    with pytest.raises(MismatchError, match=f"{key} .* saved, .* now") as caught:
        batches.load_state_dict({**state, **change})
    assert caught.value.different == {key: (change[key], state[key])}
    assert batches.state_dict() == state


@pytest.mark.parametrize(
    "change",
    [{"cursor": -1}, {"cursor": 9}, {"epoch": 1.5}, {"epoch": True}, {"seed": None},
     {"shuffle": 1}, {"batch_size": 0}, {"num_samples": "8"}],
)  # fmt: skip
def test_a_value_that_no_state_can_have_is_refused(change: dict[str, Any]) -> None:
    batches = loader(Numbers(8), 2)
    (key,) = change
    with pytest.raises(MismatchError, match=key):
        batches.load_state_dict({**batches.state_dict(), **change})


def test_a_foreign_state_is_refused_with_its_keys() -> None:
    with pytest.raises(MismatchError, match=r"missing seed, .*unknown _sampler") as caught:
        loader(Numbers(8), 2).load_state_dict({"_sampler": None, "epoch": 0})
    assert caught.value.unexpected == ["_sampler"]
    with pytest.raises(MismatchError, match="a dictionary, not list"):
        loader(Numbers(8), 2).load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": True}, {"batch_size": 2, "seed": -1},
     {"batch_size": 2, "seed": 2**64}, {"batch_size": 2, "num_workers": -1},
     {"batch_size": 2, "rank": 2, "world_size": 2}, {"batch_size": 2, "rank": -1},
     {"batch_size": 2, "timeout_secs": -1.0}, {"batch_size": 2, "timeout_secs": float("inf")}],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ResumableLoader(Numbers(8), **options)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(SettingError, match="0 samples"):
        ResumableLoader(Numbers(0), 2)


def test_a_dataset_without_numbered_samples_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    for dataset in (Endless(), iter([1, 2]), {1, 2}):
        with pytest.raises(UsageError, match="map-style"):
            ResumableLoader(dataset, 2)


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(loader(Numbers(8), 4, shuffle=False)) == [2, 3]
    assert next(loader(Numbers(8), 4, shuffle=False, rank=0, world_size=1)) == [0, 1, 2, 3]
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(SettingError, match="RANK is 'one'"):
        loader(Numbers(8), 4)


GROUP = """
import torch.distributed as dist
from dist_ckpt.loader import ResumableLoader

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
batches = ResumableLoader(range(8), 4, shuffle=False)
print(next(batches).tolist(), flush=True)
dist.destroy_process_group()
"""


def test_rank_and_world_size_come_from_an_initialised_group() -> None:
    # A process of its own: a group changes how this one reports errors.
    root = Path(__file__).parents[2]
    told = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, **told},
    )  # fmt: skip
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
