"""Elastic jobs: two launchers on this machine, as on two nodes; one is lost, the other goes on.

The run directory is shared, as it must be; everything else is each launcher's own, as on a node.
The rendezvous' store is the test's, so that any node may be lost.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.launching import HELPERS, Launched
from helpers.trainers import final, generations
from helpers.training import NUM_SAMPLES, Options

pytestmark = pytest.mark.timeout(600)

#: torchrun waits 15 s for a silent node and 30 s for late ones, where nothing else is said. With
#: less than some seconds a node on busy cores counts as gone.
QUICK = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8"


class Node(Launched):
    """A launcher with an agent, a worker, and files of its own."""

    def processes(self) -> list[psutil.Process]:
        """Return launcher, agent and worker."""
        launcher = psutil.Process(self.process.pid)
        (agent,) = launcher.children()
        (worker,) = agent.children()
        return [launcher, agent, worker]

    def end(self) -> None:
        """Whatever a failed test left is killed."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
        self.close()


class Nodes:
    """The launchers of one elastic job.

    Args:
        tmp_path: An empty directory.
        more: Further options of torchrun.
    """

    def __init__(self, tmp_path: Path, *more: str) -> None:
        self._tmp_path = tmp_path
        self.options = Options(
            run_dir=str(tmp_path / "run"),
            out=str(tmp_path / "training"),
            until=100_000,
            every=10,
            step_secs=0.01,
            limit_secs=20.0,
        )
        Path(self.options.out).mkdir()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._args = (
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{self._store.port}", "--rdzv-id=elastic"),
            *(f"--rdzv-conf={QUICK}", "--local-addr=127.0.0.1", *more),
        )
        self.all: list[Node] = []

    def start(self) -> Node:
        """One more launcher runs."""
        place = self._tmp_path / f"node_{len(self.all)}"
        place.mkdir()
        script = HELPERS / "training.py"
        self.all.append(Node(place, *self._args, script, json.dumps(asdict(self.options))))
        return self.all[-1]

    def start_both(self) -> list[Node]:
        """Two nodes train, and there is a generation; returned by rank."""
        nodes = [self.start(), self.start()]
        self.wait_for_training(nodes[0], attempt=1, world_size=2)
        nodes[0].wait_until(lambda: bool(generations(self.options)), "a generation")
        first = int(next(Path(self.options.out).glob("consumed.0.000.*")).name.rpartition(".")[2])
        return sorted(nodes, key=lambda node: node.processes()[2].pid != first)

    def attempts(self) -> list[tuple[int, int]]:
        """Return world size and first step of each attempt that has begun to train."""
        events = read_journal(self.options.run_dir)
        sizes = {e["attempt"]: e["world_size"] for e in events if e["event"] == "attempt_started"}
        begun = [e for e in events if e["event"] in {"resumed", "fresh_start"}]
        return [(sizes[e["attempt"]], e["step"]) for e in begun]

    def wait_for_training(self, node: Node, *, attempt: int, world_size: int) -> None:
        """So many attempts have begun, the last of them is some steps on, at this world size."""

        def trains() -> bool:
            files = list(Path(self.options.out).glob(f"consumed.0.{attempt - 1:03d}.*"))
            return any(len(path.read_text(encoding="utf-8").splitlines()) > 5 for path in files)

        node.wait_until(trains, f"attempt {attempt} trains")
        assert self.attempts()[attempt - 1][0] == world_size, node.stderr

    def event(self, name: str, attempt: int) -> dict[str, Any]:
        """Return the event of this name of an attempt."""
        events = read_journal(self.options.run_dir)
        (found,) = [e for e in events if e["event"] == name and e["attempt"] == attempt]
        return found

    def stop(self, node: Node) -> None:
        """The node stops with 0, at a generation, and every sample was met as it must be."""
        node.send(signal.SIGTERM)
        assert node.status() == 0, node.stderr
        step = final(self.options)["step"]
        assert generations(self.options)[-1] == step
        assert GenerationStore(Path(self.options.run_dir)).verified_at(step) is not None
        _check_samples(Path(self.options.out))


