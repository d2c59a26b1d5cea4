"""A wanted box out of saved boxes: straight into its place, or rows read along and copied out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume import Reader, _read, _segments
from dist_ckpt.resume._segments import FileSegments, add_place, batches_of
from dist_ckpt.slices import Box, ByteRange, Placement
from helpers.generating import adam_part, write_generation


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """Return a shape and two boxes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))

    def box() -> Box:
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True)]
        return Box(tuple(starts), tuple(sizes))

    return shape, box(), box()


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    sides = zip(box.offsets, box.sizes, strict=True)
    return whole[tuple(slice(start, start + size) for start, size in sides)]


@given(boxes=two_boxes(), limit_bytes=st.integers(1, 200), few=st.sampled_from([1, 16]))
def test_what_two_boxes_share_arrives_and_nothing_else(
    boxes: tuple[tuple[int, ...], Box, Box], limit_bytes: int, few: int
) -> None:
    shape, saved, wanted = boxes
    whole = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    file = part(whole, saved).contiguous().numpy().tobytes()
    target = torch.zeros(wanted.sizes)
    place = Placement("rank_00000.shard", saved, ByteRange(100, 100 + len(file)))
    noted = FileSegments()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segments, "_FEW_RUNS", few)
        scatters = add_place(noted, place, wanted, target, limit_bytes=limit_bytes)
    for segment in noted.segments:
        assert segment.target is not None
        at = segment.offset - 100
        segment.target[:] = file[at : at + segment.length]
    for scatter in scatters:
        at = scatter.start - 100
        raw = bytearray(file[at : at + scatter.num_bytes])
        assert len(raw) == scatter.num_bytes
        scatter.copy_from(torch.frombuffer(raw, dtype=torch.uint8))
    assert not (noted.segments and scatters)
    common = saved.intersect(wanted)
    expected = torch.zeros(shape)
    if common is not None:
        part(expected, common).copy_(part(whole, common))
    assert torch.equal(target, part(expected, wanted))


def test_columns_of_a_saved_whole_are_read_as_rows_and_copied_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    whole = torch.randn(500, 6)
    point = write_generation(tmp_path, [adam_part({"w": whole}), adam_part({"w": whole})])
    reader = Reader(GenerationStore(tmp_path), point)
    column = Box((0, 2), (500, 3))
    target = torch.zeros(500, 6)
    seen: list[int] = []

    def spy(self: Reader, batch: list[_segments.Scatter]) -> None:
        seen.append(len(batch))
        original(self, batch)

    original = Reader._scatter
    monkeypatch.setattr(Reader, "_scatter", spy)
    monkeypatch.setattr(_read, "_BOUNCE_BYTES", 2000)
    monkeypatch.setattr(_read, "parts_of", lambda tensor: [(column, tensor[:, 2:5])])
    reader.into({"model/w": target}, buffers={}, rank=0)
    assert torch.equal(target[:, 2:5], whole[:, 2:5])
    assert not target[:, :2].any()
    assert not target[:, 5:].any()
    assert len(seen) > 1  # in bands that keep to the limit


def test_batches_keep_to_the_limit_where_single_items_do() -> None:
    assert list(batches_of("abcd", [3, 3, 9, 1], 6)) == [["a", "b"], ["c"], ["d"]]
    assert list(batches_of("", [], 6)) == []
