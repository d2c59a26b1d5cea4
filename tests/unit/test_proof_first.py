"""Where two scenarios part, what the cause is, and where to cut: on tracks made by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dist_ckpt.errors import IncompleteError, UsageError
from dist_ckpt.proof._causes import describe_first, explain
from dist_ckpt.proof._cuts import check_cuts, choose_cuts
from dist_ckpt.proof._first import drawn_from, find_first
from dist_ckpt.proof._tracks import Track, read_tracks

UNTIL = 8


def line(step: int) -> dict[str, Any]:
    """Return what a rank saw at the boundary of a step."""
    return {
        "step": step,
        "loss": float(step).hex(),
        "indices": [step, step + 1],
        "data": {"cursor": step % 4, "num_samples": 4},
        "lr": [[(0.5 ** (step // 3)).hex()]],
        "rng": {"torch": f"t{step}", "python": "p"},
        "state": {"model": f"m{step}", "optimizer": f"o{step}", "scheduler": f"s{step}"},
    }


def track(start: int, stop: int, rank: int = 0, world_size: int = 1) -> Track:
    """Return a rank's way from a step to a step."""
    return Track(
        rank,
        world_size,
        start,
        {},
        start={**line(start), "reordered": world_size > 1, "tensors": {"model/w": f"w{start}"}},
        steps={step: line(step) for step in range(start + 1, stop + 1)},
        end={"step": stop, "draws": {"torch": [stop]}, "tensors": {"model/w": f"w{stop}"}},
    )


CONTINUOUS = [track(0, UNTIL)]


def changed(at: int, **changes: Any) -> list[Track]:
    """Return the scenario 3 → 8 with other values at a boundary."""
    found = copy.deepcopy(track(3, UNTIL))
    there: Any = found.at(at)
    for key, value in changes.items():
        there[key] = {**there[key], **value} if isinstance(value, dict) else value
    return [found]


def first_of(found: list[Track], **options: Any) -> Any:
    return find_first(CONTINUOUS, found, opened_at=3, before=[track(0, 3)], **options)


def test_equal_scenarios_have_no_first_difference() -> None:
    assert first_of([track(3, UNTIL)]) is None
    assert first_of([track(3, 6)]) is None


@pytest.mark.parametrize(
    ("at", "changes", "words"),
    [
        (3, {"data": {"cursor": 0}}, "the place in the data before step 4"),
        (3, {"rng": {"torch": "x"}}, "the draws of torch before step 4"),
        (3, {"rng": {"python": "x"}}, "the draws of python before step 4"),
        (3, {"lr": [["0x1.0p+2"]]}, "the learning rate of step 4"),
        (3, {"state": {"model": "x"}}, "the state of model before step 4"),
        (5, {"indices": [0]}, "the inputs of step 5"),
        (5, {"rng": {"torch": "x"}, "loss": "0x0p+0"}, "draws of torch in step 5 (the loss too)"),
        (5, {"rng": {"python": "x"}}, "the draws of python in step 5"),
        (
            5,
            {"loss": "nan", "state": {"model": "x"}},
            "the loss of step 5 (the state of model too)",
        ),
        (5, {"lr": [["0x1.0p+2"]]}, "the learning rate of step 6"),
        (5, {"state": {"scheduler": "x"}}, "the state of scheduler after step 5"),
    ],
)
def test_the_first_difference_is_named_in_the_order_of_cause(
    at: int, changes: dict[str, Any], words: str
) -> None:
    first = first_of(changed(at, **changes))
    assert words in describe_first(first)
    assert first.to_json()["step"] == at
    assert explain(first, changed(at, **changes), [track(0, 3)], opened_at=3)


def test_the_state_of_what_was_left_out_itself_doesnt_count() -> None:
    found = changed(5, state={"scheduler": "x"})
    assert first_of(found, ignore=("scheduler",)) is None
    assert first_of(found, ignore=("sched",)) is not None


def test_generators_that_nobody_draws_from_may_be_unseeded() -> None:
    assert drawn_from(CONTINUOUS) == {"torch"}
    other = copy.deepcopy(track(0, UNTIL))
    for at in range(UNTIL + 1):
        there: Any = other.at(at)
        there["rng"]["python"] = "unseeded"
    assert find_first(CONTINUOUS, [other], opened_at=0) is None


