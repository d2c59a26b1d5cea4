"""Plans for many ranks, computed by one process with the pure code that each rank runs. Layer 7.

Nothing is sent or written: what is counted is the processor's time of planning, the bytes that each
rank would be sent, and the bytes of the index. Larger jobs are tried as long as time and memory
allow; the first that don't are named with what they would take if growth goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_ckpt.bench._plan import Case
from dist_ckpt.layout import decode_all, decode_specs, encode_specs, plan_layout
from dist_ckpt.slices import Box, Role, TensorSpec
from dist_ckpt.snapshot_index import encode_index

__all__ = ["measure_scale", "replicated", "sharded"]

_WORLD_SIZES = (1, 8, 64, 512, 4096)
_NUM_TENSORS = 5_000
_ROWS, _COLUMNS = 8_192, 1_024
#: What a tensor of one rank takes as an object, by far the most of it a spec and its boxes.
_SPEC_BYTES = 700
_GROWTH = 8


def measure_scale(case: Case) -> dict[str, Any]:
    """Return one row for each way of holding tensors and each number of ranks that can be tried."""
    num_tensors = _NUM_TENSORS if case.num_bytes >= 1 << 26 else 40
    rows: list[dict[str, Any]] = []
    for kind, make in (("replicated", replicated), ("sharded", sharded)):
        deadline = time.monotonic() + case.secs / 2
        last = 0.0
        for world_size in _WORLD_SIZES:
            row = {"kind": kind, "world_size": world_size, "num_tensors": num_tensors}
            if why := _obstacle(kind, world_size, num_tensors, last, deadline):
                rows.append({**row, "not_tried": why})
                break
            began = time.monotonic()
            rows.append({**row, **_plan(make, world_size, num_tensors)})
            last = time.monotonic() - began
    return {"rows": rows}


def _obstacle(kind: str, world_size: int, num_tensors: int, last: float, deadline: float) -> str:
    if kind == "sharded":
        need = world_size * num_tensors * _SPEC_BYTES * 2
        if need > _free_bytes():
            return f"its objects would take {need / 1e9:.0f} GB here"
    if (secs := last * _GROWTH) > deadline - time.monotonic():
        return f"it would take about {secs:.0f} s here"
    return ""


def _plan(
    make: Callable[[int, int], Sequence[Sequence[TensorSpec]]], world_size: int, num_tensors: int
) -> dict[str, Any]:
    ranks = make(world_size, num_tensors)
    began = time.process_time()
    sent = encode_specs(ranks[-1])
    encoding = time.process_time() - began
    began = time.process_time()
    if ranks[0] is ranks[-1]:
        decode_all([bytes(bytearray(sent)) for _ in ranks])
        decoding = time.process_time() - began
    else:
        decode_specs(sent)
        decoding = (time.process_time() - began) * world_size
    began = time.process_time()
    layout = plan_layout(ranks)
    planning = time.process_time() - began
    began = time.process_time()
    index = encode_index(layout.tensors, {})
    indexing = time.process_time() - began
    shards = [plan.shard_bytes for plan in layout.ranks]
    return {
        "encode_secs": encoding,
        "gather_bytes": len(sent) * world_size,
        "decode_secs": decoding,
        "plan_secs": planning,
        "index_secs": indexing,
        "index_bytes": len(index),
        "num_places": sum(len(tensor.placements) for tensor in layout.tensors),
        "largest_over_mean": max(shards) * world_size / max(sum(shards), 1),
    }


def replicated(world_size: int, num_tensors: int) -> list[list[TensorSpec]]:
    """Return the specs of ranks that all hold everything, as DDP's do."""
    whole = Box.whole((_ROWS, _COLUMNS))
    return [_specs(num_tensors, whole)] * world_size


def sharded(world_size: int, num_tensors: int) -> list[list[TensorSpec]]:
    """Return the specs of ranks that hold rows of each tensor, as FSDP2's do."""
    rows = -(-_ROWS // world_size)
    ranks = []
    for rank in range(world_size):
        start = min(rank * rows, _ROWS)
        box = Box((start, 0), (min(rows, _ROWS - start), _COLUMNS))
        ranks.append(_specs(num_tensors, box))
    return ranks


def _specs(num_tensors: int, box: Box) -> list[TensorSpec]:
    """Return one rank's specs in capture's order: weights, moments, step counts."""
    names = [f"layers.{number}.weight" for number in range(max(num_tensors // 4, 1))]
    shape = (_ROWS, _COLUMNS)
    boxes = (box,) if box.numel else ()
    kinds = (
        ("model/{}", Role.WEIGHT),
        ("optimizer/{}/exp_avg", Role.EXP_AVG),
        ("optimizer/{}/exp_avg_sq", Role.EXP_AVG_SQ),
    )
    specs = [
        TensorSpec(key.format(name), role, "float32", shape, boxes, name)
        for key, role in kinds
        for name in names
    ]
    counts = [
        TensorSpec(f"optimizer/{name}/step", Role.OPTIMIZER, "float32", (), (Box((), ()),), name)
        for name in names
    ]
    return specs + counts


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 33
