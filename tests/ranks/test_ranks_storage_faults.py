"""Two ranks, of which the storage of one fails at one operation: both know, nothing is lost."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.generations import GenerationStore
from helpers import sweeping
from helpers.faulty_ops import FaultyOps, RecordingOps
from helpers.ranks import RankContext, run_ranks
from helpers.reliability import record_fault
from helpers.sweeping import (
    Result,
    Site,
    attempt,
    copy_run,
    judge,
    judge_next,
    judge_rank,
    retried_syncs,
)

SETTINGS: dict[str, Any] = {"timeout_secs": 10.0}


def _record(run: Path) -> tuple[Result, list[Site]]:
    """Return an attempt without faults, and where they could strike this rank."""
    ops = RecordingOps()
    whole = attempt(run, ops, **SETTINGS)
    return whole, sweeping.find_sites(ops.calls, run)


def _plans(sites: list[list[Any]], most: int | None, seed: int) -> list[tuple[int, Site, str]]:
    """Return whose storage fails where, the same plans on each rank."""
    dice = random.Random(seed)
    plans = []
    for rank, own in enumerate(sites):
        mine = [
            (rank, Site(*site), kind)
            for site in own
            for kind in sweeping.KINDS.get(site[0], ("EIO",))
        ]
        plans += mine if most is None else dice.sample(mine, most)
    return plans


def _judge_together(run: Path, result: Result, whole: Result) -> list[str]:
    """Return what is wrong where one rank ended otherwise than the other. Collective.

    The history is rank 0's, and closed last of all: what fails there, with every point saved and
    the other rank through, rank 0 alone can tell, by its error and its status.
    """
    import torch.distributed as dist

    ends: list[Any] = [None, None]
    dist.all_gather_object(ends, (result.error is not None, result.steps, repr(result.error)))
    (failed, steps, _), (other_failed, other_steps, _) = ends
    all_saved = steps == whole.steps and GenerationStore(run).steps()[-1:] == steps[-1:]
    was_closing = failed and not other_failed and all_saved
    if steps == other_steps and (failed == other_failed or was_closing):
        return []
    return [f"the ranks ended in two ways: {ends}"]


def body_sweep(ctx: RankContext, folder: str, most: int | None, seed: int) -> dict[str, Any]:
    """Have the storage of one rank fail, then start again without faults; for each plan."""
    import torch.distributed as dist

    from dist_ckpt.service import _last_save

    _last_save._FIRST_PAUSE_SECS = 0.01
    root = Path(folder)
    sweeping.make_base(root / "base", **SETTINGS)
    dist.barrier()
    if ctx.rank == 0:
        copy_run(root / "base/run", root / "whole")
    dist.barrier()
    whole, own = _record(root / "whole/run")
    (root / f"sites.{ctx.rank}").write_text(json.dumps([list(vars(site).values()) for site in own]))
    dist.barrier()
    sites = [json.loads((root / f"sites.{rank}").read_text()) for rank in range(ctx.world_size)]
    struck = ended = 0
    faults: list[str] = []
    missed: list[str] = []
    for victim, site, kind in _plans(sites, most, seed):
        run = root / "it/run"
        if ctx.rank == 0:
            copy_run(root / "base/run", root / "it")
        dist.barrier()
        mine = [site.fault(run, kind)] if ctx.rank == victim else []
        ops = FaultyOps(*mine)
        result = attempt(run, ops, **SETTINGS)
        dist.barrier()
        wrong = []
        if ctx.rank == 0:
            removal = site.op in {"unlink", "rmdir", "listdir", "lstat", "stat"}
            removal |= site.path == "/checkpoints"
            wrong += judge(run, result, whole, kind, removals_fail=removal)
        else:
            wrong += judge_rank(run, result, whole, kind)
        if ops.struck and site.op in {"fsync", "fdatasync"}:
            wrong += retried_syncs(ops.calls, ops.strikes[0])
        wrong += _judge_together(run, result, whole)
        dist.barrier()
        again = attempt(run, **SETTINGS)
        dist.barrier()
        if ctx.rank == 0:
            wrong += judge_next(run, again, whole)
        elif again.error is not None or again.weights != whole.weights:
            wrong.append(f"the next start ended otherwise: {again.error!r}")
        faults += [f"rank {victim}, {kind} at {site}: {text}" for text in wrong]
        struck += ops.struck
        ended += ops.struck and result.error is not None
        if ctx.rank == victim and not ops.struck:
            missed.append(f"rank {victim}, {kind} at {site}")
        dist.barrier()
    return {"faults": faults, "struck": struck, "ended": ended, "missed": missed}


def _sweep(folder: Path, most: int | None, timeout: float) -> None:
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    results = run_ranks(2, body_sweep, str(folder), most, seed, timeout=timeout)
    assert [result.returncode for result in results] == [0, 0], [r.stderr for r in results]
    faults = [text for result in results for text in result.value["faults"]]
    struck = [result.value["struck"] for result in results]
    missed = [text for result in results for text in result.value["missed"]]
    print(f"{struck} faults struck, {len(missed)} weren't come to: {missed}")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:30]])
    assert len(missed) <= 1 + sum(struck) // 100
    for rank in range(2):
        ended = results[rank].value["ended"]
        what = f"storage of rank {rank} of 2 fails once, at each operation in turn"
        record_fault("Storage", what, struck[rank] - ended, "both ranks train on")
        if ended:
            what = f"storage of rank {rank} of 2 fails once, where training can't go on without it"
            record_fault("Storage", what, ended, "both ranks end with an error that says it")


@pytest.mark.timeout(300)
def test_an_operation_that_fails_on_one_rank_of_two_costs_no_point_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """Cases 4, 29 and 44: a sample of all operations of each rank."""
    _sweep(tmp_path, 3, 250.0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_operation_that_fails_on_one_rank_of_two_costs_no_point_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    _sweep(tmp_path, None, 7000.0)
