"""Starts `training.py` as one process or several ranks, and reads what it left.

A rank is forked from a nursery, a process of one thread that has torch imported already: 20 ms
instead of 2 s, and its end is told by the nursery's waitpid. With ``fresh=True`` it is a Python of
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from helpers.faulty_ops import Fault, faults_environment, read_strikes
from helpers.phase_faults import PhaseFault, phase_environment, phase_strikes
from helpers.training import NUM_SAMPLES, Options

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
WAIT_SECS = 60.0
STORE_LIMIT = timedelta(seconds=60)

_NURSERY = """
import json, os, signal, sys, traceback
sys.path[:0] = {paths!r}
import torch, torch.distributed, torch.nn.parallel
from helpers.training import Options, main
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.AdamW([parameter]).step()  # imports what the first optimizer imports

def child(order):
    log = os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["env"])
    status = 0
    try:
        main(Options(**order["options"]))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:  # ends as the interpreter does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)

for line in iter(sys.stdin.readline, ""):
    order = json.loads(line)
    if "options" in order:
        pid = os.fork()
        if pid == 0:
            child(order)
        answer = pid
    else:
        pid, status = os.waitpid(order["poll"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


class Nursery:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        script = _NURSERY.format(paths=[str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, order: Mapping[str, Any]) -> Any:
        """Return the answer to an order; any thread."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the nursery has no pipes")
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """It has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


@functools.cache
def nursery() -> Nursery:
    """Return the one nursery of this pytest process."""
    return Nursery()


class _Forked:
    def __init__(self, options: Options, env: Mapping[str, str], stderr: Path) -> None:
        order = {"options": asdict(options), "env": dict(env), "stderr": str(stderr)}
        self.pid: int = nursery().ask(order)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = nursery().ask({"poll": self.pid})
        return self._status


class _Fresh:
    def __init__(self, options: Options, env: Mapping[str, str], stderr: Path) -> None:
        with stderr.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HELPERS / "training.py"), json.dumps(asdict(options))],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()


class Job:
    """The ranks of one attempt. As a context manager: whatever is left of it at the end is killed.

    Args:
        options: What the script does.
        ranks: World size.
        faults: Of storage, by rank; `strikes` tells which struck.
        phase_faults: In phases of a save or a load, by rank; `struck_phases` tells which struck.
        env: Added to the environment of each rank.
        fresh: Whether each rank is an interpreter of its own.
        host: Where the ranks find the store, which this process hosts.
        networks: The network namespaces that ranks enter.
    """

    def __init__(
        self,
        options: Options,
        *,
        ranks: int = 1,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        phase_faults: Mapping[int, Sequence[PhaseFault]] | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        host: str = "127.0.0.1",
        networks: Mapping[int, str] | None = None,
    ) -> None:
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="job-", dir=self.out))
        if ranks > 1:
            # Hosted here, as torchrun's agent does: no kill of a rank may touch it. Not in a file:
            # a rank killed between two writes of a FileStore's record leaves it torn, and whoever
            # reads on from there, `init_process_group` too, loops for ever in native code.
            self._store = TCPStore(host, 0, None, True, STORE_LIMIT, False)
            options = replace(options, store=f"{host}:{self._store.port}")
        make = _Fresh if fresh else _Forked
        self._ranks: list[_Forked | _Fresh] = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            struck = (faults or {}).get(rank, ())
            own |= faults_environment(struck, log=self._folder / f"strikes.{rank}")
            phases = (phase_faults or {}).get(rank, ())
            own |= phase_environment(phases, self._folder / f"phases.{rank}")
            log = self._folder / f"stderr.{rank}"
            placed = replace(options, network=(networks or {}).get(rank, options.network))
            self._ranks.append(make(placed, {**own, **(env or {})}, log))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank, process in enumerate(self._ranks):
            while process.poll() is None:
                self.send(signal.SIGKILL, rank)
                time.sleep(0.01)

    def pid(self, rank: int = 0) -> int:
        """Return a rank's process."""
        return self._ranks[rank].pid

    def send(self, sig: signal.Signals, rank: int = 0) -> None:
        """A rank that hasn't been reaped gets the signal."""
        if self._ranks[rank].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank].pid, sig)

    def poll(self, rank: int = 0) -> int | None:
        """Return how a rank ended, None while it runs."""
        return self._ranks[rank].poll()

    def wait(self, timeout_secs: float = WAIT_SECS) -> list[int]:
        """Return how all ranks ended: exit statuses, negative for signals."""
        self.wait_until(lambda: all(rank.poll() is not None for rank in self._ranks), timeout_secs)
        return [rank.poll() or 0 for rank in self._ranks]

    def wait_until(self, condition: Callable[[], Any], timeout_secs: float = WAIT_SECS) -> None:
        """The condition holds; AssertionError with all ranks' stderr otherwise."""
        end = time.monotonic() + timeout_secs
        while not condition():
            if time.monotonic() > end:
                told = [self.stderr(rank) for rank in range(len(self._ranks))]
                raise AssertionError(f"not within {timeout_secs} s:\n" + "\n---\n".join(told))
            time.sleep(0.004)

    def lines(self, rank: int = 0) -> list[str]:
        """Return what the rank wrote into the file of its attempt, line by line."""
        for path in self.out.glob(f"consumed.{rank}.*.{self.pid(rank)}"):
            return path.read_text(encoding="utf-8").splitlines()
        return []

    def step(self, rank: int = 0) -> int:
        """Return the step that the rank is in, -1 before its resume."""
        lines = [line for line in self.lines(rank) if line != "left"]
        return int(lines[-1].split()[lines[-1].startswith("resumed")]) if lines else -1

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        """The rank is in this step or a later one."""

        def there() -> bool:
            if self.poll(rank) is not None and self.step(rank) < step:
                raise AssertionError(f"ended at step {self.step(rank)}:\n{self.stderr(rank)}")
            return self.step(rank) >= step

        self.wait_until(there)

    def stderr(self, rank: int = 0) -> str:
        """Return what the rank has written on standard error."""
        path = self._folder / f"stderr.{rank}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def struck_phases(self, rank: int = 0) -> list[str]:
        """Return the phases in which a rank was struck, in order."""
        return phase_strikes(self._folder / f"phases.{rank}")

    def strikes(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the faults that struck a rank."""
        return read_strikes(self._folder / f"strikes.{rank}")


def train(options: Options, *, ranks: int = 1, **named: Any) -> Job:
    """Return an attempt that has ended by itself, with status 0 on every rank."""
    with Job(options, ranks=ranks, **named) as job:
        statuses = job.wait()
        assert statuses == [0] * ranks, (statuses, [job.stderr(rank) for rank in range(ranks)])
    return job


def final(options: Options, rank: int = 0) -> dict[str, Any]:
    """Return what the last attempt that came to its end had in memory there."""
    path = Path(options.out) / f"final.{rank}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def consumed(options: Options, rank: int = 0) -> dict[int, list[int]]:
    """Return step → sample ids of the canonical history: a resume voids the steps after it.

    What is computed again must have consumed the same: checked here.
    """
    canonical: dict[int, list[int]] = {}
    ever: dict[int, list[int]] = {}
    for path in sorted(Path(options.out).glob(f"consumed.{rank}.*")):
        last = 0
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[0] == "resumed":
                last = int(words[1])
                canonical = {s: ids for s, ids in canonical.items() if s <= last}
            elif words[0] != "left":
                step, ids = int(words[0]), [int(word) for word in words[1:]]
                assert ever.setdefault(step, ids) == ids, f"step {step} met other samples"
                assert step == last + 1, f"step {step} isn't the next"
                last, canonical[step] = step, ids
    return canonical


def check_epochs(options: Options, ranks: int = 1) -> None:
    """Every epoch of the canonical history has each sample exactly once.

    Args:
        options: Of the run.
        ranks: The most ranks that it had.
    """
    parts = [consumed(options, rank) for rank in range(ranks)]
    stream = [n for step in sorted(parts[0]) for part in parts for n in part.get(step, ())]
    for start in range(0, len(stream), NUM_SAMPLES):
        epoch = stream[start : start + NUM_SAMPLES]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == NUM_SAMPLES:
            assert sorted(epoch) == list(range(NUM_SAMPLES))


def loss_prefix(options: Options) -> bytes:
    """Return the bytes of the loss file that may never change again: all whole entries."""
    run = Path(options.run_dir)
    path = run / f"{run.name}.loss.json"
    data = path.read_bytes() if path.exists() else b""
    whole = re.match(rb"\[(\s*\[\d+, [^\]]*\],?)*", data)
    return whole.group().rstrip(b",") if whole else b""


def generations(options: Options) -> list[int]:
    """Return the steps of the committed generations."""
    names = os.listdir(Path(options.run_dir) / "checkpoints")
    return sorted(int(name.removeprefix("step_")) for name in names if name.startswith("step_"))


def temporary(options: Options) -> list[str]:
    """Return what interrupted saves left."""
    folder = Path(options.run_dir) / "checkpoints"
    return (
        [name for name in os.listdir(folder) if name.startswith(".tmp")] if folder.exists() else []
    )
