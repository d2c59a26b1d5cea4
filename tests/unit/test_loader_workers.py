"""ResumableLoader with workers: the same stream, and workers that live as long as the trainer."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from dist_ckpt.loader import ResumableLoader, _source

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Drawing:
    """Sample i is i and a draw of each of the three global generators."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        noise = float(np.random.rand())  # noqa: NPY002 - the global generator is the point
        return index, random.random(), noise, float(torch.rand((), dtype=torch.float64))


class WhoFetches(Drawing):
    """Sample i is the process that fetches it."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loader(dataset: Any, batch_size: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(dataset, batch_size, collate_fn=as_list, **options)


def take(batches: ResumableLoader, num_batches: int) -> list[Any]:
    return [sample for _ in range(num_batches) for sample in next(batches)]


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def test_the_stream_is_the_same_for_any_number_of_workers() -> None:
    """Case 36: 0 to 3 workers, draws included; the multiset of each epoch is exact."""
    streams = []
    for num_workers in range(4):
        batches = loader(Drawing(11), 4, seed=3, num_workers=num_workers)
        streams.append(take(batches, 11))
        batches.close()
    assert streams[1:] == streams[:1] * 3
    for epoch in range(4):
        indices = [sample[0] for sample in streams[0][11 * epoch : 11 * epoch + 11]]
        assert sorted(indices) == list(range(11))


def test_the_number_of_workers_may_change_at_every_resume() -> None:
    """Case 36: 1 → 2 → 0 → 3 workers lose no sample and repeat none."""
    whole = take(loader(Drawing(11), 4), 12)
    seen: list[Any] = []
    state: dict[str, Any] | None = None
    for num_workers in (1, 2, 0, 3):
        batches = loader(Drawing(11), 4, num_workers=num_workers)
        if state is not None:
            batches.load_state_dict(state)
        seen += take(batches, 3)
        state = batches.state_dict()
        batches.close()
    assert seen == whole


def test_what_workers_fetched_ahead_does_not_count() -> None:
    """Case 13: the state counts what was handed out, though the workers are batches ahead."""
    batches = loader(Drawing(100), 2, num_workers=2, prefetch_factor=4)
    take(batches, 3)
    assert (batches.epoch, batches.cursor) == (0, 6)
    assert batches.state_dict() == {
        "seed": 0, "epoch": 0, "cursor": 6, "num_samples": 100, "batch_size": 2,
        "shuffle": True, "order_rule": 1,
    }  # fmt: skip
    following = take(batches, 2)
    batches.close()
    resumed = loader(Drawing(100), 2)
    resumed.load_state_dict({**batches.state_dict(), "cursor": 6})
    assert take(resumed, 2) == following


def test_a_state_loaded_under_way_restarts_the_workers_there() -> None:
    batches = loader(Drawing(10), 2, num_workers=2)
    state = batches.state_dict()
    first = take(batches, 3)
    batches.load_state_dict(state)
    assert take(batches, 3) == first
    assert [sample[0] for sample in first[-2:]] == batches.last_indices.tolist()
    batches.close()


def test_starting_workers_and_fetching_leave_the_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - the global generator is the point
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    batches = loader(Drawing(10), 2, num_workers=1)
    take(batches, 2)
    batches.close()
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_workers_are_gone_after_close_and_start_again_on_the_next_call() -> None:
    whole = take(loader(Drawing(10), 2), 4)
    before = children()
    batches = loader(Drawing(10), 2, num_workers=2)
    seen = take(batches, 2)
    assert len(children() - before) == 2
    batches.close()
    batches.close()
    assert children() == before
    seen += take(batches, 2)
    assert seen == whole
    del batches
    assert children() == before


def test_an_error_in_a_worker_costs_no_sample(tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    class Failing(Drawing):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not mended.exists():
                raise OSError("the disk is away")
            return index

    batches = loader(Failing(8), 2, shuffle=False, num_workers=2)
    assert take(batches, 2) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            next(batches)
        assert batches.cursor == 4
    mended.touch()
    assert take(batches, 2) == [4, 5, 6, 7]
    batches.close()


def test_workers_survive_the_signals_of_the_trainers_group() -> None:
    """Case 26, the loader's part: torchrun signals whole groups, and workers must outlive that."""
    batches = loader(WhoFetches(100), 1, num_workers=2, prefetch_factor=2)
    workers = set(take(batches, 2))
    assert len(workers) == 2
    assert os.getpid() not in workers
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
        for pid in workers:
            os.kill(pid, number)
    assert set(take(batches, 20)) == workers
    assert all(psutil.Process(pid).is_running() for pid in workers)
    batches.close()
    # The trainer's own signals were only held back while the workers started.
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_users_worker_init_function_finds_the_users_dataset() -> None:
    def rename(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.num_samples = 1000 + worker_id  # type: ignore[attr-defined]

    class Renamed(Drawing):
        def __getitem__(self, index: int) -> Any:
            return self.num_samples

    batches = loader(Renamed(4), 1, num_workers=2, worker_init_fn=rename)
    assert take(batches, 4) == [1000, 1001, 1000, 1001]
    batches.close()


TRAINER = """
import json, os, sys, time
from dist_ckpt.loader import ResumableLoader, _source

class WhoFetches:
    def __len__(self): return 100
    def __getitem__(self, index): return os.getpid()

batches = ResumableLoader(WhoFetches(), 1, num_workers=2, collate_fn=lambda samples: samples[0])
print(json.dumps([next(batches), next(batches)]), flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


def start_trainer(argument: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, argument],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )
    assert trainer.stdout is not None
    return trainer, [psutil.Process(pid) for pid in json.loads(trainer.stdout.readline())]


def is_alive(process: psutil.Process) -> bool:
    """Return whether it runs; one that nobody has waited for yet doesn't."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_workers_die_with_a_killed_trainer() -> None:
    trainer, workers = start_trainer("stay")
    with trainer:
        assert all(map(is_alive, workers))
        trainer.kill()
        trainer.wait()
        killed_at = time.monotonic()
        # torch's own watch looks every 5 s; this is the kernel's doing.
        while any(map(is_alive, workers)) and time.monotonic() - killed_at < 2:
            time.sleep(0.02)
        assert not any(map(is_alive, workers))


def test_a_script_that_ends_without_closing_its_loader_ends_at_once() -> None:
    trainer, workers = start_trainer("end")
    with trainer:
        try:
            assert trainer.wait(timeout=20) == 0
        finally:
            trainer.kill()
        assert not any(map(is_alive, workers))


def test_closing_kills_a_worker_that_is_stuck() -> None:
    class Stuck(Drawing):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                time.sleep(100)
            return index

    before = children()
    batches = loader(Stuck(4), 1, shuffle=False, num_workers=1)
    assert next(batches) == [0]
    time.sleep(0.2)  # the worker is on its way into sample 1
    closing_at = time.monotonic()
    batches.close()
    assert 1 < time.monotonic() - closing_at < 5
    assert children() == before


def test_a_worker_that_not_even_sigkill_ends_is_told_of_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stuck in the kernel: here it just isn't killed."""
    monkeypatch.setattr(_source, "_GONE_SECS", 0.1)
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    try:
        with pytest.warns(UserWarning, match=rf"not gone after SIGKILL .* pids \[{worker.pid}\]"):
            _source._wait_gone([worker])
        assert worker.is_alive()
        assert worker not in multiprocessing.active_children(), "or the exit would wait for it"
    finally:
        worker.kill()
        worker.join(20)
