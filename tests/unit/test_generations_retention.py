"""Which generations stay: never fewer than one, and only verified ones count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import SettingError
from dist_ckpt.generations import Retention, plan_bins, plan_retention


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_a_setting_that_cannot_be_meant_is_refused(name: str, value: object) -> None:
    """Case 54: a typo would remove everything."""
    settings: dict[str, Any] = {name: value}
    with pytest.raises(SettingError, match=name):
        Retention(**settings)


@pytest.mark.parametrize("value", [-1, 0.5, False, "all"])
def test_keeping_no_bin_can_be_meant_a_negative_number_can_not(value: Any) -> None:
    assert Retention(keep_bins=0).keep_bins == 0
    with pytest.raises(SettingError, match="keep_bins"):
        Retention(keep_bins=value)


def test_the_newest_stay_by_number() -> None:
    """Case 5: 9900 and 10000."""
    kept = plan_retention([10_000, 9_800, 9_900], pinned=(), retention=Retention(keep_last=2))
    assert kept == {9_900: "keep_last", 10_000: "keep_last"}


def test_multiples_and_pins_stay_beside_the_newest_and_each_says_why() -> None:
    kept = plan_retention(
        [100, 150, 200, 250, 300],
        pinned=[150, 9999],
        retention=Retention(keep_last=1, keep_every=100),
    )
    assert kept == {100: "keep_every", 150: "pinned", 200: "keep_every", 300: "keep_last"}


def test_a_pinned_one_counts_among_the_newest() -> None:
    kept = plan_retention([1, 2, 3], pinned=[3], retention=Retention(keep_last=2))
    assert kept == {2: "keep_last", 3: "pinned"}


def test_none_keeps_all() -> None:
    retention = Retention(keep_last=None)
    assert set(plan_retention([1, 2, 3], pinned=(), retention=retention)) == {1, 2, 3}


@given(
    verified=st.sets(st.integers(0, 10**7)),
    pinned=st.sets(st.integers(0, 10**7)),
    keep_last=st.one_of(st.none(), st.integers(1, 5)),
    keep_every=st.one_of(st.none(), st.integers(1, 10**8)),
)
def test_the_newest_verified_one_always_stays_and_nothing_unverified_is_named(
    verified: set[int], pinned: set[int], keep_last: int | None, keep_every: int | None
) -> None:
    """Cases 31 and 54: one usable generation at every instant, whatever the settings."""
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    kept = plan_retention(sorted(verified), pinned=pinned, retention=retention)
    assert set(kept) <= verified
    if verified:
        assert max(verified) in kept
        assert len(kept) >= min(len(verified), keep_last or len(verified))
    assert pinned & verified <= set(kept)


@pytest.mark.parametrize(
    ("keep_bins", "gone"),
    [(None, []), (0, [1, 2, 10]), (1, [1, 2]), (2, [1]), (3, []), (5, [])],
)
def test_bins_of_the_newest_stay_also_where_more_are_wanted_than_there_are(
    keep_bins: int | None, gone: list[int]
) -> None:
    assert plan_bins({10, 1, 2}, retention=Retention(keep_bins=keep_bins)) == gone
