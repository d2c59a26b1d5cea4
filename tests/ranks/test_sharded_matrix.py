"""Every way to divide a model among ranks, saved on one number of them and restored on another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.generations import GenerationStore
from helpers.ranks import RankContext, run_ranks
from helpers.sharding import KINDS, Divided, canonical

SEED, OTHER = 5, 6


def _run(root: str, ranks: int, kind: str) -> Path:
    return Path(root) / f"{kind}-{ranks}"


def _save_all(ctx: RankContext, root: str, kinds: Sequence[str]) -> None:
    for kind in kinds:
        job = Divided(kind, SEED)
        job.fill()
        with dist_ckpt.Checkpointer(
            _run(root, ctx.world_size, kind), model=job.model, optimizer=job.optimizers
        ) as ckpt:
            for _ in ckpt.steps(until=1):
                pass


def _restore_all(ctx: RankContext, root: str, pairs: Sequence[tuple[int, str, str]]) -> int:
    """Restore each saved run into each way; what torch itself would have put there is there."""
    from dist_ckpt.capture import Captured
    from dist_ckpt.comm import connect
    from dist_ckpt.identity._describe import describe_structure
    from dist_ckpt.resume import restore_newest
    from dist_ckpt.service._whole import look_around

    comm = connect(60.0)
    expected: dict[str, Any] = {}
    for ranks, saved, kind in pairs:
        told = f"{saved} on {ranks} → {kind} on {ctx.world_size}"
        if kind not in expected:
            reference = Divided(kind, SEED)
            reference.fill()
            expected[kind] = reference.held()
        job = Divided(kind, OTHER)
        if ranks % 2:
            job.fill()  # state of this rank's own is filled in place, too
        for optimizer in job.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = 7.0
        captured = Captured(job.model, job.optimizers)
        store = GenerationStore(_run(root, ranks, saved))
        structure = describe_structure(look_around(comm, captured).structure.to_json())

        def admit(point: Any, found: Any = structure) -> None:
            assert point.identity["structure"] == found

        resumed = restore_newest(store, comm, captured, admit=admit)
        assert resumed is not None
        found = job.held()
        assert found.keys() == expected[kind].keys(), told
        differing = [name for name in found if found[name] != expected[kind][name]]
        assert not differing, (told, differing)
        assert job.net.head.weight is job.net.embed.weight, told
        owner = ctx.rank if ranks == ctx.world_size else 0
        assert job.net.seen.tolist() == [SEED + owner] * 7, told
        assert int(job.net.count) == 100 * SEED + owner, told
        assert job.lrs() == [0.5, 0.25, 0.125], told
    comm.close()
    return len(pairs)


def _both(ctx: RankContext, root: str, kinds: Sequence[str], pairs: Any) -> int:
    _save_all(ctx, root, kinds)
    return _restore_all(ctx, root, pairs)


def _start(ranks: int, root: Path, kinds: Sequence[str], pairs: Any, timeout: float) -> None:
    results = run_ranks(ranks, _both, str(root), list(kinds), list(pairs), timeout=timeout)
    told = [result.stderr[-3000:] for result in results if result.returncode]
    assert not told, told[0]
    assert [result.value for result in results] == [len(pairs)] * ranks


def _check_bins(root: Path) -> int:
    """Every run's .bin is that of the undivided model."""
    expected = canonical(SEED)
    runs = sorted(path for path in root.iterdir() if path.is_dir())
    for run in runs:
        found = dist_ckpt.read_bin(run / "step_000001.bin")
        for name, tensor in expected.items():
            assert torch.equal(torch.from_numpy(getattr(found, name).copy()), tensor), (run, name)
    return len(runs)


def _pairs(sizes: Sequence[int], kinds: Sequence[str] = KINDS) -> list[tuple[int, str, str]]:
    return list(itertools.product(sizes, kinds, KINDS))


@pytest.mark.timeout(240)
def test_every_sharding_restores_into_every_other_on_two_ranks_four_and_one(
    tmp_path: Path,
) -> None:
    """Cases 34, 38, 48: weights, moments and buffers bit-equal; dims of 7 and 1, empty shards."""
    _start(4, tmp_path, KINDS, [], 100.0)
    _start(2, tmp_path, KINDS, _pairs([4]), 100.0)
    _start(4, tmp_path, [], _pairs([2, 4], ("fsdp_tp", "zero", "hsdp")), 100.0)
    _start(1, tmp_path, [], [(4, kind, "ddp") for kind in KINDS], 100.0)
    assert _check_bins(tmp_path) == 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_sharding_on_every_number_of_ranks_restores_into_every_other(tmp_path: Path) -> None:
    """Cases 34, 38, 48: {1, 2, 3, 4, 8} ranks, six ways, each into each."""
    sizes = (1, 2, 3, 4, 8)
    for ranks in sizes:
        _start(ranks, tmp_path, KINDS, [], 300.0)
    assert _check_bins(tmp_path) == len(sizes) * len(KINDS)
    for ranks in sizes:
        _start(ranks, tmp_path, [], _pairs(sizes), 600.0)
