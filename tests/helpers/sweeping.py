"""One small attempt with storage that fails at one operation, again for each of its operations.

`find_sites` tells which operations an attempt makes; `attempt` makes one with faults; `judge` says
what is wrong with what it left. All of it in this process, so that descriptors and threads can be
counted. `Broken` is a disk that refuses from one operation on, for good.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import dist_ckpt
from dist_ckpt.errors import DistCkptError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.storage import lock_holder, use_ops
from helpers.faulty_ops import Call, Fault, FaultyOps, RecordingOps

START, UNTIL, EVERY = 2, 6, 2
#: What a system says when it refuses, by operation; "short" takes or gives a few bytes only.
KINDS: dict[str, tuple[str, ...]] = {
    "pwrite": ("ENOSPC", "EIO", "EDQUOT", "EROFS", "short"),
    "preadv": ("EIO", "short"),
    "open": ("EIO", "EROFS", "ENOSPC", "EMFILE"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "fdatasync": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "EROFS", "ENOSPC", "EDQUOT"),
    "link": ("EIO", "EROFS", "ENOSPC", "EMLINK"),
    "mkdir": ("EIO", "EROFS", "ENOSPC", "EDQUOT"),
    "unlink": ("EIO", "EROFS"),
    "rmdir": ("EIO", "EROFS"),
    "fallocate": ("EIO", "ENOSPC", "EDQUOT"),
    "ftruncate": ("EIO",),
    "fchmod": ("EIO", "EROFS"),
    "set_direct": ("EIO",),
    "flock": ("ENOLCK",),
}
_NAMES = frozenset({"mkdir", "link", "rename", "open"})
_REMOVALS = frozenset({"unlink", "rmdir"})
_BYTES = frozenset({"pwrite", "fallocate"})
_SYNCS = frozenset({"fsync", "fdatasync"})
#: What a disk in this state refuses; of `open`, only what writes.
LASTING: dict[str, frozenset[str]] = {
    "ENOSPC": _NAMES | _BYTES,
    "EDQUOT": _NAMES | _BYTES,
    "EROFS": _NAMES | _REMOVALS | _BYTES | _SYNCS | {"ftruncate", "fchmod"},
    "EIO": _NAMES | _REMOVALS | _BYTES | _SYNCS | {"ftruncate", "fchmod", "preadv", "listdir"},
}
_RANDOM = re.compile(r"(\.tmp-(?:trash-)?step_\d+(?:\.bin(?:\.sha256)?)?)-[0-9a-f-]+")


@dataclass(frozen=True)
class Site:
    """The ``nth`` call of ``op`` on a path that fits the pattern, below the run directory."""

    op: str
    path: str
    nth: int

    def fault(self, run: Path, kind: str) -> Fault:
        """Return the fault that strikes here."""
        fault = Fault(self.op, f"{run}{self.path}", self.nth)
        if kind == "short":
            return replace(fault, short_bytes=3)
        return replace(fault, error=kind)


@dataclass
class Result:
    """What an attempt did.

    Attributes:
        error: What it raised.
        steps: Bodies that ran to their end.
        weights: What the program held at the end.
        leaks: Descriptors and threads that are there and weren't before.
    """

    error: BaseException | None = None
    steps: list[int] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


class Broken(RecordingOps):
    """A disk that refuses from its ``nth`` change on; ``struck`` counts what it refused."""

    def __init__(self, kind: str, nth: int) -> None:
        super().__init__()
        self.struck = 0
        self._kind = kind
        self._left = nth

    def _around(self, call: Call, do: Any, args: tuple[Any, ...]) -> Any:
        if is_refused(call, self._kind):
            with self._guard:
                self._left -= 1
                refuses = self._left < 0
                self.struck += refuses
            if refuses:
                code = int(getattr(errno, self._kind))
                raise OSError(code, os.strerror(code), call.path)
        return super()._around(call, do, args)


def is_refused(call: Call, kind: str) -> bool:
    """Return whether a disk in this state refuses such a call."""
    if call.op == "open" and kind != "EIO":
        changes = os.O_CREAT if kind in {"ENOSPC", "EDQUOT"} else os.O_CREAT | os.O_RDWR
        return bool(call.args[0] & changes)
    return call.op in LASTING[kind]


def find_sites(calls: Iterable[Call], run: Path) -> list[Site]:
    """Return where faults can strike: each operation of an attempt, in order."""
    seen: Counter[tuple[str, str]] = Counter()
    sites = []
    for call in calls:
        if call.path.startswith(str(run)):
            path = _RANDOM.sub(r"\1-*", call.path.removeprefix(str(run)))
            seen[call.op, path] += 1
            sites.append(Site(call.op, path, seen[call.op, path]))
    return sites


def attempt(
    run: Path, ops: RecordingOps | None = None, until: int = UNTIL, **settings: Any
) -> Result:
    """Return what came of an attempt that resumes and trains on."""
    before, threads = _descriptors(), set(threading.enumerate())
    result = Result()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with use_ops(ops or RecordingOps()):
        try:
            settings = {"every": EVERY, "keep_last": 1, "deadline_secs": 0.15, **settings}
            with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, **settings) as ckpt:
                for step in ckpt.steps(until):
                    optimizer.zero_grad()
                    loss = model(torch.rand(4, 3)).square().mean()
                    loss.backward()
                    optimizer.step()
                    ckpt.record(loss=loss, twice=2 * float(loss.detach()))
                    result.steps.append(step)
        except Exception as error:  # noqa: BLE001 - judged below
            result.error = error
    result.weights = [parameter.tolist() for parameter in model.parameters()]
    result.leaks = sorted(_descriptors() - before)
    result.leaks += [thread.name for thread in set(threading.enumerate()) - threads]
    return result


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if path.startswith("/"):  # not the sockets of a process group
            found.add(f"{fd} {path}")
    return found


def judge(
    run: Path, result: Result, unbroken: Result, kind: str, *, removals_fail: bool
) -> list[str]:
    """Return what is wrong after an attempt that met a fault.

    Args:
        run: The run directory.
        result: Of the attempt.
        unbroken: Of one that met no fault.
        kind: What the system said.
        removals_fail: Nothing could be removed, or not all: temporary files may be left.
    """
    wrong = judge_rank(run, result, unbroken, kind)
    if lock_holder(run / "run.lock") is not None:
        wrong.append("the lock is held")
    if not removals_fail:
        wrong += [f"left: {name}" for name in _remains(run)]
    wrong += _judge_points(run)
    store = GenerationStore(run)
    if result.error is None and store.steps()[-1] != UNTIL:
        wrong.append(f"it ended well without a point of its last step: {store.steps()}")
    return wrong


def judge_rank(run: Path, result: Result, unbroken: Result, kind: str) -> list[str]:
    """Return what is wrong with what an attempt did in this process: for any rank."""
    wrong = [f"left: {leak}" for leak in result.leaks]
    wrong += _judge_error(run, result, kind)
    if result.steps and result.steps != unbroken.steps:
        wrong.append(f"training did not go on: {result.steps}")
    return wrong


def judge_next(run: Path, again: Result, unbroken: Result) -> list[str]:
    """Return what is wrong after the next attempt, which met no fault."""
    if again.error is not None:
        return [f"the next start failed: {again.error!r}"]
    wrong = []
    store = GenerationStore(run)
    if again.weights != unbroken.weights:
        wrong.append("the next start ended otherwise than an unbroken run")
    if [step for step, _ in read_loss(run)] != list(range(1, UNTIL + 1)):
        wrong.append(f"losses: {read_loss(run)}")
    wrong += [f"left after the next start: {name}" for name in _remains(run)]
    if store.steps() != [UNTIL] or store.verified_at(UNTIL) is None:
        wrong.append(f"after the next start: {store.steps()}")
    if not store.bin_path(UNTIL).exists():
        wrong.append("no .bin after the next start")
    replayed = [event for event in read_journal(run) if event["event"] == "replay_differs"]
    return wrong + [f"replayed otherwise: {event}" for event in replayed]


def _judge_error(run: Path, result: Result, kind: str) -> list[str]:
    error = result.error
    if error is None:
        return []
    if not isinstance(error, DistCkptError):
        return [f"a foreign error: {error!r}"]
    wrong = []
    told = [str(error), *(str(event) for event in read_journal(run) if "error" in str(event))]
    if kind != "short" and not any(kind in text for text in told):
        wrong.append(f"the message doesn't say {kind}: {error}")
    if not error.next_step:
        wrong.append(f"no next step: {error!r}")
    return wrong


def _judge_points(run: Path) -> list[str]:
    store = GenerationStore(run)
    steps = store.steps()
    wrong = [] if steps else ["no generation is left"]
    for step in steps:
        try:
            store.verify(store.manifest(step))
        except DistCkptError as error:
            wrong.append(f"generation {step}: {error}")
    return wrong


def _remains(run: Path) -> list[str]:
    return [
        str(path.relative_to(run))
        for path in run.rglob(".*")
        if path.name.startswith(".tmp") or path.name.endswith(".tmp")
    ]


def make_base(folder: Path, **settings: Any) -> Path:
    """Return a run with one generation, of step ``START``."""
    run = folder / "run"
    done = attempt(run, until=START, **settings)
    if done.error is not None:
        raise done.error
    return run


def copy_run(base: Path, folder: Path) -> Path:
    """Return a copy of a run, hard links among it kept."""
    run = folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copytree(base, run)
    return run


def retried_syncs(calls: Sequence[Call], struck: Call) -> list[str]:
    """Return what is wrong with the syncs after one that failed: it may not just be tried again.

    The kernel reports a failed write once, and takes the pages for clean from then on: a second
    sync that succeeds says nothing. Only what is written anew in between makes it mean something.
    """
    syncs = [at for at, call in enumerate(calls) if call.op in _SYNCS and call.path == struck.path]
    failed = next(at for at in syncs if calls[at] is struck)
    good, again = max((at for at in syncs if at < failed), default=0), _next(syncs, failed)
    pending = _offsets(calls[good:failed], struck.path)
    if again is None or not pending:
        return []  # never again; or a directory, which is judged by what lies in it
    anew = _offsets(calls[failed:again], struck.path)
    if anew and min(anew) <= min(pending):
        return []
    return [f"{struck.op} of {struck.path} was tried again, without its bytes"]


def _next(numbers: Sequence[int], after: int) -> int | None:
    return next((number for number in numbers if number > after), None)


def _offsets(calls: Sequence[Call], path: str) -> list[int]:
    return [call.args[1] for call in calls if call.op == "pwrite" and call.path == path]


def once(run: Path, site: Site, kind: str) -> FaultyOps:
    """Return storage that fails there once."""
    return FaultyOps(site.fault(run, kind))
