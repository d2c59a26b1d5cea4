"""The second copy of a list is made in a few calls, and has the bytes of the first way."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt.layout import plan_layout
from dist_ckpt.slices import Role
from dist_ckpt.staging import RankValues, Staged, Staging
from dist_ckpt.staging._staged import _pieces
from helpers.generating import adam_part, live

VALUES = RankValues(lambda _put: {"rng": {}, "values": {}}, {}, 0, 7, "0" * 32)

sizes = st.lists(st.sampled_from([0, 1, 3, 4, 16, 17, 5_000, 20_000]), min_size=1, max_size=12)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool])


def bytes_of(staged: object) -> tuple[bytes, bytes]:
    assert isinstance(staged, Staged)
    shard = staged.shard[: staged.shard_bytes].tobytes()
    return shard, staged.state[: staged.state_bytes].tobytes()


@settings(deadline=None, max_examples=40)
@given(sizes, st.lists(st.tuples(st.integers(0, 40), dtypes), max_size=8))
def test_bytes_are_the_same_by_either_way_whatever_the_sizes(
    counts: list[int], buffers: list[tuple[int, torch.dtype]]
) -> None:
    part = adam_part({f"w{n}": torch.randn(count) for n, count in enumerate(counts)})
    tensors = [
        *part.tensors,
        *(
            live(f"model/b{n}", Role.BUFFER, torch.randint(0, 2, (count,)).to(dtype))
            for n, (count, dtype) in enumerate(buffers)
        ),
    ]
    layout = plan_layout([[item.spec for item in tensors]])
    staging = Staging()
    staging.stage(layout, tensors, VALUES)
    for item in tensors:
        item.tensor.copy_(item.tensor.flip(0) if item.tensor.dim() else item.tensor + 1)
    known = bytes_of(staging.stage(layout, tensors, VALUES))
    again = bytes_of(staging.stage(layout, tensors, VALUES))
    fresh = bytes_of(Staging().stage(layout, list(tensors), VALUES))
    assert known == again == fresh
    assert staging._known._calls is not None
    staging.close()


def test_one_element_with_any_stride_is_copied() -> None:
    odd = torch.arange(100.0)[::50][1:]
    part = adam_part({"w": torch.randn(3)}, buffers={"odd": odd})
    layout = plan_layout([[item.spec for item in part.tensors]])
    staging = Staging()
    first = bytes_of(staging.stage(layout, part.tensors, VALUES))
    assert odd.view(-1).stride() == (50,)
    assert odd.numpy().tobytes() in first[1]
    assert bytes_of(staging.stage(layout, part.tensors, VALUES)) == first
    assert bytes_of(staging.stage(layout, part.tensors, VALUES)) == first
    assert staging._known._calls is not None
    assert next(iter(_pieces(odd))).tobytes() == odd.numpy().tobytes()
    staging.close()


def test_a_tensor_that_is_no_plain_bytes_is_copied_as_before() -> None:
    weight = torch.randn(6, 4).t()
    part = adam_part({"w": weight})
    layout = plan_layout([[item.spec for item in part.tensors]])
    staging = Staging()
    first = bytes_of(staging.stage(layout, part.tensors, VALUES))
    assert bytes_of(staging.stage(layout, part.tensors, VALUES)) == first
    assert not staging._known.is_possible
    staging.close()