def _check_samples(out: Path) -> None:
    """Every epoch has each sample exactly once, through attempts of any world size."""
    canonical: dict[int, list[int]] = {}
    for attempt in itertools.count():
        parts = [
            [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
            for path in sorted(out.glob(f"consumed.*.{attempt:03d}.*"))
        ]
        if not parts:
            break
        resumed = int(parts[0][0][1])  # what came after it is void
        canonical = {step: ids for step, ids in canonical.items() if step <= resumed}
        for words in (words for part in parts for words in part if words[0].isdigit()):
            canonical.setdefault(int(words[0]), []).extend(map(int, words[1:]))
    assert list(canonical) == list(range(1, len(canonical) + 1))
    stream = [number for ids in canonical.values() for number in ids]
    for start in range(0, len(stream), NUM_SAMPLES):
        epoch = stream[start : start + NUM_SAMPLES]
        assert len(set(epoch)) == len(epoch)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Make jobs whose remains are gone after the test."""
    made: list[Nodes] = []

    def make(*more: str) -> Nodes:
        made.append(Nodes(tmp_path, *more))
        return made[-1]

    yield make
    for nodes in made:
        for node in nodes.all:
            node.end()


def test_a_killed_agent_costs_no_step_and_the_other_goes_on_alone(
    job: Callable[..., Nodes],
) -> None:
    """Its worker gets SIGTERM from the kernel, so all ranks write; the job isn't over by that."""
    nodes = job()
    stays, goes = nodes.start_both()
    os.kill(goes.processes()[1].pid, signal.SIGKILL)

    nodes.wait_for_training(stays, attempt=2, world_size=1)

    assert goes.status() == 128 + signal.SIGKILL, goes.stderr
    assert "the launcher of another rank has died" in stays.stderr
    written = nodes.event("attempt_stopped", attempt=1)["step"]
    assert [size for size, _ in nodes.attempts()] == [2, 1]
    assert nodes.attempts()[1][1] == written
    nodes.stop(stays)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["launcher", "agent", "node", "rank"])
def test_the_job_restarts_by_itself_whatever_is_killed_on_a_node(
    what: str, rank: int, job: Callable[..., Nodes]
) -> None:
    nodes = job()
    both = nodes.start_both()
    goes, stays = both[rank], both[1 - rank]
    launcher, agent, worker = (process.pid for process in goes.processes())
    victims = {"launcher": [launcher], "agent": [agent], "rank": [worker]}
    for pid in victims.get(what, [launcher, agent, worker]):
        os.kill(pid, signal.SIGKILL)

    # A rank alone is started again by its agent.
    nodes.wait_for_training(stays, attempt=2, world_size=2 if what == "rank" else 1)

    assert nodes.attempts()[1][1] >= 10
    nodes.stop(stays)
    if what == "rank":
        assert goes.status() == 0, goes.stderr


@pytest.mark.slow
def test_a_node_that_joins_makes_the_job_write_and_restart_larger(
    job: Callable[..., Nodes],
) -> None:
    nodes = job()
    first = nodes.start()
    nodes.wait_for_training(first, attempt=1, world_size=1)
    second = nodes.start()

    nodes.wait_for_training(first, attempt=2, world_size=2)

    written = nodes.event("attempt_stopped", attempt=1)["step"]
    assert [(1, 0), (2, written)] == nodes.attempts()
    second.send(signal.SIGTERM)  # a stop of one node is a stop of the job
    assert [node.status() for node in (first, second)] == [0, 0], first.stderr
    assert len(nodes.attempts()) == 2


@pytest.mark.slow
def test_without_restarts_left_a_lost_node_ends_the_job_with_1_and_all_is_saved(
    job: Callable[..., Nodes],
) -> None:
    nodes = job("--max-restarts=0")
    stays, goes = nodes.start_both()
    os.kill(goes.processes()[1].pid, signal.SIGKILL)

    assert stays.status() == 1, stays.stderr

    assert "no restarts are left" in stays.stderr
    step = nodes.event("attempt_stopped", attempt=1)["step"]
    assert generations(nodes.options)[-1] == step
