"""A small training that uses everything that a resume can lose; a script, and a function for forks.

AdamW with dropout, BatchNorm buffers that move, a shuffled loader whose dataset draws at fetch,
draws of Python, NumPy and an own generator in the body, a scheduler. World size 1, or DDP on gloo.

``python training.py '{"run_dir": …, "out": …}'`` with the fields of `Options`. Each rank writes
into ``out``, one file an attempt (a process):

* ``consumed.R.ATTEMPT.PID``: first ``resumed STEP``, then ``STEP id id …`` before each update;
* ``final.R.json``: where the loop ended, and digests of all state, at the end of an attempt that
  wasn't cut;
* ``live.0.bin``: weights, exp_avg and exp_avg_sq as the program holds them, in the model's order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the paths that pytest sets for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1 + up]) for up in range(2)]

import numpy as np
import torch

import dist_ckpt
from helpers.faulty_ops import install_from_environment
from helpers.phase_faults import install_phase_faults

NUM_SAMPLES = 24


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run of the script does; fields that tests vary.

    Attributes:
        run_dir: The run directory.
        out: Where the script's own files go.
        until: The last step.
        every: The cadence.
        settings: Further arguments of ``Checkpointer``.
        step_secs: A pause in each body, that signals find steps under way.
        enter_secs: A pause between building the objects and entering.
        num_workers: Of the loader.
        accumulate: Batches of an update.
        ask_save: Step → number of the batch within it at which a save is asked for.
        raise_at: This step's body raises…
        raise_rank: …on this rank…
        raise_after: …after the update rather than before.
        kill_at: The same, with a SIGKILL instead of an exception.
        nan_at: The loss recorded at this step isn't a number.
        frozen_at: From this step on the optimizer isn't called.
        clobber_secs: For so long after each boundary, all tensors hold other values.
        width: Of the hidden layer.
        config: The run's configuration.
        evaluate_at: This step's body evaluates until `poll` says that something is asked for.
        network: Path of a network namespace that the process enters first.
        store: ``HOST:PORT`` of the ranks' rendezvous; torchrun's environment without.
        limit_secs: ``timeout_secs``.
        sharded: FSDP2 in the place of DDP.
    """

    run_dir: str
    out: str
    until: int = 12
    every: int = 4
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    step_secs: float = 0.0
    enter_secs: float = 0.0
    num_workers: int = 0
    accumulate: int = 1
    ask_save: dict[str, int] = dataclasses.field(default_factory=dict)
    raise_at: int | None = None
    raise_rank: int = 0
    raise_after: bool = False
    kill_at: int | None = None
    nan_at: int | None = None
    frozen_at: int | None = None
    clobber_secs: float = 0.0
    width: int = 16
    config: dict[str, Any] | None = None
    evaluate_at: int | None = None
    network: str | None = None
    store: str | None = None
    limit_secs: float = 20.0
    sharded: bool = False


