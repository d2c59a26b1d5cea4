"""Running a piece of a test on several real ranks, and striking some of them.

    def body(ctx: RankContext, value: int) -> list[int]:     # at the top of a test module
        comm = connect(5.0)
        ctx.reach("agreeing")                                # a point that a Strike can name
        return comm.agree([value + ctx.rank])

    results = run_ranks(2, body, 7, strikes=[Strike("agreeing", rank=1, sig=signal.SIGKILL)])

Each rank is a process of its own, forked from a server that has torch imported already (20 ms
instead of 3 s), or with ``fresh=True`` a Python of its own, where the end of the interpreter is
what is tested. What the body returns comes back as JSON. Ranks are initialised with gloo on
loopback unless ``init=False``. All children are reaped, whatever happens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

__all__ = ["RankContext", "RankResult", "RanksHungError", "Strike", "run_ranks"]

Body = Callable[..., Any]

POLL_SECS = 0.01
#: `torch._dynamo` is what the first optimizer or DDP imports: 1.5 s of CPU in each child otherwise;
#: what shards is as much again.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "numpy",
    "torch._dynamo",
    "dist_ckpt.service",
]
STORE_WAIT_SECS = 20.0


@dataclass(frozen=True)
class Strike:
    """A signal for a rank, once that rank (or ``when_rank``) has reached a point of the body."""

    point: str
    rank: int
    sig: signal.Signals = signal.SIGKILL
    delay_secs: float = 0.1
    when_rank: int | None = None


@dataclass(frozen=True)
class RankResult:
    """What became of one rank.

    Attributes:
        rank: Its number.
        returncode: 0 when the body returned, 1 when it raised, -9 when it was killed (also: stopped
            ones, at the end).
        value: What the body returned, through JSON; None when it didn't return.
        stderr: All that it wrote on its standard error; a traceback among it when the body raised.
        struck: The signals that were sent to it while it lived.
    """

    rank: int
    returncode: int
    value: Any
    stderr: str
    struck: tuple[int, ...] = ()


class RanksHungError(AssertionError):
    """Some ranks didn't end in time; the message holds the stacks of their threads."""


@dataclass(frozen=True)
class RankContext:
    """What a body knows about its place."""

    rank: int
    world_size: int
    folder: Path

    def reach(self, point: str) -> None:
        """Others, and the strikes, see that this rank has come to a point of the body."""
        (self.folder / f"{point}.{self.rank}").touch()

    def reached(self, point: str, rank: int) -> bool:
        """Say whether a rank has come to a point."""
        return (self.folder / f"{point}.{rank}").exists()

    def wait_for(self, point: str, rank: int, secs: float = 30.0) -> None:
        """A rank has come to a point; `TimeoutError` otherwise."""
        deadline = time.monotonic() + secs
        while not self.reached(point, rank):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} didn't reach {point!r} within {secs} s")
            time.sleep(POLL_SECS)


@dataclass(frozen=True)
class _Order:
    """What a child is told; plain values only."""

    rank: int
    world_size: int
    folder: str
    body: tuple[str, str]
    args: str
    env: dict[str, str]
    init: bool
    store: str
    path: list[str] = field(default_factory=lambda: list(sys.path))


class _Child(Protocol):
    pid: int

    def poll(self) -> int | None: ...


# Children --------------------------------------------------------------------------------------


def _child_main(order: _Order) -> None:
    """Be a rank: run the body, write the result, wait until the others are done with our store."""
    folder = Path(order.folder)
    log = os.open(folder / f"stderr.{order.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    os.environ.update(order.env)
    sys.path[:] = order.path
    status = 0
    try:
        import torch

        torch.set_num_threads(1)
        if order.init:
            _init_group(order)
        body = _load(order.body)
        value = body(RankContext(order.rank, order.world_size, folder), *json.loads(order.args))
        part = folder / f"value.{order.rank}.part"
        part.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        part.rename(folder / f"value.{order.rank}")
    except BaseException:  # noqa: BLE001 - told by the status and on stderr
        traceback.print_exc()
        status = 1
    (folder / f"done.{order.rank}").touch()
    # Rank 0 hosts the store: it stays until the others need it no more, as torchrun's agent does.
    deadline = time.monotonic() + STORE_WAIT_SECS
    while not (folder / "release").exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECS)
    sys.exit(status)


def _init_group(order: _Order) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, Store, TCPStore

    limit = timedelta(seconds=STORE_WAIT_SECS)
    folder = Path(order.folder)
    store: Store
    if order.store == "file":
        store = FileStore(str(folder / "store"), order.world_size)
    else:
        # Rank 0 takes any free port and says which: no port is free until it is taken.
        port = folder / "port"
        if order.rank == 0:
            store = TCPStore(
                "127.0.0.1",
                0,
                order.world_size,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
            )
            part = folder / "port.part"
            part.write_text(str(store.port), encoding="ascii")
            part.rename(port)
        else:
            deadline = time.monotonic() + STORE_WAIT_SECS
            while not port.exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECS)
            number = int(port.read_text(encoding="ascii"))
            store = TCPStore("127.0.0.1", number, order.world_size, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=order.rank, world_size=order.world_size, timeout=limit
    )


def _locate(body: str | Body) -> tuple[str, str]:
    """Return file (or module) and function of a body, for the child to import."""
    if isinstance(body, str):
        module, _, name = body.partition(":")
        return module, name
    path = inspect.getsourcefile(body)
    if path is None or "<" in body.__qualname__ or "." in body.__qualname__:
        raise ValueError(f"{body.__qualname__} must be a function at the top of a module")
    return os.path.abspath(path), body.__qualname__


