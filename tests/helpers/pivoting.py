"""A small training with the example's bandit as its policy; a script, and objects for tests.

``python pivoting.py '{"run_dir": …}'`` with the fields of `Options`. World size 1, or DDP on gloo
under the launcher. A body waits where it is told to, so that tests know at which step they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the paths that pytest sets for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / name) for name in ("launch", "tests")]

import torch
from torch import distributed as dist

import dist_ckpt
from andrea.bandit import Bandit

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("docs", "docstrings", "code")
WAIT_SECS = 120.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run of the script does.

    Attributes:
        run_dir: The run directory.
        until: The last step.
        every: The cadence.
        sources: The bandit's arms.
        gate: At this step's body…
        gate_dir: …the file ``reached`` is made here and ``go`` waited for, in the first attempt;
            a SIGUSR1 makes the file ``usr1``.
    """

    run_dir: str
    until: int = 40
    every: int = 20
    sources: tuple[str, ...] = SOURCES
    gate: int | None = None
    gate_dir: str = ""


class Training:
    """The objects of one process; the same everywhere but for the bandit's sources."""

    def __init__(self, sources: tuple[str, ...] = SOURCES) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.bandit = Bandit(sources)
        self.wrapped: torch.nn.Module = self.model

    def checkpointer(self, run_dir: str | Path, **settings: Any) -> dist_ckpt.Checkpointer:
        """Return a Checkpointer of these objects."""
        return dist_ckpt.Checkpointer(
            run_dir,
            model=self.wrapped,
            optimizer=self.optimizer,
            policy=self.bandit,
            **{"every": 20, "keep_last": None, **settings},
        )

    def update(self) -> tuple[str, torch.Tensor]:
        """Make an update with a batch of the source that the bandit wants."""
        source = self.bandit.pull()
        number = 1 + len(source) % 5
        x = torch.rand(4, 3) * number
        loss = (self.wrapped(x) - number).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
        self.bandit.reward(source, float(loss))
        return source, loss

    def train(self, run_dir: str | Path, until: int, **settings: Any) -> dist_ckpt.Checkpointer:
        """Train in this process; a sample at each checkpoint."""
        with self.checkpointer(run_dir, **settings) as ckpt:
            for _ in ckpt.steps(until):
                source, loss = self.update()
                ckpt.record(loss=loss)
                if ckpt.due:
                    ckpt.sample(f"a text like {source}")
        return ckpt

    def state(self) -> list[list[float]]:
        """Return weights, m and v, all their bits."""
        found = [p.detach().flatten().tolist() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [state[name].flatten().tolist() for name in ("exp_avg", "exp_avg_sq")]
        return found


def main(options: Options) -> None:
    """Run the script."""
    torch.set_num_threads(1)
    gate_dir = Path(options.gate_dir)
    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    if options.gate_dir and is_first_rank:
        signal.signal(signal.SIGUSR1, lambda *_: (gate_dir / "usr1").touch())
    training = Training(tuple(options.sources))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        training.wrapped = torch.nn.parallel.DistributedDataParallel(training.model)
    with training.checkpointer(options.run_dir, every=options.every, timeout_secs=60) as ckpt:
        for step in ckpt.steps(options.until):
            source, loss = training.update()
            ckpt.record(loss=loss)
            if ckpt.due:
                ckpt.sample(f"a text like {source}")
            if step == options.gate and is_first_rank and not (gate_dir / "go").exists():
                (gate_dir / "reached").touch()
                wait_for(gate_dir / "go")
    sys.stdout.write(f"{ckpt.stopped} {ckpt.step}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for(path: Path) -> None:
    """The file is there; an error when it doesn't come."""
    end = time.monotonic() + WAIT_SECS
    while not path.exists():
        if time.monotonic() > end:
            message = f"{path} never came"
            raise TimeoutError(message)
        time.sleep(0.01)


def command(options: Options) -> list[str]:
    """Return the script and its argument."""
    return [str(Path(__file__).resolve()), json.dumps(dataclasses.asdict(options))]


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
