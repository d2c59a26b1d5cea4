"""The default way to train: one script, one GPU (or none), and a run that survives.

    python launch/single_gpu.py --preset tiny --run runs/one --steps 200 --every 50

Start it again and it goes on where it was. SIGTERM: it finishes the step, writes a checkpoint and
ends with status 0. SIGUSR1: it writes one and goes on. On several ranks each takes its part of the
batch; the options stay the same:

    dist-ckpt run --nproc-per-node 2 launch/single_gpu.py --run-dir runs/ranks --steps 400
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dist_ckpt
from andrea import (
    GPT,
    PRESETS,
    Bandit,
    Mixture,
    TextWindows,
    Trainer,
    TrainingConfig,
    data_id,
    generate,
    load_sources,
    make_deterministic,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train until `--steps` or a stop signal and return the exit status."""
    options = parse(argv)
    rank, device = join(options.device)
    make_deterministic()

    torch.manual_seed(options.seed)  # the same first weights on every rank
    model = GPT(PRESETS[options.preset]).to(device)
    network = DistributedDataParallel(model) if dist.is_initialized() else model
    own = options.seed + 1 + rank  # each rank draws its own dropout
    torch.manual_seed(own)
    random.seed(own)  # nothing here draws from these two, but they are saved and compared too
    np.random.seed(own)  # noqa: NPY002 - the global generator is what is saved
    training = TrainingConfig(lr=options.lr)
    trainer = Trainer(network, training, device)
    # From three ranks on DDP adds in another order after its first backward: at every start, fresh
    # or resumed, that one is no step of the training. Any batch will do.
    blank = torch.zeros(1, model.config.context + 1, dtype=torch.long)
    dist_ckpt.rehearse(network, lambda: trainer.loss(blank))

    sources = load_sources()
    batches = Mixture(
        {
            name: dist_ckpt.ResumableLoader(
                TextWindows({name: tokens}, model.config.context),
                batch_size=options.batch_size,
                seed=options.seed + number,
                num_workers=options.num_workers,
                pin_memory=device.type == "cuda",
            )
            for number, (name, tokens) in enumerate(sources.items())
        }
    )
    bandit = Bandit(sources)

    with dist_ckpt.Checkpointer(
        options.run,
        model=network,
        optimizer=trainer.optimizer,
        scheduler=trainer.scheduler,
        scaler=trainer.scaler,
        data=batches,
        policy=bandit,
        every=options.every,
        data_id=data_id(sources),
        config={
            "model": dataclasses.asdict(model.config),
            "training": dataclasses.asdict(training),
            "batch_size": options.batch_size,
            "seed": options.seed,
        },
    ) as ckpt:
        trainer.follow(options.lr)  # another one than was saved gets here only when accepted
        for step in ckpt.steps(until=options.steps):
            lr = trainer.lr
            source = bandit.pull()
            loss = mean_over_ranks(trainer.update(batches.take(source)))
            bandit.reward(source, float(loss))  # what is harder is worth more
            ckpt.record(loss=loss, lr=lr)
            if ckpt.due and rank == 0:
                text = generate(model, seed=step)
                ckpt.sample(text, loss=loss)
                print(f"step {step}  loss {float(loss):.4f}  {text[:60]!r}", flush=True)

    if rank == 0:
        how = f"stopped by {ckpt.stopped}" if ckpt.stopped else "done"
        print(f"{how} at step {ckpt.step}: {options.run}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def join(wanted: str) -> tuple[int, torch.device]:
    """Join the ranks that torchrun started, if it did; return this rank and its device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() if wanted == "auto" else wanted == "cuda"
    if cuda:
        torch.cuda.set_device(local_rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank, torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean of all ranks' losses: all bandits have to learn the same."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train ANDREA on the text that Python ships.")
    # Two names: plain torchrun takes --run for a beginning of its own --run-path, and refuses it,
    # though it stands behind the script. `dist-ckpt run` leaves it to the script.
    parser.add_argument(
        "--run", "--run-dir", help="run directory; resumed when it exists (runs/PRESET)"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--steps", type=int, default=200_000, help="train until this step")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=TrainingConfig.lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(argv)
    options.run = options.run or f"runs/{options.preset}"
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except dist_ckpt.DistCkptError as error:
        sys.exit(str(error))  # it says what to do; status 1
