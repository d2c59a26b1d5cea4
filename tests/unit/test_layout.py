"""The layout covers every element once, balances bytes, and finds its way back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import MismatchError
from dist_ckpt.layout import (
    Layout,
    decode_all,
    decode_specs,
    encode_specs,
    plan_layout,
    plan_runs,
)
from dist_ckpt.slices import Box, Role, TensorSpec, dtype_size, local_boxes


def adam_specs(
    shapes: dict[str, tuple[int, ...]], *, dtype: str = "float32", with_moments: bool = True
) -> list[TensorSpec]:
    def spec(key: str, role: Role, shape: tuple[int, ...], param: str, kind: str) -> TensorSpec:
        return TensorSpec(key, role, kind, shape, (Box.whole(shape),), param)

    specs = [spec(f"model/{n}", Role.WEIGHT, s, n, dtype) for n, s in shapes.items()]
    if with_moments:
        for role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
            specs += [
                spec(f"optimizer/{n}/{role}", role, s, n, "float32") for n, s in shapes.items()
            ]
        specs += [spec(f"optimizer/{n}/step", Role.OPTIMIZER, (), n, "float32") for n in shapes]
    return specs


SHAPES = {"wte": (50, 8), "w": (8, 8), "b": (8,), "scale": (), "empty": (0, 4)}


def covered(layout: Layout) -> dict[str, np.ndarray]:
    """Count how often each element of each tensor is placed."""
    counts = {tensor.key: np.zeros(tensor.shape, int) for tensor in layout.tensors}
    for tensor in layout.tensors:
        for place in tensor.placements:
            where = tuple(
                slice(o, o + s) for o, s in zip(place.box.offsets, place.box.sizes, strict=True)
            )
            counts[tensor.key][where] += 1
    return counts


shapes_strategy = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


@given(shapes=shapes_strategy, world_size=st.integers(1, 8))
def test_every_element_is_placed_exactly_once_at_any_world_size(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    layout = plan_layout([adam_specs(shapes)] * world_size)
    for key, counts in covered(layout).items():
        assert (counts == 1).all(), key


@given(shapes=shapes_strategy, world_size=st.integers(1, 8))
def test_no_two_boxes_of_a_file_overlap_and_all_are_aligned(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    layout = plan_layout([adam_specs(shapes, dtype="bfloat16")] * world_size)
    for plan in layout.ranks:
        for boxes, end in ((plan.shard, plan.shard_bytes), (plan.state, plan.state_bytes)):
            for before, after in itertools.pairwise(boxes):
                assert before.stop <= after.start
            assert all(box.start % dtype_size(box.dtype) == 0 for box in boxes)
            assert max((box.stop for box in boxes), default=0) <= end


def test_replicas_are_shared_in_equal_bytes_though_one_tensor_is_most_of_the_model() -> None:
    specs = adam_specs({"wte": (1000, 64), "w": (64, 64), "b": (64,)})
    for world_size in (2, 3, 4, 7):
        layout = plan_layout([specs] * world_size)
        sizes = [plan.shard_bytes for plan in layout.ranks]
        assert max(sizes) <= 1.02 * sum(sizes) / world_size


def test_a_single_rank_with_float32_writes_the_canonical_file_itself() -> None:
    layout = plan_layout([adam_specs(SHAPES)])
    n = sum(int(np.prod(shape)) for shape in SHAPES.values())
    (plan,) = layout.ranks
    assert layout.canonical.is_shard
    assert plan.shard_bytes == 8 + 12 * n
    assert [box.role for box in plan.shard[::5]] == [Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ]
    assert plan.shard[0].start == 8
    gaps = [after.start - before.stop for before, after in itertools.pairwise(plan.shard)]
    assert not any(gaps)


def test_parameters_without_moments_are_zeros_in_their_place() -> None:
    specs = [s for s in adam_specs(SHAPES) if s.param != "w" or s.role is Role.WEIGHT]
    layout = plan_layout([specs])
    assert layout.canonical.stateless == ("w",)
    assert layout.canonical.is_shard
    (plan,) = layout.ranks
    assert [z.num_bytes for z in plan.zeros] == [256, 256]
    n = layout.canonical.num_params
    assert plan.shard_bytes == 8 + 12 * n
    # m of "w" lies behind m of "wte".
    assert plan.zeros[0].start == 8 + 4 * n + 4 * 400


def test_a_model_that_never_stepped_still_has_its_canonical_file() -> None:
    layout = plan_layout([adam_specs(SHAPES, with_moments=False)])
    assert layout.canonical.refused is None
    assert layout.canonical.is_shard
    assert set(layout.canonical.stateless) == set(SHAPES)


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        (adam_specs({"w": (2,)}, dtype="float64"), "float64"),
        ([s for s in adam_specs({"w": (2,)}) if s.role is not Role.EXP_AVG_SQ], "no Adam moments"),
        (adam_specs({"w": (2**31,)}), "int32"),
    ],
)
def test_a_state_that_the_canonical_file_cannot_hold_says_why(
    specs: list[TensorSpec], word: str
) -> None:
    canonical = plan_layout([specs]).canonical
    assert canonical.refused is not None
    assert word in canonical.refused
    assert not canonical.is_shard


def test_a_step_that_the_canonical_files_header_cannot_hold_has_none() -> None:
    last = plan_layout([adam_specs(SHAPES)], step=2**31 - 1)
    assert last == plan_layout([adam_specs(SHAPES)])
    beyond = plan_layout([adam_specs(SHAPES)], step=2**31)
    assert beyond.canonical.refused == "steps above 2147483647 don't fit its int32"
    assert not beyond.canonical.is_shard
    assert beyond.ranks[0].shard_bytes == last.ranks[0].shard_bytes - 8


def test_two_ranks_never_write_the_canonical_file_as_a_shard() -> None:
    canonical = plan_layout([adam_specs(SHAPES)] * 2).canonical
    assert canonical.refused is None
    assert not canonical.is_shard


def test_buffers_are_written_by_every_rank_and_the_index_names_rank_0() -> None:
    """Case 33, for buffers: what differs by rank is not deduplicated."""
    buffer = TensorSpec("model/bn.mean", Role.BUFFER, "float32", (4,), (Box.whole((4,)),))
    layout = plan_layout([[*adam_specs(SHAPES), buffer]] * 2)
    for plan in layout.ranks:
        assert [box.key for box in plan.state].count("model/bn.mean") == 1
    (indexed,) = [t for t in layout.tensors if t.key == "model/bn.mean"]
    assert [place.location for place in indexed.placements] == ["rank_00000.state"]


def test_ranks_with_different_shapes_are_refused_by_name() -> None:
    with pytest.raises(MismatchError, match="model/w"):
        plan_layout([adam_specs({"w": (2,)}), adam_specs({"w": (3,)})])


def test_specs_survive_the_way_between_ranks() -> None:
    specs = adam_specs(SHAPES)
    assert decode_specs(encode_specs(specs)) == specs
    told = [encode_specs(specs), encode_specs(specs[:1]), encode_specs(specs)]
    found = decode_all(told)
    assert found == [specs, specs[:1], specs]
    assert found[0] is found[2]


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(
            draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
        )
        return Box(offsets, sizes)

    return shape, box(), box()


@given(boxes=two_boxes())
def test_runs_move_exactly_the_common_elements(boxes: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, source, target = boxes
    values = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)

    def cut(box: Box) -> np.ndarray:
        where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        return np.array(values[where])

    from_flat = cut(source).reshape(-1)
    found = np.zeros(target.numel, int)
    for run in plan_runs(source, target):
        found[run.target : run.target + run.count] += from_flat[run.source : run.source + run.count]
    expected = cut(target).reshape(-1)
    inside = np.isin(expected, from_flat)
    assert (found == np.where(inside, expected, 0)).all()


def test_whole_boxes_move_in_one_run() -> None:
    box = Box.whole((4, 5, 6))
    assert len(plan_runs(box, box)) == 1
    assert len(plan_runs(Box((2, 0, 0), (2, 5, 6)), box)) == 1


# Sharded tensors


def sharded(specs: list[TensorSpec], boxes: dict[str, tuple[Box, ...]]) -> list[TensorSpec]:
    """Return the specs as a rank sees them that holds only these boxes of each parameter."""
    shapes = {spec.param: spec.shape for spec in specs if spec.role is Role.WEIGHT}
    return [
        replace(spec, boxes=boxes[spec.param]) if spec.shape == shapes[spec.param] else spec
        for spec in specs
        if spec.param is not None
    ]


def rows(shape: tuple[int, ...], first: int, last: int) -> tuple[Box, ...]:
    return (Box((first, 0), (last - first, shape[1])),) if last > first else ()


def test_a_rank_writes_what_it_alone_holds_and_moments_follow_their_weight() -> None:
    specs = adam_specs({"w": (7, 3), "v": (1, 3)})
    ranks = [
        sharded(specs, {"w": rows((7, 3), low, high), "v": rows((1, 3), min(low, 1), min(high, 1))})
        for low, high in ((0, 4), (4, 7), (7, 7))
    ]
    layout = plan_layout(ranks)
    assert all((counts == 1).all() for counts in covered(layout).values())
    for plan, specs_of_rank in zip(layout.ranks, ranks, strict=True):
        held = {spec.key: spec.boxes for spec in specs_of_rank}
        assert all((owned.box,) == held[owned.key] for owned in plan.shard)
    keys = [[owned.key.rpartition("/")[2] for owned in plan.shard] for plan in layout.ranks]
    assert keys == [
        ["w", "v", "exp_avg", "exp_avg", "exp_avg_sq", "exp_avg_sq"],
        ["w", "exp_avg", "exp_avg_sq"],
        [],
    ]
    # What isn't of the parameter's shape lies with the parameter's beginning.
    assert [owned.key for owned in layout.ranks[0].state] == [
        "optimizer/w/step",
        "optimizer/v/step",
    ]


def test_replicas_make_up_for_what_ranks_hold_alone() -> None:
    """Weights on all ranks, moments on one each, as ZeroRedundancyOptimizer has them."""
    specs = adam_specs({"a": (60, 4), "b": (20, 4), "c": (20, 4)})
    owners = {"a": 0, "b": 1, "c": 2}
    ranks = [
        [spec for spec in specs if spec.role is Role.WEIGHT or owners[spec.param or ""] == rank]
        for rank in range(3)
    ]
    layout = plan_layout(ranks)
    assert all((counts == 1).all() for counts in covered(layout).values())
    moments = [sum(o.num_bytes for o in p.shard if o.role is not Role.WEIGHT) for p in layout.ranks]
    assert moments == [1920, 640, 640]
    # 1600 bytes of weights: all go to the two that have less, and come out level.
    assert [plan.shard_bytes for plan in layout.ranks] == [1920, 1440, 1440]
    firsts = [spec.key for spec in layout.tensors if spec.key.endswith("/exp_avg")]
    assert firsts == ["optimizer/a/exp_avg", "optimizer/b/exp_avg", "optimizer/c/exp_avg"]


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    copies=st.integers(1, 3),
)
def test_every_grid_of_boxes_and_copies_is_written_once(
    sizes: tuple[int, int], grid: tuple[int, int], copies: int
) -> None:
    specs = adam_specs({"w": sizes})
    cuts = [
        [(i * -(-n // k), min((i + 1) * -(-n // k), n)) for i in range(k)]
        for n, k in zip(sizes, grid, strict=True)
    ]
    ranks = []
    for (top, bottom), (left, right) in itertools.product(*cuts):
        box = Box((top, left), (bottom - top, right - left))
        held = (box,) if bottom > top and right > left else ()
        ranks += [sharded(specs, {"w": held})] * copies
    layout = plan_layout(ranks)
    assert all((counts == 1).all() for counts in covered(layout).values())
    if copies == 1:
        return
    # Copies of one box share it: no rank writes more than its share and one row.
    for start in range(0, len(ranks), copies):
        mine = [plan.shard_bytes for plan in layout.ranks[start : start + copies]]
        assert max(mine) - min(mine) <= 2 * 3 * 4 * sizes[1]


def test_boxes_that_leave_a_gap_are_refused_by_name() -> None:
    specs = adam_specs({"w": (8, 3)}, with_moments=False)
    ranks = [sharded(specs, {"w": rows((8, 3), *part)}) for part in ((0, 4), (4, 7))]
    with pytest.raises(MismatchError, match=r"hold 21 of 24 elements of model/w"):
        plan_layout(ranks)


def test_other_parameters_on_other_ranks_need_an_order_for_the_canonical_file() -> None:
    first, second = adam_specs({"a": (2, 2), "c": (3,)}), adam_specs({"b": (2, 3)})
    canonical = plan_layout([first, second]).canonical
    assert canonical.refused is not None
    assert "order=" in canonical.refused
    layout = plan_layout([first, second], ["a", "b", "c", "unknown"])
    assert layout.canonical.refused is None
    assert layout.canonical.names == ("a", "b", "c")
    weights = [t.key for t in layout.tensors if t.key.startswith("model/")]
    assert weights == ["model/a", "model/b", "model/c"]
    with pytest.raises(MismatchError, match=r"order= lacks 1 of 3 parameters: b"):
        plan_layout([first, second], ["a", "c"])


def test_several_boxes_of_a_rank_lie_side_by_side_in_its_local_tensor() -> None:
    boxes = [
        Box((r, c), (h, w))
        for (r, h), (c, w) in itertools.product([(0, 2), (4, 1)], [(1, 3), (7, 2)])
    ]
    assert local_boxes(boxes) == [
        Box((0, 0), (2, 3)), Box((0, 3), (2, 2)), Box((2, 0), (1, 3)), Box((2, 3), (1, 2)),
    ]  # fmt: skip
    assert local_boxes([]) == []
    assert local_boxes([Box((), ())]) == [Box((), ())]
