"""A stand-in for a trainer under the launcher: handlers, steps, a stop, an event log.

Each rank appends one line an event to ``OUT/rank_<r>.log`` (``attempt event [detail]``), so that
tests see which signal reached whom. With ``--gloo`` the ranks agree by a collective at each step,
as the library does; without, torch isn't imported and each rank stops by the signal that it got
itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.announce import announce, withdraw

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STOPS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Counts signals, does steps, writes down what happens."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log = Path(options.out) / f"rank_{RANK}.log"
        self.num_saves = 0
        self.stop = 0
        self.num_sigints = 0

    def note(self, event: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{ATTEMPT} {event}\n")

    def handle(self, signum: int, _frame: Any) -> None:
        self.note(f"got {signal.Signals(signum).name}")
        if signum == signal.SIGUSR1:
            self.num_saves += 1
            return
        if self.options.deaf:
            return
        self.num_sigints += signum == signal.SIGINT
        if self.num_sigints > 1:
            raise KeyboardInterrupt
        self.stop = self.stop or signum

    def train(self, agree: Callable[[int, int], tuple[int, int]]) -> None:
        saved = 0
        for step in range(1, self.options.steps + 1):
            time.sleep(self.options.step_secs)
            if self.options.fail_at == step and self.options.fail_rank == RANK and ATTEMPT == 0:
                self.note("fails")
                sys.exit(3)
            saves, stop = agree(self.num_saves, self.stop)
            if saves > saved:
                saved = saves
                self.note(f"saved {step}")
            if stop:
                self.note(f"stopping {step}")
                time.sleep(self.options.save_secs)
                self.note(f"saved {step}")
                return


def _gloo() -> Callable[[int, int], tuple[int, int]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def agree(saves: int, stop: int) -> tuple[int, int]:
        both = torch.tensor([saves, stop])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return int(both[0]), int(both[1])

    return agree


def _close_gloo() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads abort a process that ends too soon after its last collective


def main() -> None:
    """Run until all steps are done or a stop is agreed on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-secs", type=float, default=0.02)
    parser.add_argument("--announce-delay", type=float, default=0.0)
    parser.add_argument("--save-secs", type=float, default=0.0)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--late-rank", type=int, help="this rank ends a second after the others")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="take no notice of a stop")
    parser.add_argument("--child", action="store_true", help="start a child, as a loader would")
    parser.add_argument("--grace", help="the launcher's option is the script's behind its name")
    worker = Worker(parser.parse_args())
    options = worker.options
    worker.note(f"pid {os.getpid()}")
    worker.note(f"launch {os.environ.get('DIST_CKPT_LAUNCH_ID')}")
    worker.note(f"world {os.environ.get('WORLD_SIZE')} grace {options.grace}")
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    agree = _gloo() if options.gloo else lambda saves, stop: (saves, stop)
    time.sleep(options.announce_delay)
    for signum in (*STOPS, signal.SIGUSR1):
        signal.signal(signum, worker.handle)
    worker.note("ready")
    announce(RANK)
    with contextlib.suppress(KeyboardInterrupt):
        worker.train(agree)
    withdraw(RANK, stopped=bool(worker.stop))
    for signum in (*STOPS, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    worker.note("withdrawn")
    if options.gloo:
        _close_gloo()
    if options.late_rank == RANK:
        time.sleep(1.0)
    worker.note("end")
    sys.exit(options.exit_code)


if __name__ == "__main__":
    main()
