"""Where each rank's part of a sharded tensor lies, proven by sharding an index tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helpers.ranks import RankContext, run_ranks

SIZES = (1, 2, 3, 5, 7, 8, 13, 16)


def _index_tensor(shape: tuple[int, ...]) -> Any:
    import torch

    return torch.arange(1, 1 + int(torch.tensor(shape).prod()), dtype=torch.float32).reshape(shape)


def _check(tensor: Any, index: Any, held: list[Any]) -> int:
    """The boxes that capture tells are those that the local values name; return how many there are.

    ``held`` counts which elements were found, to see that together they make the tensor.
    """
    from dist_ckpt.capture import parts_of

    parts = parts_of(tensor)
    for box, view in parts:
        where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert view.equal(index[where]), (tensor.shape, tensor.placements, box, view, index[where])
        held.extend(int(number) for number in view.reshape(-1))
    local = tensor.to_local().numel() if tensor.numel() else 0
    assert sum(box.numel for box, _ in parts if tensor.numel()) == local
    return len(parts)


def _distributed(ctx: RankContext) -> dict[str, int]:
    """Shard in every way that torch's own functions shard; every rank checks its part."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import _StridedShard

    world = ctx.world_size
    placed: Any
    plan: Any
    counts = {"boxes": 0, "empty": 0, "several": 0, "cases": 0}

    def see(tensor: Any, index: Any) -> None:
        found = _check(tensor, index, [])
        counts["cases"] += 1
        counts["boxes"] += found
        counts["empty"] += not found
        counts["several"] += found > 1

    flat = init_device_mesh("cpu", (world,))
    for size, dim in itertools.product(SIZES, range(3)):
        shape = tuple(size if d == dim else 2 for d in range(3))
        index = _index_tensor(shape)
        see(distribute_tensor(index, flat, [Shard(dim)], src_data_rank=None), index)
    see(distribute_tensor(_index_tensor((3,)), flat, [Replicate()]), _index_tensor((3,)))
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for size, placed in itertools.product(
            SIZES,
            (
                [Shard(0), Shard(0)],
                [Shard(0), Shard(1)],
                [Shard(1), Shard(0)],
                [Replicate(), Shard(0)],
                [Shard(1), Replicate()],
            ),
        ):
            index = _index_tensor((size, 5))
            see(distribute_tensor(index, grid, placed, src_data_rank=None), index)
        # Strided without a shard behind it: each rank has a part of every stride, several boxes.
        for size in (world * 2, world * 4):
            index = _index_tensor((size, 3))
            strided = [_StridedShard(0, split_factor=2)]
            see(distribute_tensor(index, flat, strided, src_data_rank=None), index)
        for rows, cols in itertools.product((1, 3, 7, 8, 13), (1, 5, 8)):
            for plan in ({"0": ColwiseParallel()}, {"0": RowwiseParallel()}):
                model = nn.Sequential(nn.Linear(cols, rows))
                with torch.no_grad():
                    model[0].get_parameter("weight").copy_(_index_tensor((rows, cols)))
                    model[0].get_parameter("bias").copy_(_index_tensor((rows,)))
                parallelize_module(model, grid["tp"], plan)
                fully_shard(model, mesh=grid["dp"])
                see(model[0].get_parameter("weight"), _index_tensor((rows, cols)))
                see(model[0].get_parameter("bias"), _index_tensor((rows,)))
        for rows in SIZES:
            model = nn.Sequential(nn.Linear(3, rows))
            with torch.no_grad():
                model[0].get_parameter("weight").copy_(_index_tensor((rows, 3)))
            fully_shard(model, mesh=grid)  # HSDP: replicated over the first axis
            see(model[0].get_parameter("weight"), _index_tensor((rows, 3)))
    return counts


@pytest.mark.parametrize("ranks", [3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_boxes_of_a_rank_are_those_that_its_values_name(ranks: int) -> None:
    """Case 34: uneven, empty and strided shards, on one axis of a mesh and on two."""
    results = run_ranks(ranks, _distributed, timeout=100.0)
    assert [r.returncode for r in results] == [0] * ranks, [r.stderr[-2000:] for r in results]
    assert sum(r.value["empty"] for r in results) > 0
    if ranks % 2 == 0:
        assert sum(r.value["several"] for r in results) > 0