def test_draws_that_differ_only_at_the_very_end_are_found() -> None:
    found = [copy.deepcopy(track(3, UNTIL))]
    found[0].end = {**(found[0].end or {}), "draws": {"torch": [0.5]}}
    assert (
        describe_first(first_of(found)) == "the first difference is in the draws of torch in step 8"
    )


def test_a_difference_on_another_rank_names_it() -> None:
    expected = [track(0, UNTIL, rank, 2) for rank in range(2)]
    found = [copy.deepcopy(track(3, UNTIL, rank, 2)) for rank in range(2)]
    there: Any = found[1].at(5)
    there["loss"] = "0x0p+0"
    first = find_first(expected, found, opened_at=3)
    assert first is not None
    assert describe_first(first).endswith("the loss of step 5 on rank 1")


@pytest.mark.parametrize(
    ("world_size", "step", "is_ddp"), [(3, 4, True), (2, 4, False), (3, 5, False)]
)
def test_ddps_new_buckets_are_named_on_three_ranks_right_after_the_resume_only(
    world_size: int, step: int, is_ddp: bool
) -> None:
    expected = [track(0, UNTIL, rank, world_size) for rank in range(world_size)]
    found = [copy.deepcopy(track(3, UNTIL, rank, world_size)) for rank in range(world_size)]
    for one in found:
        there: Any = one.at(step)
        there["state"]["model"] = "x"
    first = find_first(expected, found, opened_at=3)
    assert first is not None
    cause = explain(first, found, found, opened_at=3)
    assert ("DistributedDataParallel" in cause) is is_ddp


def test_tensors_that_were_changed_before_the_first_step_are_named() -> None:
    found = changed(3, state={"model": "x"})
    found[0].start = {**(found[0].start or {}), "tensors": {"model/w": "other"}}
    cause = explain(first_of(found), found, [track(0, 3)], opened_at=3)
    assert "model (model/w)" in cause


def test_a_scenario_that_didnt_resume_is_named() -> None:
    first = find_first(CONTINUOUS, [track(0, UNTIL)], opened_at=3)
    assert first is not None
    assert describe_first(first) == "the scenario began at step 0, not at step 3"


# ------------------------------------------------------------------------------------------- cuts


def test_cuts_show_every_kind_of_place() -> None:
    # Rates change after 3 and 6, an epoch ends after 4 and 8.
    assert choose_cuts(CONTINUOUS[0], UNTIL) == [3, 4, 6]


def test_a_short_run_has_as_many_cuts_as_fit() -> None:
    assert choose_cuts(track(0, 2), 2) == [1]
    assert choose_cuts(track(0, 3), 3) == [1, 2]


def test_where_nothing_is_known_cuts_lie_apart() -> None:
    plain = copy.deepcopy(track(0, UNTIL))
    for at in range(UNTIL + 1):
        there: Any = plain.at(at)
        there.update(data=None, lr=[["0x1p+0"]])
    assert choose_cuts(plain, UNTIL) == [2, 4, 6]


def test_cuts_of_the_user_are_sorted_and_checked() -> None:
    assert check_cuts([5, 2, 5], UNTIL) == [2, 5]
    assert check_cuts([], UNTIL) == []
    for cut in (0, UNTIL, -1):
        with pytest.raises(UsageError, match=f"--cut {cut} "):
            check_cuts([cut], UNTIL)


# ----------------------------------------------------------------------------------------- reading


def test_a_witness_that_was_cut_off_is_read_up_to_there(tmp_path: Any) -> None:
    (tmp_path / "rank_00000.jsonl").write_text(
        '{"kind": "open", "rank": 0, "world_size": 1, "step": 2, "parts": {}}\n'
        '{"kind": "step", "step": 3}\n{"kind": "st'
    )
    (one,) = read_tracks(tmp_path)
    assert (one.opened_at, one.last_step, one.end) == (2, 3, None)


def test_a_rank_that_told_nothing_is_missed(tmp_path: Any) -> None:
    (tmp_path / "rank_00000.jsonl").write_text(
        '{"kind": "open", "rank": 0, "world_size": 2, "step": 0, "parts": {}}\n'
    )
    with pytest.raises(IncompleteError, match="Rank 1 of 2"):
        read_tracks(tmp_path)
    assert read_tracks(tmp_path / "none") == []