class DrawingData:
    """Samples made when they are fetched, partly at random, as augmentation does."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        base = torch.arange(6, dtype=torch.float32) * (number + 1) / NUM_SAMPLES
        noise = torch.rand(6) + random.random() + float(np.random.random())  # noqa: NPY002
        return number, torch.sin(base) + 0.1 * noise, torch.tensor([number % 5 / 5.0])


class Training:
    """The objects of one process, and its updates."""

    def __init__(self, options: Options, rank: int, world_size: int) -> None:
        self.options = options
        self.rank = rank
        random.seed(11 + rank)
        np.random.seed(12 + rank)  # noqa: NPY002
        torch.manual_seed(13)  # the same weights everywhere, other dropout further down
        self.generator = np.random.default_rng(14 + rank)
        width = options.width
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 1),
        )
        self.wrapped: torch.nn.Module = self.model
        if options.sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        elif world_size > 1:
            self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.9)
        self.batches = dist_ckpt.ResumableLoader(
            DrawingData(), batch_size=10, seed=3, num_workers=options.num_workers
        )
        torch.manual_seed(15 + rank)
        number = len(list(Path(options.out).glob(f"consumed.{rank}.*")))
        path = Path(options.out) / f"consumed.{rank}.{number:03d}.{os.getpid()}"
        self.consumed = path.open("x", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """The loader's workers and the file of the attempt are let go of."""
        self.batches.close()
        self.consumed.close()

    def note(self, *words: Any) -> None:
        """A line is in the file of this attempt, whatever happens next."""
        self.consumed.write(" ".join(map(str, words)) + "\n")

    def update(self, step: int, ckpt: dist_ckpt.Checkpointer) -> float:
        """One update of the optimizer is made; returns its loss."""
        options = self.options
        gain = 1.0 + 0.01 * random.random() + 0.01 * float(self.generator.random())
        gain += 0.01 * float(np.random.random())  # noqa: NPY002
        total, ids = 0.0, []
        self.optimizer.zero_grad()
        for number in range(options.accumulate):
            if options.ask_save.get(str(step)) == number:
                ckpt.save()
            samples, x, y = next(self.batches)
            ids += [int(value) for value in samples]
            loss = ((self.wrapped(x * gain) - y) ** 2).mean() / options.accumulate
            loss.backward()
            total += float(loss.detach())
        self.note(step, *ids)
        if options.frozen_at is None or step < options.frozen_at:
            self.optimizer.step()
            self.scheduler.step()
        return total

    def clobber(self) -> None:
        """All tensors have held other values for a while, and hold their own again."""
        tensors = self._tensors()
        held = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(77)
            time.sleep(self.options.clobber_secs)
            for tensor, values in zip(tensors, held, strict=True):
                tensor.copy_(values)

    def _tensors(self) -> list[torch.Tensor]:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def canonical(self) -> bytes:
        """Return weights and moments as this rank holds them, float32, in the model's order."""
        parameters = list(self.model.parameters())
        parts = [parameter.detach() for parameter in parameters]
        for name in ("exp_avg", "exp_avg_sq"):
            for parameter in parameters:
                state = self.optimizer.state.get(parameter, {})
                parts.append(state.get(name, torch.zeros_like(parameter)))
        return b"".join(_held(part).numpy().tobytes() for part in parts)

    def digests(self) -> dict[str, Any]:
        """Return everything that must be bit-equal, the next draws among it."""
        state = [
            [name, sorted((key, digest(value)) for key, value in self.optimizer.state[p].items())]
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        ]
        return {
            "model": {name: digest(value) for name, value in self.model.state_dict().items()},
            "optimizer": state,
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "scheduler": self.scheduler.last_epoch,
            "data": self.batches.state_dict(),
            "draws": {
                "torch": torch.rand(4).tolist(),
                "python": random.random(),
                "numpy": float(np.random.random()),  # noqa: NPY002
                "generator": float(self.generator.random()),
            },
        }


def digest(value: Any) -> str:
    """Return a short digest of a tensor's bytes."""
    tensor = torch.as_tensor(value)
    return hashlib.sha256(_held(tensor).detach().numpy().tobytes()).hexdigest()[:16]


def _held(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def main(options: Options) -> None:
    """Train, and leave the files that the module's text tells of."""
    install_from_environment()
    install_phase_faults()
    torch.set_num_threads(1)
    if options.network is not None:
        _enter_network(options.network)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        _init_group(options, rank, world_size)
    training = Training(options, rank, world_size)
    time.sleep(options.enter_secs)
    with dist_ckpt.Checkpointer(
        options.run_dir,
        model=training.wrapped,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        data=training.batches,
        generators={"own": training.generator},
        every=options.every,
        timeout_secs=options.limit_secs,
        config=options.config,
        **options.settings,
    ) as ckpt:
        training.note("resumed", ckpt.step)
        for step in ckpt.steps(options.until):
            _body(training, ckpt, step)
        ended = {"stopped": ckpt.stopped, "step": ckpt.step}
        if rank == 0:
            (Path(options.out) / "live.0.bin").write_bytes(training.canonical())
        final = {**ended, **training.digests()}
        path = Path(options.out) / f"final.{rank}.json"
        path.write_text(json.dumps(final), encoding="utf-8")
    training.note("left")
    training.close()
    if world_size > 1:
        torch.distributed.destroy_process_group()


def _body(training: Training, ckpt: dist_ckpt.Checkpointer, step: int) -> None:
    options = training.options
    if options.clobber_secs:
        training.clobber()
    _strike(training, step, after=False)
    loss = training.update(step, ckpt)
    time.sleep(options.step_secs)
    if step == options.evaluate_at:
        sys.stderr.write("evaluates\n")
        sys.stderr.flush()
        while not ckpt.poll():
            time.sleep(0.005)
    _strike(training, step, after=True)
    ckpt.record(loss=float("nan") if step == options.nan_at else loss, step_loss=loss)


def _strike(training: Training, step: int, *, after: bool) -> None:
    options = training.options
    if training.rank == options.raise_rank and after == options.raise_after:
        if step == options.raise_at:
            raise RuntimeError(f"rank {training.rank} gives up")
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _enter_network(path: str) -> None:
    import ctypes

    fd = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), f"can't enter the network namespace {path}")
    os.close(fd)


def _init_group(options: Options, rank: int, world_size: int) -> None:
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=options.limit_secs)
    if options.store is None:
        torch.distributed.init_process_group("gloo", timeout=limit)
        return
    host, port = options.store.split(":")
    store = TCPStore(host, int(port), None, False, limit)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
    )


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