def _load(place: tuple[str, str]) -> Body:
    module_name, function = place
    if not module_name.endswith(".py"):
        return cast("Body", getattr(importlib.import_module(module_name), function))
    # By path: test modules have no package, and pytest imports them under names of its own.
    name = f"_body_{Path(module_name).stem}"
    spec = importlib.util.spec_from_file_location(name, module_name)
    if spec is None or spec.loader is None:
        raise ImportError(module_name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return cast("Body", getattr(module, function))


# The parent ------------------------------------------------------------------------------------


class _Forked:
    """A rank forked from the server."""

    def __init__(self, order: _Order) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._process = context.Process(target=_child_main, args=(order,), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode


class _Fresh:
    """A rank in a Python of its own."""

    def __init__(self, order: _Order) -> None:
        script = (
            "import json, sys; o = json.loads(sys.argv[1]); sys.path[:] = o['path']; "
            "from helpers import ranks; o['body'] = tuple(o['body']); "
            "ranks._child_main(ranks._Order(**o))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(order.__dict__)],
            env={**os.environ, **order.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()


def run_ranks(
    n: int,
    body: str | Body,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    store: str = "tcp",
    strikes: Sequence[Strike] = (),
    fresh: bool = False,
) -> list[RankResult]:
    """Every rank has run ``body(ctx, *args)`` and is reaped; results come by rank.

    Args:
        n: How many ranks.
        body: A function at the top of a module, or "module:function".
        args: Further arguments, plain enough for JSON.
        timeout: Limit for all of it, in seconds; then `RanksHungError` with the stacks.
        env: Added to the environment of each rank.
        init: Whether the default group is initialised (gloo) before the body.
        store: "tcp" (rank 0 hosts it) or "file".
        strikes: Signals for ranks at points of the body. A stopped rank is killed when all others
            have ended.
        fresh: Whether each rank is an interpreter of its own, which also ends as one.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        orders = [
            _Order(
                rank, n, name, _locate(body), json.dumps(args), _rank_env(rank, n, env), init, store
            )
            for rank in range(n)
        ]
        children: list[_Child] = []
        try:
            children.extend((_Fresh if fresh else _Forked)(order) for order in orders)
            struck = _wait(children, folder, strikes, timeout)
        finally:
            for child in children:
                _reap(child)
        return [
            RankResult(
                rank,
                child.poll() or 0,
                _read_value(folder / f"value.{rank}"),
                _read_text(folder / f"stderr.{rank}"),
                tuple(struck[rank]),
            )
            for rank, child in enumerate(children)
        ]


def _rank_env(rank: int, n: int, env: Mapping[str, str] | None) -> dict[str, str]:
    here = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    fixed = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**{key: str(value) for key, value in here.items()}, **fixed, **(env or {})}


class _Striker:
    """Sends the strikes that are due, and remembers them."""

    def __init__(self, children: Sequence[_Child], folder: Path, strikes: Sequence[Strike]) -> None:
        self.struck: list[list[int]] = [[] for _ in children]
        self.stopped: set[int] = set()
        self._children = children
        self._folder = folder
        self._left = list(strikes)
        self._due: dict[Strike, float] = {}

    def strike(self) -> None:
        now = time.monotonic()
        for strike in list(self._left):
            rank = strike.rank if strike.when_rank is None else strike.when_rank
            if (self._folder / f"{strike.point}.{rank}").exists():
                self._due.setdefault(strike, now + strike.delay_secs)
            if now >= self._due.get(strike, now + 1):
                self._left.remove(strike)
                self._send(strike)

    def _send(self, strike: Strike) -> None:
        child = self._children[strike.rank]
        if child.poll() is None:
            os.kill(child.pid, strike.sig)
            self.struck[strike.rank].append(int(strike.sig))
        if strike.sig == signal.SIGSTOP:
            self.stopped.add(strike.rank)
        elif strike.sig == signal.SIGCONT:
            self.stopped.discard(strike.rank)


def _wait(
    children: Sequence[_Child], folder: Path, strikes: Sequence[Strike], timeout: float
) -> list[list[int]]:
    """Strike as asked; come back when every rank that isn't stopped has ended."""
    deadline = time.monotonic() + timeout
    striker = _Striker(children, folder, strikes)
    while True:
        striker.strike()
        running = [rank for rank, child in enumerate(children) if child.poll() is None]
        busy = [rank for rank in running if rank not in striker.stopped]
        if all((folder / f"done.{rank}").exists() for rank in busy):
            (folder / "release").touch()
        if not busy:
            return striker.struck
        if time.monotonic() > deadline:
            raise RanksHungError(_hung(children, running, folder, timeout))
        time.sleep(POLL_SECS)


def _hung(children: Sequence[_Child], running: Sequence[int], folder: Path, timeout: float) -> str:
    """Return the stacks of those that hang; faulthandler writes them on SIGABRT."""
    for rank in running:
        for sig in (signal.SIGCONT, signal.SIGABRT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[rank].pid, sig)
    time.sleep(1.0)
    told = "\n".join(
        f"--- rank {rank}\n{_read_text(folder / f'stderr.{rank}')}" for rank in range(len(children))
    )
    return f"ranks {list(running)} hadn't ended after {timeout} s\n{told}"


def _reap(child: _Child) -> None:
    while child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        time.sleep(POLL_SECS)


def _read_value(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
