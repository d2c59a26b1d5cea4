"""What ``make demo`` runs: a training that is signalled, stopped and killed, then proved.

It trains ANDREA's smallest preset on the text that Python ships, twice: once undisturbed, once with
SIGUSR1, SIGTERM and SIGKILL in between. Where both reach the same step on two ranks, weights,
moments and losses must be equal bit for bit. Then the run goes on on one rank. The exit status is 0
only when all of that held.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

import dist_ckpt
from dist_ckpt.errors import DistCkptError

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200
EVERY = 50
MORE_STEPS = 25
"""What one rank adds at the end."""
USR1_AT, TERM_AT, KILL_AT = 20, 70, 165
"""The steps after which the signals are sent; where they strike is up to the machine."""
WAIT_SECS = 120.0
START = time.monotonic()


class DemoError(Exception):
    """Something that the demo promises didn't hold."""


class Training:
    """One attempt in a process of its own; what it prints goes to the log.

    Args:
        run: The run directory.
        num_ranks: Two or more go through the launcher, one is the plain script.
        steps: Where the training ends.
    """

    def __init__(self, run: Path, *, num_ranks: int, steps: int) -> None:
        self.run = run
        launcher = ["-m", "dist_ckpt", "run", "--nproc-per-node", str(num_ranks)]
        command = [
            sys.executable,
            *(launcher if num_ranks > 1 else []),
            str(ROOT / "launch" / "single_gpu.py"),
            *("--preset", "tiny", "--device", "cpu", "--run-dir", str(run)),
            *("--steps", str(steps), "--every", str(EVERY)),
        ]
        with log_of(run).open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Left early: by an error here, or by Ctrl-C.
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it must, before the training ends."""
        deadline = time.monotonic() + WAIT_SECS
        while not condition():
            if self.process.poll() is not None:
                status = self.process.returncode
                raise DemoError(f"the training ended too soon, with status {status}: {what}")
            if time.monotonic() > deadline:
                raise DemoError(f"waited {WAIT_SECS:.0f} s in vain: {what}")
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        """Wait until this step is in the loss file."""
        self.until(f"step {step} in the loss file", lambda: last_step(self.run) >= step)

    def kill_rank_0(self) -> None:
        """Kill the process of rank 0 as the kernel would: nothing in it can react."""
        holder = json.loads((self.run / "run.json").read_bytes())
        os.kill(holder["pid"], signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end; return the exit status."""
        try:
            return self.process.wait(WAIT_SECS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the training didn't end within {WAIT_SECS:.0f} s") from None

    def must_end_with_0(self) -> None:
        """Wait for the end, which must be a good one."""
        status = self.end()
        check(status == 0, f"the training ended with status {status}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return 0 when everything held, 1 when something didn't."""
    parser = argparse.ArgumentParser(description="Signals, a kill, and a proof of bit-equality.")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where demo-K is made")
    run = fresh_run(parser.parse_args(argv).runs)
    try:
        confirmation = demonstrate(run, run.with_name(f"{run.name}.reference"))
    except (DemoError, DistCkptError) as error:
        print(f"\nThe demo failed: {error}\nWhat the trainings said: {shown(run)}*.log")
        return 1
    print(confirmation)
    return 0


def demonstrate(run: Path, reference: Path) -> str:
    """Train, disturb, resume, compare; return the confirmation."""
    say(f"a GPT on the text that Python ships, 2 ranks; the run is {shown(run)}")
    say(f"first the run to compare with: {STEPS} steps, undisturbed")
    with Training(reference, num_ranks=2, steps=STEPS) as training:
        training.must_end_with_0()

    say("now the same run, disturbed")
    usr1_step, term_step = signalled(run)
    killed_step, kept_step = killed(run)
    num_replayed = resumed(run, kept_step)
    num_params = must_be_bit_equal(run, reference)
    on_one_rank(run)
    exported = read_back(run)

    size = f"{exported.stat().st_size:,} bytes"
    return f"""
It survived, in {time.monotonic() - START:.0f} s:
  SIGUSR1   wrote step {usr1_step} and went on
  SIGTERM   wrote step {term_step} and ended with status 0
  SIGKILL   struck at step {killed_step}; resumed from step {kept_step} on 2 ranks; the losses
            of the {num_replayed} lost steps came out the same
  proof     at step {STEPS}, beside a run that nothing disturbed: {num_params:,} weights, their
            first and second moments and all {STEPS} losses are equal bit for bit
  1 rank    went on from step {STEPS} to {STEPS + MORE_STEPS}
  export    {shown(exported)}, {size}, read back and verified

The run lies in {shown(run)}. Look at it:
  {shown(Path(sys.executable).with_name("dist-ckpt"))} ls {shown(run)}
"""


def signalled(run: Path) -> tuple[int, int]:
    """Send SIGUSR1, then SIGTERM; return the steps that they wrote."""
    with Training(run, num_ranks=2, steps=STEPS) as training:
        training.until_step(USR1_AT)
        training.process.send_signal(signal.SIGUSR1)
        training.until("a checkpoint after SIGUSR1", lambda: bool(kept_steps(run)))
        usr1_step = kept_steps(run)[-1]
        training.until_step(usr1_step + 1)
        say(f"SIGUSR1: wrote step {usr1_step}, training goes on")

        training.until_step(TERM_AT)
        training.process.send_signal(signal.SIGTERM)
        training.must_end_with_0()
    term_step = kept_steps(run)[-1]
    check(
        term_step == last_step(run),
        f"SIGTERM wrote step {term_step}, but the last step made was {last_step(run)}",
    )
    say(f"SIGTERM: wrote step {term_step}, ended with status 0")
    return usr1_step, term_step


def killed(run: Path) -> tuple[int, int]:
    """Resume and kill; return the last step made and the newest one that is kept."""
    with Training(run, num_ranks=2, steps=STEPS) as training:
        training.until_step(KILL_AT)
        training.kill_rank_0()
        status = training.end()
    check(status != 0, "rank 0 was killed, and the launcher called it a success")
    say(
        f"SIGKILL: struck at step {last_step(run)}, newest checkpoint is step {kept_steps(run)[-1]}"
    )
    return last_step(run), kept_steps(run)[-1]


def resumed(run: Path, kept_step: int) -> int:
    """Resume on two ranks, to the end; return how many lost steps were made again, all equal."""
    say(f"resuming on 2 ranks from step {kept_step}")
    with Training(run, num_ranks=2, steps=STEPS) as training:
        training.must_end_with_0()
    check(last_step(run) == STEPS, f"the run ended at step {last_step(run)}")
    replays = [event for event in dist_ckpt.open_run(run).journal() if event["event"] == "replayed"]
    check(bool(replays), "the journal doesn't say that the lost steps were made again")
    replay = replays[-1]
    check(
        replay["agreed"] == replay["of"],
        f"of {replay['of']} lost steps only {replay['agreed']} came out the same",
    )
    return int(replay["of"])


def must_be_bit_equal(run: Path, reference: Path) -> int:
    """Compare weights, moments and losses at the last step; return the number of weights."""
    name = f"step_{STEPS:06}.bin"
    found, expected = dist_ckpt.read_bin(run / name), dist_ckpt.read_bin(reference / name)
    for part in ("weights", "m", "v"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        # As integers: two NaN of the same bits are equal, 0.0 and -0.0 are not.
        differ = int(np.count_nonzero(ours.view(np.int32) != theirs.view(np.int32)))
        check(differ == 0, f"{differ:,} of {theirs.size:,} numbers differ in {part}")
    losses, expected_losses = losses_of(run), losses_of(reference)
    check(len(losses) == STEPS, f"the history holds {len(losses)} steps")
    check(losses == expected_losses, "the histories of losses differ")
    say(f"at step {STEPS}: bit-equal to the undisturbed run")
    return int(found.weights.size)


def on_one_rank(run: Path) -> None:
    """Go on without the launcher, on one rank."""
    end = STEPS + MORE_STEPS
    say(f"resuming on 1 rank from step {STEPS}")
    with Training(run, num_ranks=1, steps=end) as training:
        training.must_end_with_0()
    check(kept_steps(run)[-1] == end, f"the newest checkpoint is step {kept_steps(run)[-1]}")
    check(len(losses_of(run)) == end, f"the history holds {len(losses_of(run))} steps")


def read_back(run: Path) -> Path:
    """Read every byte of the run, the canonical files too; return the newest one."""
    say("reading everything back")
    command = [sys.executable, "-m", "dist_ckpt", "verify", str(run)]
    with log_of(run).open("ab") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    check(done.returncode == 0, f"dist-ckpt verify ended with status {done.returncode}")
    return run / f"step_{STEPS + MORE_STEPS:06}.bin"


# ------------------------------------------------------------------------------ what a run says


def losses_of(run: Path) -> list[tuple[int, float | None]]:
    """Return the canonical history."""
    return list(dist_ckpt.open_run(run).loss())


def last_step(run: Path) -> int:
    """Return the last step in the loss file, 0 when there is none yet."""
    started = (run / f"{run.name}.loss.json").exists()
    losses = losses_of(run) if started else []
    return losses[-1][0] if losses else 0


def kept_steps(run: Path) -> list[int]:
    """Return the steps of the committed generations, ascending."""
    return sorted(generation.step for generation in dist_ckpt.open_run(run).generations())


# -------------------------------------------------------------------------------------- helpers


def fresh_run(runs: Path) -> Path:
    """Make and return the first `demo-K` that isn't there yet."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while (run := runs / f"demo-{number}").exists():
        number += 1
    run.mkdir()
    return run


def log_of(run: Path) -> Path:
    """Return where the output of this run's attempts goes: beside it."""
    return run.with_name(f"{run.name}.log")


def shown(path: Path) -> str:
    """Return a path as a person in the checkout would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def check(held: bool, otherwise: str) -> None:
    """Raise when something promised didn't hold."""
    if not held:
        raise DemoError(otherwise)


def say(text: str) -> None:
    """Tell what is being done, and when."""
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
