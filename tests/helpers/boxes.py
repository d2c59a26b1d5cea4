"""Generations whose tensors are cut into any boxes, along any dims, on any ranks."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dist_ckpt.layout import Layout, Owned, RankLayout, plan_layout
from dist_ckpt.resume_point import ResumePoint, shard_name, state_name
from dist_ckpt.slices import Box, ByteRange, Placement, Role, TensorSpec, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor
from helpers.generating import Part, write_generation

Cuts = Mapping[str, Sequence[tuple[int, Box]]]


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """Give a directory in memory where there is one, for many small runs; it goes at the end."""
    memory = "/dev/shm"  # noqa: S108 - the directory below it is the user's alone
    home = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def cut_at_random(box: Box, source: random.Random, *, depth: int = 3) -> Iterator[Box]:
    """Yield boxes that fill ``box``, each element once, halved along dims taken by chance."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not depth or not dims or source.random() < 0.2:
        yield box
        return
    dim = source.choice(dims)
    at = source.randrange(1, box.sizes[dim])
    for start, stop in ((0, at), (at, box.sizes[dim])):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        yield from cut_at_random(Box(tuple(offsets), tuple(sizes)), source, depth=depth - 1)


def columns(box: Box, num_ranks: int) -> list[tuple[int, Box]]:
    """Return a box cut along its last dim, columns for each rank, as tensor parallel does."""
    size = box.sizes[-1]
    edges = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    return [
        (
            rank,
            Box(
                (*box.offsets[:-1], box.offsets[-1] + edges[rank]),
                (*box.sizes[:-1], edges[rank + 1] - edges[rank]),
            ),
        )
        for rank in range(num_ranks)
        if edges[rank + 1] > edges[rank]
    ]


def lay_out(specs: Sequence[TensorSpec], cuts: Cuts, num_ranks: int) -> Layout:
    """Return a layout in which each tensor lies as ``cuts`` says, buffers with every rank."""
    shards: list[list[Owned]] = [[] for _ in range(num_ranks)]
    states: list[list[Owned]] = [[] for _ in range(num_ranks)]
    places: dict[str, list[Placement]] = {}
    for spec in specs:
        in_shard = spec.role in (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ)
        whole = Box.whole(spec.shape)
        for rank, box in cuts.get(spec.key, [(rank, whole) for rank in range(num_ranks)]):
            files, name = (shards, shard_name(rank)) if in_shard else (states, state_name(rank))
            align = dtype_size(spec.dtype) if in_shard else 64
            end = files[rank][-1].stop if files[rank] else 0
            owned = Owned(spec.key, spec.role, spec.dtype, box, -(-end // align) * align)
            files[rank].append(owned)
            found = places.setdefault(spec.key, [])
            if spec.role is not Role.BUFFER or not found:
                found.append(Placement(name, box, ByteRange(owned.start, owned.stop)))
    base = plan_layout([specs])
    ranks = tuple(
        RankLayout(
            tuple(shard),
            shard[-1].stop if shard else 0,
            tuple(state),
            state[-1].stop if state else 0,
        )
        for shard, state in zip(shards, states, strict=True)
    )
    index = tuple(
        IndexedTensor(spec.key, spec.dtype, spec.shape, tuple(places[spec.key])) for spec in specs
    )
    return Layout(ranks, index, replace(base.canonical, is_shard=False))


def write_boxed(run_dir: Path, part: Part, num_ranks: int, source: random.Random) -> ResumePoint:
    """Have a generation of replicas whose tensors lie in boxes made by chance."""
    specs = [item.spec for item in part.tensors]
    cuts: dict[str, list[tuple[int, Box]]] = {}
    for spec in specs:
        if spec.role is Role.BUFFER:
            continue
        boxes = list(cut_at_random(Box.whole(spec.shape), source))
        source.shuffle(boxes)
        cuts[spec.key] = [(source.randrange(num_ranks), box) for box in boxes]
    return write_generation(run_dir, [part] * num_ranks, layout=lay_out(specs, cuts, num_ranks))
