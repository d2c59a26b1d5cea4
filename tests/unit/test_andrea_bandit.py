"""The example's bandit: its formula, its bounds, its phases, its state. And the mixture of data."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from andrea import Bandit, Mixture, Phase, Settings
from dist_ckpt import ResumableLoader
from dist_ckpt.policy import Configurable, HasSources, Policy, check_policy

REWARDS = {"docs": 2.0, "docstrings": 1.0, "code": 0.5}


def _turn(bandit: Bandit, times: int, rewards: dict[str, float] = REWARDS) -> Counter[str]:
    pulled: Counter[str] = Counter()
    for _ in range(times):
        source = bandit.pull()
        pulled[source] += 1
        bandit.reward(source, rewards[source])
    return pulled


def test_it_is_what_the_library_asks_of_a_policy() -> None:
    bandit = Bandit(REWARDS)
    assert isinstance(bandit, Policy)
    assert isinstance(bandit, HasSources)
    assert isinstance(bandit, Configurable)
    check_policy(bandit)


def test_each_source_is_pulled_once_before_any_is_pulled_twice() -> None:
    bandit = Bandit(REWARDS)
    assert [bandit.pull() for _ in range(3)] == list(REWARDS)


def test_a_weight_is_the_mean_and_a_bonus_for_what_was_rarely_pulled() -> None:
    bandit = Bandit(REWARDS, Settings(c=0.5))
    _turn(bandit, 50)
    pulls = {name: arm.pulls for name, arm in bandit.arms.items()}
    bandit.pull()
    for name, arm in bandit.arms.items():
        expected = REWARDS[name] + 0.5 * math.sqrt(math.log(50) / pulls[name])
        assert arm.weight == pytest.approx(expected, abs=1e-12)


def test_turns_are_in_proportion_to_the_weights() -> None:
    bandit = Bandit(REWARDS, Settings(c=0.0))
    pulled = _turn(bandit, 3 + 3500)
    assert pulled["docs"] == pytest.approx(2001, abs=2)
    assert pulled["docstrings"] == pytest.approx(1001, abs=2)


def test_floors_and_ceilings_bound_the_final_weight_and_a_ceiling_of_0_turns_a_source_off() -> None:
    settings = Settings(c=0.5, floors={"code": 3.0}, ceilings={"docs": 0.75, "docstrings": 0.0})
    bandit = Bandit(REWARDS, settings)
    pulled = _turn(bandit, 200)
    assert bandit.arms["code"].weight == 3.0
    assert bandit.arms["docs"].weight == 0.75
    assert set(pulled) == {"docs", "code"}
    assert pulled["code"] == pytest.approx(160, abs=2)
    with pytest.raises(ValueError, match="turned off"):
        Bandit(["a"], Settings(ceilings={"a": 0.0})).pull()


def test_rewards_are_a_moving_average_and_what_isnt_finite_is_none() -> None:
    bandit = Bandit(["a"], Settings(decay=0.75))
    for value in (4.0, 8.0, float("nan"), float("inf")):
        bandit.reward("a", value)
    assert bandit.arms["a"].reward == 5.0


def test_phases_come_one_after_the_other_with_their_own_settings() -> None:
    phases = (Phase("warm-up", pulls=6, ceilings={"code": 0.0}), Phase("main"))
    bandit = Bandit(REWARDS, Settings(phases=phases))
    assert "code" not in _turn(bandit, 6)
    assert bandit.state_dict()["phase"] == {"number": 1, "name": "main", "pulls": 0}
    assert "code" in _turn(bandit, 6)


def test_it_goes_on_from_its_state_as_if_nothing_had_happened() -> None:
    whole, cut = Bandit(REWARDS), Bandit(REWARDS)
    _turn(whole, 37)
    _turn(cut, 20)
    resumed = Bandit(REWARDS)
    resumed.load_state_dict(cut.state_dict())
    _turn(resumed, 17)
    assert resumed.state_dict() == whole.state_dict()


def test_it_takes_the_settings_of_a_file_and_refuses_what_it_doesnt_know() -> None:
    bandit = Bandit(REWARDS)
    settings: dict[str, Any] = {
        "c": 1.5,
        "floors": {"docs": 0.5},
        "phases": [{"name": "polish", "pulls": 10, "c": 0.0}, {"name": "main"}],
    }
    bandit.configure(settings)
    assert bandit.settings.phases[0].c == 0.0
    with pytest.raises(ValueError, match="unknown settings flors"):
        bandit.configure({"flors": {}})
    with pytest.raises(ValueError, match="between 0 and its ceiling"):
        bandit.configure({"floors": {"docs": 2.0}, "ceilings": {"docs": 1.0}})
    with pytest.warns(UserWarning, match="repo-docstrings: no such source"):
        bandit.configure({"floors": {"repo-docstrings": 1.0}})


def _mixture(*names: str) -> Mixture:
    return Mixture(
        {name: ResumableLoader(np.arange(10) + 100 * len(name), batch_size=4) for name in names}
    )


def test_the_mixture_goes_on_in_each_source_and_new_ones_begin() -> None:
    whole, cut = _mixture("docs", "code2"), _mixture("docs", "code2")
    order = ["docs", "docs", "code2", "docs", "code2", "code2", "docs"]
    expected = [whole.take(name).tolist() for name in order]
    found = [cut.take(name).tolist() for name in order[:3]]
    resumed = _mixture("docs", "code2")
    resumed.load_state_dict(cut.state_dict())
    found += [resumed.take(name).tolist() for name in order[3:]]
    assert found == expected
    assert resumed.last_indices.tolist() == whole.last_indices.tolist()

    changed = _mixture("code2", "names1")
    changed.load_state_dict(cut.state_dict())
    assert changed.take("code2").tolist() == expected[4]
    assert len(changed.last_indices) == 4
    assert changed.take("names1").tolist() == _mixture("names1").take("names1").tolist()
