"""Which combinations of pending operations are tried, and the states that are made of them."""

from __future__ import annotations

import itertools
import random

import pytest

from helpers.cut_plans import EXHAUSTIVE, Coverage, Plan, Plans
from helpers.power_cuts import Disk, Search, each_cut
from helpers.recording import Event

NAME = ("lost", "kept")
WRITE = ("lost", "kept", "half", "torn", "zeros")
ROOT, FILE = 1, 2


def _plans(ways: list[tuple[str, ...]], at_most: int, seed: int = 1) -> tuple[list[Plan], Coverage]:
    plans, coverage = Plans(ways, random.Random(seed), at_most), Coverage()
    found = list(plans)
    plans.count_in(coverage)
    assert len(set(found)) == len(found)
    return found, coverage


@pytest.mark.parametrize("ways", [[], [NAME], [WRITE], [NAME] * 5, [WRITE] * 3, [NAME, WRITE] * 2])
def test_every_combination_where_they_are_few(ways: list[tuple[str, ...]]) -> None:
    found, coverage = _plans(ways, 200)
    assert set(found) == set(itertools.product(*ways))
    assert coverage == Coverage(instants=1, small=1, whole=1, small_whole=1)


def test_names_in_every_combination_where_there_are_few_operations() -> None:
    found, coverage = _plans([NAME] * 4 + [WRITE] * 4, 600)
    assert set(found) >= set(itertools.product(NAME, repeat=EXHAUSTIVE))
    assert len(found) <= 602
    assert coverage == Coverage(instants=1, small=1, telling=1)


def _is_telling(plan: Plan) -> bool:
    kept = len(list(itertools.takewhile(lambda way: way == "kept", plan)))
    return set(plan[kept:]) <= {"lost"} or min(len(plan) - plan.count(way) for way in NAME) <= 1


@pytest.mark.parametrize("count", [4, 12])
def test_the_telling_ones_come_first(count: int) -> None:
    ways = [NAME, WRITE] * (count // 2)
    at_most = 80 if count == 4 else 200
    found, coverage = _plans(ways, at_most)
    assert coverage.telling == 1
    told = list(itertools.takewhile(_is_telling, found))
    assert [plan for plan in found if _is_telling(plan)] == told
    for number, way in itertools.product(range(count), WRITE):
        if way in ways[number]:
            for rest in NAME:  # only one, and all but one
                assert tuple(way if k == number else rest for k in range(count)) in told
        assert ("kept",) * number + ("lost",) * (count - number) in told  # each beginning
    assert len(found) > len(told)  # and a sample
    assert found == _plans(ways, at_most)[0]
    assert found != _plans(ways, at_most, seed=2)[0]


def test_a_part_is_counted_as_a_part() -> None:
    found, coverage = _plans([NAME] * 12, 5)
    assert len(found) == 7
    assert coverage == Coverage(instants=1)


def _disk() -> Disk:
    return Disk(ROOT, {ROOT: {"file": FILE}}, {FILE: b""})


def test_a_write_that_was_not_synced_is_lost_kept_half_torn_or_zeros() -> None:
    events = [Event("write", FILE, data=b"abcd")]
    found = {cut.state.files[FILE] for cut in each_cut(_disk(), events, Search(1, 10))}
    assert found == {b"", b"abcd", b"ab", b"ab\0\0", b"\0\0\0\0"}


def test_a_sample_takes_of_each_instant_one_in_turn() -> None:
    events = [Event("write", FILE, offset=4 * k, data=b"abcd") for k in range(12)]
    coverage = Coverage()
    first = list(each_cut(_disk(), events, Search(1, 100, sample=12), coverage=coverage))
    assert sorted(cut.number for cut in first) == list(range(12))
    assert coverage.instants == 12
    whole = list(each_cut(_disk(), events, Search(1, 100, sample=300), coverage=coverage))
    assert len(whole) == len({cut.fingerprint for cut in whole}) == 300
    assert [cut.fingerprint for cut in whole[:12]] == [cut.fingerprint for cut in first]
