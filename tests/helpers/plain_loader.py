"""A training on torch's own DataLoader with two workers; ``plain_loader.py RUN_DIR HOW``.

HOW: ``deaf`` gives the workers the `worker_init_fn` of docs/how-to/own-script.md, ``plain``
gives none. Prints the workers' pids in step 5, and at the end what stopped it and where.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import dist_ckpt


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.ones(4) * number


def ended_by_trainer_only(_: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass  # torchrun, a service manager: meant for the trainer
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main(run_dir: str, how: str) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    init = ended_by_trainer_only if how == "deaf" else None
    loader = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2, worker_init_fn=init)
    with dist_ckpt.Checkpointer(run_dir, model=model, optimizer=optimizer, every=1000) as ckpt:
        batches = iter(loader)
        for step in ckpt.steps(until=20_000):
            loss = model(next(batches)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 5:
                workers: Any = batches  # torch keeps them to itself
                print(*[worker.pid for worker in workers._workers], flush=True)
    print(ckpt.stopped, ckpt.step, flush=True)
    # The workers are alive still: the end of the interpreter has to end them.


if __name__ == "__main__":
    main(*sys.argv[1:])
