"""What is asked of a policy, and arms whose source is gone. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.errors import CorruptFileError, UnsupportedValueError, UsageError
from dist_ckpt.policy import (
    Configurable,
    HasSources,
    Policy,
    WithoutZombies,
    check_policy,
    check_settings,
    sort_arms,
    tell_zombies,
)


class Arms:
    """The least policy with sources."""

    def __init__(self, *sources: str) -> None:
        self.sources = sources
        self.arms: dict[str, Any] = {name: {"pulls": 0} for name in sources}

    def state_dict(self) -> dict[str, Any]:
        return {"arms": self.arms, "phase": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arms = state["arms"]


class Forgetful(Arms):
    def state_dict(self) -> dict[str, Any]:
        return {"pulls": 1}


class Tunable(Arms):
    def configure(self, settings: Any) -> None:
        self.settings = settings


def test_the_protocols_tell_what_a_policy_offers() -> None:
    plain, tunable = Arms("docs"), Tunable("docs")
    assert isinstance(plain, Policy)
    assert isinstance(plain, HasSources)
    assert not isinstance(plain, Configurable)
    assert isinstance(tunable, Configurable)


def test_a_policy_without_the_two_methods_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedValueError, match=r"without state_dict\(\)") as caught:
        check_policy(object())
    assert caught.value.path == "policy"


def test_a_policy_with_sources_has_to_keep_its_arms_where_they_are_found() -> None:
    check_policy(Arms("docs"))
    with pytest.raises(UnsupportedValueError, match="no mapping under 'arms'") as caught:
        check_policy(Forgetful("docs"))
    assert caught.value.path == "policy/arms"


def test_arms_without_a_source_are_taken_out_and_new_sources_are_named() -> None:
    zombie = {"pulls": 3, "weight": 1.546}
    state = {"arms": {"docs": {"pulls": 5}, "repo-docstrings": zombie}, "phase": 2}
    found = sort_arms(Arms("docs", "names"), state)
    assert found.state == {"arms": {"docs": {"pulls": 5}}, "phase": 2}
    assert found.zombies == {"repo-docstrings": zombie}
    assert found.new == ("names",)
    assert "repo-docstrings" in state["arms"]  # type: ignore[operator]  # what was given stays
    text = tell_zombies(found.zombies)
    assert "repo-docstrings (weight 1.546)" in text


def test_a_policy_that_declares_no_sources_gets_its_state_as_it_is() -> None:
    state = object()
    assert sort_arms(object(), state).state is state


def test_the_state_of_another_kind_of_policy_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="no 'arms'"):
        sort_arms(Arms("docs"), {"weights": [1.0]})


def test_settings_that_nobody_would_heed_are_refused() -> None:
    check_settings(None, None, "x.policy.json")
    check_settings(Tunable("docs"), {"c": 1}, "x.policy.json")
    with pytest.raises(UsageError, match=r"Arms has no configure\(\)"):
        check_settings(Arms("docs"), {"c": 1}, "x.policy.json")
    with pytest.raises(UsageError, match="there is no policy"):
        check_settings(None, {}, "x.policy.json")


def test_a_policy_loaded_from_outside_warns_of_zombies() -> None:
    policy = Arms("docs")
    with pytest.warns(UserWarning, match="repo-docstrings"):
        WithoutZombies(policy).load_state_dict({"arms": {"docs": 1, "repo-docstrings": 2}})
    assert policy.arms == {"docs": 1}
