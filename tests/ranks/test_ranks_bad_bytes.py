"""Every flipped bit and every cut of what the second rank wrote is found by verify and a resume."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import RankContext, run_ranks
from helpers.reliability import record_fault

SECOND = ("rank_00001.shard", "rank_00001.state")


def _make_run(run_dir: Path) -> None:
    """Have two generations of two ranks, and what they hold beside them."""
    from dist_ckpt.generations import GenerationStore
    from helpers.generating import part_of, write_generation
    from helpers.hostile import NEWER, OLDER, Small

    small, held = Small(), {}
    for step in (OLDER, NEWER):
        small.step()
        parts = [part_of(small.captured), part_of(small.captured)]
        write_generation(run_dir, parts, step=step, id_=f"{step:032x}")
        held[step] = small.values()
        for path in GenerationStore(run_dir).path(step).iterdir():
            path.chmod(0o600)
    (run_dir / "held.json").write_text(json.dumps(held))


def _harm(path: Path, number: int, dice: random.Random) -> contextlib.AbstractContextManager[None]:
    from helpers.hostile import cut, flipped

    if number % 4 == 3:
        return cut(path, dice.randrange(path.stat().st_size))
    return flipped(path, dice.randrange(8 * path.stat().st_size))


def body_flips(ctx: RankContext, folder: str, count: int, seed: int) -> int:
    """Have rank 0 harm what rank 1 wrote, and both resume; return how often that was found."""
    import torch.distributed as dist

    from dist_ckpt.comm import connect
    from dist_ckpt.generations import GenerationStore
    from dist_ckpt.resume import restore_newest
    from dist_ckpt.runs import Depth, check_generation
    from helpers.hostile import NEWER, OLDER, Small

    run_dir = Path(folder) / "run"
    if ctx.rank == 0:
        _make_run(run_dir)
    dist.barrier()
    held: dict[str, Any] = json.loads((run_dir / "held.json").read_text())
    store, comm, small = GenerationStore(run_dir), connect(20.0), Small()
    dice, num_found = random.Random(seed), 0

    def resume() -> tuple[int, list[int]]:
        resumed = restore_newest(store, comm, small.captured, admit=lambda _point: None)
        assert resumed is not None
        return resumed.step, [skipped.step for skipped in resumed.skipped]

    for number in range(count):
        name = SECOND[number % 2]
        with contextlib.ExitStack() as harm:
            if ctx.rank == 0:
                harm.enter_context(_harm(store.path(NEWER) / name, number // 2, dice))
                finding = check_generation(store, NEWER, Depth())
                assert finding.faults, f"verify found nothing: {number} in {name}"
                assert all(name in fault.path for fault in finding.faults), finding.faults
            dist.barrier()
            assert resume() == (OLDER, [NEWER]), f"{number} in {name}"
            assert small.values() == held[str(OLDER)]
            dist.barrier()
        num_found += 1
    dist.barrier()
    assert resume() == (NEWER, []), "the harm was undone"
    assert small.values() == held[str(NEWER)]
    comm.close()
    return num_found


def _flip_many(folder: Path, count: int, timeout: float) -> None:
    seed = int(os.environ.get("DIST_CKPT_TEST_SEED", time.time_ns() % 10**9))
    print(f"DIST_CKPT_TEST_SEED={seed}")
    results = run_ranks(2, body_flips, str(folder), count, seed, timeout=timeout)
    assert [result.value for result in results] == [count, count], [r.stderr for r in results]
    what = "a flipped bit or a cut of what the second of two ranks wrote"
    found = "found by verify and by a resume of both, the older point is resumed"
    record_fault("Bad bytes", what, count, found)


def test_bad_bytes_of_the_second_rank_are_found_and_both_resume_the_older_generation(
    tmp_path: Path,
) -> None:
    """Cases 1 and 3."""
    _flip_many(tmp_path, 80, 100.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bad_bytes_of_the_second_rank_are_found_by_the_thousands(tmp_path: Path) -> None:
    _flip_many(tmp_path, 4000, 1700.0)
