"""Makes ``generation_v1``, a frozen run directory of format version 1, written by two ranks.

Run once, by version 0.1.0; the result is kept as it is, and every later version has to read it. No
test makes it again. Values are arithmetic, not random, so that what must come back is known without
any file. Usage: ``python tests/golden/make_generation.py DIRECTORY``, from the checkout.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from dist_ckpt.capture import Captured
from dist_ckpt.export import export_bin
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History
from helpers.generating import Part, part_of, write_generation

STEP = 100
PARENT = {"step": 50, "id": "5" * 32}
LOSSES = [(1, 4.5), (2, float("nan")), (3, 0.1 + 0.2)]
EXTRA: dict[str, Any] = {
    "tuple": (1, "zwei", None, True),
    "int keys": {7: "seven", 0: [1.5, -0.0]},
    "odd floats": [float("inf"), float("-inf"), 5e-324],
    "big": 2**77,
    "counter": Counter({30: 1, 80: 2}),
    "odict": OrderedDict([("z", 1), ("a", 2)]),
    "deque": deque([1, 2], maxlen=5),
    "set": {3, 1, 2},
    "bytes": b"\x00\xff",
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "$dollar": "kept",
}


class Model(nn.Module):
    """Tied, frozen, narrow, 0-d, and with buffers that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight


class Holder:
    """Keeps whatever it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.state = state


@dataclass
class Objects:
    """The live objects of one rank."""

    model: Model
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.MultiStepLR
    data: Holder
    extra: Holder
    generator: np.random.Generator
    captured: Captured


def fresh() -> Objects:
    """Return the objects as a script builds them, nothing restored yet."""
    model = Model()
    rest = [p for n, p in model.named_parameters() if n != "wte.weight" and p.requires_grad]
    groups = [{"params": [model.wte.weight], "lr": 0.5}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80, 200])
    data, extra, generator = Holder({}), Holder({}), np.random.Generator(np.random.PCG64(1))
    captured = Captured(
        model,
        optimizer,
        scheduler=scheduler,
        data=data,
        extra={"mine": extra},
        generators={"noise": generator},
    )
    return Objects(model, optimizer, scheduler, data, extra, generator, captured)


def ramp(tensor: torch.Tensor, start: float, step: float) -> torch.Tensor:
    """Return ``start, start + step, …`` in the tensor's shape and dtype."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float64) * step + start
    return numbers.to(tensor.dtype).reshape(tensor.shape)


def at_step_100(rank: int) -> Objects:
    """Return the objects of a rank as they were saved."""
    objects = fresh()
    model, optimizer = objects.model, objects.optimizer
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(ramp(parameter, index, 0.125))
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(STEP)),
                    "exp_avg": ramp(parameter, -index, 0.25),
                    "exp_avg_sq": ramp(parameter, index, 0.0625),
                }
        for index, buffer in enumerate(model.buffers()):
            buffer.copy_(ramp(buffer, 10 * rank + index, 1.0))
    objects.scheduler.load_state_dict({**objects.scheduler.state_dict(), "last_epoch": STEP})
    for group, rate in zip(optimizer.param_groups, (0.005, 0.0025), strict=True):
        group["lr"] = rate
    objects.data.state = {"epoch": 2, "cursor": 36, "order": torch.arange(4 + rank)}
    objects.extra.state = {**EXTRA, "rank": rank, "array": np.arange(3 + rank, dtype=np.int16)}
    objects.generator.bit_generator.state = np.random.PCG64(rank).state
    return objects


def seeded(part: Part, rank: int) -> Part:
    """Return a part whose values are read with this rank's random state."""

    def encode(put: Callable[[str, Any], Any]) -> Any:
        seed(rank)
        return part.encode(put)

    return replace(part, encode=encode)


def seed(rank: int) -> None:
    """Have the global generators of a rank as they were saved."""
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global generator is part of the state
    torch.manual_seed(rank)


def main(home: Path) -> None:
    """Write the run directory, named ``golden``, into ``home``."""
    run_dir = home / "golden"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    with History(run_dir, "golden", 2) as history:
        for step, loss in LOSSES:
            history.record(step, loss, {"lr": 0.5, "norm": float("inf")})
        history.sample(3, "ein „Beispiel“\n", 0.5)
        history.journal.append("saved", step=STEP, reasons=["cadence", "SIGUSR1"])
    parts = [seeded(part_of(at_step_100(rank).captured), rank) for rank in range(2)]
    point = write_generation(
        run_dir,
        parts,
        step=STEP,
        attempt=2,
        parent=PARENT,
        reasons=("cadence", "SIGUSR1"),
        identity={"config": {"lr": 0.25, "größe": 4}},
        notes={"content": "0" * 32},
    )
    store = GenerationStore(run_dir)
    store.mark_verified(STEP, "read back")
    export_bin(store, point)
    for path in run_dir.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
