"""What several ranks hold, put together: no rank's own account needs to be whole."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.capture import (
    Structure,
    frame_of,
    merge_frames,
    merge_structures,
    with_frame,
    with_values,
)
from dist_ckpt.errors import MismatchError


def structure(*names: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> Structure:
    return Structure(tuple((name, dtype, shape) for name in names), (), ())


def shared(groups: list[list[str]], lr: float = 0.1, kind: str = "AdamW", **more: Any) -> Any:
    entry = {
        "kind": kind,
        "groups": [{"params": names, "values": {"lr": lr}} for names in groups],
        "layouts": [["step", "exp_avg"]],
        "homes": {},
        "trees": {},
    }
    return {
        "parts": {"optimizer": kind},
        "optimizers": {"": entry},
        "ties": {},
        "schedulers": {"scheduler": {"kind": "StepLR", "state": {"lr": lr}}},
        "scalers": {},
        **more,
    }


def test_the_structure_of_stages_is_that_of_the_whole_in_whatever_order() -> None:
    stages = merge_structures([structure("a", "c"), structure("b"), structure("c")])
    assert [name for name, _, _ in stages.parameters] == ["a", "c", "b"]
    assert stages.digest() == structure("a", "b", "c").digest()


@pytest.mark.parametrize("other", [{"shape": (3, 2)}, {"dtype": "bfloat16"}])
def test_one_name_for_two_shapes_or_dtypes_is_refused(other: Any) -> None:
    with pytest.raises(MismatchError, match="Rank 1 holds a as") as caught:
        merge_structures([structure("a"), structure("a", **other)])
    assert "names of their own" in caught.value.next_step


def test_groups_of_stages_are_one_group_with_the_values_of_the_first() -> None:
    ranks = [shared([["a"], ["a2"]], 0.1), shared([["b"], []], 0.2)]
    frame = merge_frames([frame_of(item, {}) for item in ranks])
    whole = with_frame(ranks[0], frame)
    assert whole["optimizers"][""]["groups"] == [
        {"params": ["a", "b"], "values": {"lr": 0.1}},
        {"params": ["a2"], "values": {"lr": 0.1}},
    ]
    assert "part_ranks" not in whole
    # A rank that follows rank 1 has its values under everyone's names.
    assert with_values(whole, [ranks[1]])["optimizers"][""]["groups"][0] == {
        "params": ["a", "b"], "values": {"lr": 0.2},
    }  # fmt: skip
    assert with_values(whole, [ranks[1]])["schedulers"]["scheduler"]["state"] == {"lr": 0.2}


def test_orders_of_dims_are_those_of_all_ranks_and_of_none_where_there_are_none() -> None:
    ranks = [shared([["a"]]), shared([["b"]]), shared([["c"]])]
    ranks[1]["optimizers"][""]["orders"] = {"b": {"Q": [1, 0]}}
    ranks[2]["optimizers"][""]["orders"] = {"c": {"Q": [0, 2, 1]}}
    whole = with_frame(ranks[0], merge_frames([frame_of(item, {}) for item in ranks]))
    orders = {"b": {"Q": [1, 0]}, "c": {"Q": [0, 2, 1]}}
    assert whole["optimizers"][""]["orders"] == orders
    assert with_values(whole, [ranks[0]])["optimizers"][""]["orders"] == orders
    plain = with_frame(ranks[0], merge_frames([frame_of(ranks[0], {})]))
    assert "orders" not in plain["optimizers"][""]


def test_what_one_rank_gives_is_unchanged_by_putting_it_together() -> None:
    one = shared([["a", "b"], ["c"]], ties={"optimizer/b/x": "optimizer/a/x"})
    assert with_frame(one, merge_frames([frame_of(one, {"head": "wte"})])) == one
    assert with_values(one, [one]) == one


def test_a_part_that_rank_0_lacks_is_listed_with_the_first_rank_that_has_it() -> None:
    first, second = shared([["a"]]), shared([["b"]])
    second["parts"] = {**second["parts"], "extra_state.b": None}
    second["optimizers"]["late"] = second["optimizers"][""]
    frames = [frame_of(item, {}) for item in (first, second, second)]
    whole = with_frame(first, merge_frames(frames))
    assert whole["part_ranks"] == {"extra_state.b": 1}
    assert whole["parts"] == {"optimizer": "AdamW", "extra_state.b": None}
    assert whole["optimizers"]["late"]["groups"] == [{"params": ["b"], "values": {}}]
    filled = with_values(whole, [first, second])
    assert filled["optimizers"]["late"]["groups"][0]["values"] == {"lr": 0.1}


@pytest.mark.parametrize(
    "other", [shared([["b"]], kind="SGD"), shared([["b"], ["c"]])], ids=["kind", "groups"]
)
def test_optimizers_that_do_not_fit_together_are_refused(other: Any) -> None:
    with pytest.raises(MismatchError, match="Rank 1's optimizer"):
        merge_frames([frame_of(shared([["a"]]), {}), frame_of(other, {})])
