"""The arena: reused, grown, and the bytes of one instant."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.canonical import parse_state
from dist_ckpt.layout import STATE_ALIGN, Layout, plan_layout
from dist_ckpt.slices import Role
from dist_ckpt.staging import TAIL_BYTES, RankValues, Staged, Staging, parse_tail, torch_dtype
from dist_ckpt.staging._state_file import StateTail
from dist_ckpt.storage import PAGE_BYTES, Arena
from helpers.generating import SAVE_ID, Part, adam_part, live, stage


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0) - 1}


def layout_of(part: Part) -> Layout:
    return plan_layout([[item.spec for item in part.tensors]])


def stage_in(staging: Staging, layout: Layout, part: Part, *, step: int = 100) -> Staged:
    staged = staging.stage(layout, part.tensors, values_of(part, step=step))
    assert isinstance(staged, Staged)
    return staged


def values_of(part: Part, *, step: int = 100) -> RankValues:
    return RankValues(part.encode, part.shared, 0, step, SAVE_ID)


def tail_of(staged: Staged) -> StateTail:
    state = bytes(staged.state[: staged.state_bytes])
    num_bytes = int.from_bytes(state[-TAIL_BYTES:], "little")
    start = len(state) - TAIL_BYTES - num_bytes
    return parse_tail(state[start:-TAIL_BYTES], limit=start, path="x")


def with_values(value: object) -> Part:
    """A part whose own state has one tensor and one plain value."""

    def encode(put: Callable[[str, Any], Any]) -> Any:
        return {"tensor": put("extra/t", value), "text": "plain"}

    part = adam_part(weights())
    return Part(part.tensors, encode, {"lr": 0.1})


def test_a_single_rank_stages_the_canonical_file() -> None:
    part = adam_part(weights())
    staged = stage(layout_of(part), part, 0, step=31)
    state = parse_state(staged.shard[: staged.shard_bytes], path="x")
    assert (state.step, state.num_params) == (31, 15)
    assert state.weights.tolist() == [*range(12), -1, 0, 1]
    assert state.m.tolist() == [x + 0.25 for x in state.weights]
    assert state.v.tolist() == [x + 0.5 for x in state.weights]
    assert staged.header_bytes == 8


def test_moments_that_do_not_exist_are_zeros_even_where_an_earlier_plan_had_values() -> None:
    staging = Staging()
    full = adam_part(weights())
    stage_in(staging, layout_of(full), full)
    partly = adam_part(weights(), stateless=("w",))
    staged = stage_in(staging, layout_of(partly), partly)
    state = parse_state(staged.shard[: staged.shard_bytes], path="x")
    assert state.m.tolist() == [0.0] * 12 + [-0.75, 0.25, 1.25]
    assert state.weights.tolist() == [*range(12), -1, 0, 1]


def test_the_arena_is_reused_from_save_to_save() -> None:
    part = adam_part(weights())
    layout, staging = layout_of(part), Staging()
    first = stage_in(staging, layout, part)
    size = staging.size_bytes
    address = first.shard.ctypes.data
    for step in (101, 102):
        staged = stage_in(staging, layout, part, step=step)
        assert staged.shard.ctypes.data == address
        assert staging.size_bytes == size


def test_the_arena_grows_when_the_values_outgrow_it() -> None:
    small, large = with_values(torch.ones(3)), with_values(torch.ones(3 << 18))
    layout, staging = layout_of(small), Staging()
    stage_in(staging, layout, small)
    before = staging.size_bytes
    staged = stage_in(staging, layout, large)
    assert staging.size_bytes >= before + (2 << 20)
    (own,) = tail_of(staged).tensors
    found = staged.state[own.byte_range.start : own.byte_range.stop].view("<f4")
    assert (found == 1).all()
    assert found.size == 3 << 18
    state = parse_state(staged.shard[: staged.shard_bytes], path="x")
    assert state.weights.tolist() == [*range(12), -1, 0, 1]


def test_what_is_staged_is_page_aligned_and_padded_to_whole_pages() -> None:
    part = with_values(torch.ones(3))
    staged = stage(layout_of(part), part, 0)
    for buffer, size in (
        (staged.shard, staged.shard_bytes),
        (staged.state, staged.state_bytes),
    ):
        assert buffer.ctypes.data % PAGE_BYTES == 0
        assert buffer.size % PAGE_BYTES == 0
        assert buffer.size - PAGE_BYTES < size <= buffer.size


def test_the_bytes_are_of_the_instant_of_the_call() -> None:
    """Case 32: weights, moments, buffers and values changed right after are the old ones."""
    mine = weights()
    extra, buffer = torch.tensor([5.0, 6.0]), torch.tensor([1, 2])
    part = adam_part(mine, buffers={"n": buffer})

    def encode(put: Callable[[str, Any], Any]) -> Any:
        return [put("extra/e", extra), put("extra/a", np.array([9], np.int16))]

    part = Part(part.tensors, encode, {})
    staged = stage(layout_of(part), part, 0)
    kept = bytes(staged.shard), bytes(staged.state)
    for item in part.tensors:
        item.tensor.zero_()
    extra.zero_()
    assert (bytes(staged.shard), bytes(staged.state)) == kept
    assert parse_state(staged.shard[: staged.shard_bytes], path="x").weights.tolist()[:2] == [0, 1]
    tail = tail_of(staged)
    place = tail.buffers["model/n"].byte_range
    assert staged.state[place.start : place.stop].view("<i8").tolist() == [1, 2]
    first, second = (own.byte_range for own in tail.tensors)
    assert staged.state[first.start : first.stop].view("<f4").tolist() == [5, 6]
    assert staged.state[second.start : second.stop].view("<i2").tolist() == [9]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(10.0)[::2],
        torch.ones(1).expand(4),
    ],
    ids=["transposed", "channels_last", "0-d", "empty", "strided", "expanded"],
)
def test_a_tensor_lies_row_major_whatever_its_strides(tensor: torch.Tensor) -> None:
    part = Part([live("model/t", Role.BUFFER, tensor)])
    staged = stage(layout_of(part), part, 0)
    place = tail_of(staged).buffers["model/t"]
    assert place.shape == tuple(tensor.shape)
    found = staged.state[place.byte_range.start : place.byte_range.stop].view("<f4")
    assert found.tolist() == tensor.reshape(-1).tolist()


def test_gaps_are_zeros_even_where_an_earlier_save_had_values() -> None:
    """The same state gives the same bytes, whatever was saved before."""

    def part(*values: torch.Tensor) -> Part:
        base = adam_part(weights())
        return Part(base.tensors, lambda put: [put(f"x/{i}", v) for i, v in enumerate(values)], {})

    odd = part(torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8))
    full = part(torch.full((500,), 255, dtype=torch.uint8))
    layout, staging = layout_of(odd), Staging()
    fresh = bytes(stage_in(staging, layout, odd).state)
    size = stage_in(staging, layout, odd).state_bytes
    stage_in(staging, layout, full)
    again = bytes(stage_in(staging, layout, odd).state)
    assert again[:size] == fresh[:size]
    first, second = tail_of(stage_in(staging, layout, odd)).tensors
    assert (first.start % STATE_ALIGN, second.start % STATE_ALIGN) == (0, 0)
    assert again[first.byte_range.stop : second.start] == bytes(second.start - first.start - 3)


def test_ranks_that_own_nothing_stage_an_empty_shard() -> None:
    part = Part([live("model/w", Role.WEIGHT, torch.tensor(1.0), "w")])
    layout = plan_layout([[item.spec for item in part.tensors]] * 3)
    sizes = [stage(layout, part, rank).shard_bytes for rank in range(3)]
    assert sorted(sizes) == [0, 0, 4]


def test_what_a_save_says_of_its_optimizer_bytes_covers_all_optimizer_tensors() -> None:
    part = adam_part(weights(), buffers={"n": torch.ones(4)})
    layout = layout_of(part)
    staged = stage(layout, part, 0)
    stops = [owned.stop for owned in layout.ranks[0].state if owned.role is Role.OPTIMIZER]
    starts = [owned.start for owned in layout.ranks[0].state if owned.role is Role.BUFFER]
    assert max(stops) == staged.optimizer_bytes <= min(starts)


def test_adopting_beforehand_makes_the_first_save_find_its_arena() -> None:
    part = adam_part(weights())
    layout, staging = layout_of(part), Staging()
    staging.adopt(layout.ranks[0])
    size = staging.size_bytes
    assert size > 0
    stage_in(staging, layout_of(part), part)
    assert staging.size_bytes == size
    staging.close()
    assert staging.size_bytes == 0


def test_memory_that_cannot_be_had_is_said_once_and_saves_stream_the_same_bytes(
    tmp_path: Path,
) -> None:
    part = adam_part(
        weights(), stateless=("b",), buffers={"n": torch.arange(5), "c": torch.ones(())}
    )

    def encode(put: Callable[[str, Any], Any]) -> Any:
        return [put("a", torch.ones(3, dtype=torch.uint8)), put("b", torch.arange(6.0)[::2])]

    part = Part(part.tensors, encode, {})
    for world_size in (1, 2):
        layout = plan_layout([[item.spec for item in part.tensors]] * world_size)
        said: list[str] = []
        staging = Staging(warn=said.append)
        assert not staging.adopt(layout.ranks[0], values_bytes=1 << 60)
        assert staging.size_bytes == 0
        for rank in range(world_size):
            values = RankValues(part.encode, part.shared, rank, 100, SAVE_ID)
            streamed = staging.stage(layout, part.tensors, values)
            staged = stage(layout, part, rank)
            assert streamed.blocks
            assert not staged.blocks
            assert streamed.num_bytes == staged.num_bytes
            homes = [tmp_path / f"{kind}-{world_size}-{rank}" for kind in ("live", "arena")]
            for home, what in zip(homes, (streamed, staged), strict=True):
                home.mkdir()
                what.wait(0.01)
                what.write(home, rank)
            names = sorted(path.name for path in homes[1].iterdir())
            assert names == [f"rank_{rank:05d}.shard", f"rank_{rank:05d}.state"]
            for name in names:
                assert (homes[0] / name).read_bytes() == (homes[1] / name).read_bytes(), name
        (text,) = said
        assert "block training" in text
        assert "host memory" in text


def test_closing_gives_the_memory_back() -> None:
    arena = Arena(mmap.PAGESIZE)
    arena.close()
    part = adam_part(weights())
    staging = Staging()
    stage_in(staging, layout_of(part), part)
    staging.close()
    staging.close()
    assert staging.size_bytes == 0


def test_only_dtypes_of_the_format_are_known() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    for name in ("load", "float", "qint8", "nonsense"):
        with pytest.raises(KeyError):
            torch_dtype(name)
