"""Random state of ranks that are new: the same at each resume, no two alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.resume._derive import derive_rng
from dist_ckpt.seeding import kept_generators

SAVED = {"python": [3, [1, 2, 3], None], "torch": {"$bytes": "AAAA"}, "named": {}}


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


def draws(saved: Any, *, step: int = 100, rank: int = 2) -> tuple[float, ...]:
    own: dict[str, Any] = {
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(0),
        "sfc": np.random.Generator(np.random.SFC64(0)),
        "python": random.Random(0),
    }
    derive_rng(saved, step=step, rank=rank, generators=own)
    return (
        random.random(),
        float(np.random.rand()),  # noqa: NPY002 - the global generator is part of the state
        float(torch.rand(1)),
        float(torch.rand(1, generator=own["torch"])),
        float(own["numpy"].random()),
        float(own["sfc"].random()),
        own["python"].random(),
    )


def test_the_same_resume_gives_the_same_draws() -> None:
    assert draws(SAVED) == draws(SAVED)


def test_no_two_generators_draw_the_same() -> None:
    found = draws(SAVED)
    assert len(set(found)) == len(found)


def test_another_rank_step_or_saved_state_gives_other_draws_everywhere() -> None:
    """Case 33 for ranks that are new; case 14: another resume point isn't a replay."""
    base = draws(SAVED)
    for other in (
        draws(SAVED, rank=3),
        draws(SAVED, step=200),
        draws({**SAVED, "python": [3, [1, 2, 4], None]}),
    ):
        assert not set(base) & set(other)


def test_what_ran_before_does_not_matter() -> None:
    first = draws(SAVED)
    random.random()
    torch.rand(7)
    assert draws(SAVED) == first


def test_many_ranks_are_all_distinct() -> None:
    firsts = set()
    for rank in range(200):
        derive_rng(SAVED, step=100, rank=rank, generators={})
        firsts |= {random.random(), float(torch.rand(1, dtype=torch.float64))}
    assert len(firsts) == 400


def test_the_numbers_are_frozen() -> None:
    """Old runs rely on them: a run resumed twice must go on the same both times."""
    found = draws(SAVED)
    assert found[0] == FROZEN_PYTHON
    assert found[4] == FROZEN_NUMPY


FROZEN_PYTHON = 0.6744787846951895
FROZEN_NUMPY = 0.14292570629596224
