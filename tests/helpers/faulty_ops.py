"""Operations of storage that remember what was done, or that fail on purpose.

In one process: ``with use_ops(RecordingOps()) as ops`` or ``with use_ops(FaultyOps(Fault(...)))``.
In children: put the faults into the environment with ``faults_environment``, and have the script of
the test call ``install_from_environment()``; the library itself never looks there.

A test of a failure proves that the failure struck: by ``ops.strikes``, or in children by the file
``log``, one JSON line a strike, written before it strikes.
"""

from __future__ import annotations

import errno
import fnmatch
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_ckpt.storage import Ops, use_ops

ENVIRONMENT = "DIST_CKPT_TEST_FAULTS"

_NAMES = tuple(
    name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")
)


@dataclass(frozen=True)
class Call:
    """One operation: its name, the path (of the descriptor, too), and its other arguments."""

    op: str
    path: str
    args: tuple[Any, ...] = ()
    thread: str = ""


@dataclass(frozen=True)
class Fault:
    """What happens at the ``nth`` call of ``op`` on a path that fits ``path``.

    Attributes:
        op: Name of the operation, a pattern (``*`` for any).
        path: Pattern that the whole path, or its last component, has to fit.
        nth: 1 is the first such call.
        times: How many calls from the nth on; None for ever.
        error: Name of an errno, ``"ENOSPC"``: the call does nothing and raises it.
        short_bytes: The call takes or gives at most so many bytes.
        delay_secs: The call waits first, then goes on.
        kill: The process kills itself with SIGKILL instead of making the call.
        stop: The process stops itself with SIGSTOP, and makes the call when it is continued.
    """

    op: str
    path: str = "*"
    nth: int = 1
    times: int | None = 1
    error: str | None = None
    short_bytes: int | None = None
    delay_secs: float = 0.0
    kill: bool = False
    stop: bool = False

    def fits(self, op: str, path: str) -> bool:
        """Whether this call counts."""
        names = (path, os.path.basename(path))
        return fnmatch.fnmatchcase(op, self.op) and any(
            fnmatch.fnmatchcase(name, self.path) for name in names
        )


class _WatchedOps(Ops):
    """Sends every operation through ``_around`` with the path that it works on."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._guard = threading.Lock()

    def _around(self, call: Call, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def _watch(self, op: str, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        subject, *rest = args
        path = self._path_of(subject)
        plain = tuple(_plain(value) for value in rest)
        if op == "close":
            with self._guard:
                self._paths.pop(subject, None)
        result = self._around(Call(op, path, plain, threading.current_thread().name), do, args)
        if op == "open":
            with self._guard:
                self._paths[result] = path
        return result

    def _path_of(self, subject: int | str | os.PathLike[str]) -> str:
        if not isinstance(subject, int):
            return os.fspath(subject)
        with self._guard:
            known = self._paths.get(subject)
        # A descriptor that somebody else opened, such as the lock's.
        return known if known is not None else _path_from_proc(subject)


def _path_from_proc(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"fd:{fd}"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


def _watched(op: str) -> Callable[..., Any]:
    def method(self: _WatchedOps, *args: Any, **named: Any) -> Any:
        return self._watch(op, getattr(super(_WatchedOps, self), op), (*args, *named.values()))

    method.__name__ = op
    return method


for _name in _NAMES:
    setattr(_WatchedOps, _name, _watched(_name))


class RecordingOps(_WatchedOps):
    """Does everything as it is, and keeps ``calls`` in the order in which they began."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def names(self, path: str = "*") -> list[str]:
        """Return the operations on paths that fit, in order."""
        return [call.op for call in self.of("*", path)]

    def of(self, op: str, path: str = "*") -> list[Call]:
        """Return the calls that fit, in order."""
        fault = Fault(op, path)
        return [call for call in self.calls if fault.fits(call.op, call.path)]

    def _around(self, call: Call, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._guard:
            self.calls.append(call)
        return do(*args)


class FaultyOps(RecordingOps):
    """Does everything as it is, but for the faults; ``strikes`` lists the calls that were struck.

    Args:
        faults: Each counts its own calls. Of several that strike one call, each delays, and the
            first other effect counts.
        log: A file that gets a JSON line for each strike, before it strikes.
    """

    def __init__(self, *faults: Fault, log: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.faults = faults
        self.strikes: list[Call] = []
        self._log = log
        self._seen = [0] * len(faults)

    @property
    def struck(self) -> int:
        """How many calls were struck."""
        return len(self.strikes)

    def _around(self, call: Call, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._guard:
            self.calls.append(call)
        due = self._due(call)
        for fault in due:
            self._note(fault, call)
            if fault.delay_secs:
                time.sleep(fault.delay_secs)
        for fault in due:
            if fault.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault.error is not None:
                code = int(getattr(errno, fault.error))
                if call.op == "close":  # gives the descriptor back, also where it fails
                    do(*args)
                raise OSError(code, os.strerror(code), call.path)
            if fault.short_bytes is not None:
                args = _shortened(call.op, args, fault.short_bytes)
        return do(*args)

    def _due(self, call: Call) -> list[Fault]:
        due = []
        with self._guard:
            for at, fault in enumerate(self.faults):
                if fault.fits(call.op, call.path):
                    self._seen[at] += 1
                    over = self._seen[at] - fault.nth
                    if over >= 0 and (fault.times is None or over < fault.times):
                        due.append(fault)
        return due

    def _note(self, fault: Fault, call: Call) -> None:
        with self._guard:
            self.strikes.append(call)
        if self._log is not None:
            line = json.dumps(
                {"pid": os.getpid(), "call": asdict(call), "fault": asdict(fault)}, default=str
            )
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, line.encode() + b"\n")
            finally:
                os.close(fd)


def _shortened(op: str, args: tuple[Any, ...], size_bytes: int) -> tuple[Any, ...]:
    if op == "pwrite":
        fd, data, offset = args
        return fd, memoryview(data)[:size_bytes], offset
    if op == "preadv":
        fd, buffers, offset = args
        return fd, _first_bytes(buffers, size_bytes), offset
    msg = f"{op} can't be short"
    raise ValueError(msg)


def _first_bytes(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    kept = []
    for buffer in buffers:
        kept.append(memoryview(buffer)[: max(0, size_bytes)])
        size_bytes -= len(buffer)
    return kept


def faults_environment(
    faults: Iterable[Fault], *, log: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Return the variables that make ``install_from_environment`` install the faults."""
    node = {
        "faults": [asdict(fault) for fault in faults],
        "log": None if log is None else os.fspath(log),
    }
    return {ENVIRONMENT: json.dumps(node)}


def install_from_environment(environ: Mapping[str, str] = os.environ) -> FaultyOps | None:
    """Put the faults of the environment in force for the rest of this process, if there are any."""
    text = environ.get(ENVIRONMENT)
    if not text:
        return None
    node = json.loads(text)
    ops = FaultyOps(*(Fault(**fault) for fault in node["faults"]), log=node["log"])
    use_ops(ops).__enter__()
    return ops


def read_strikes(log: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what children wrote into the log: ``pid``, ``call`` and ``fault`` of each strike."""
    path = Path(log)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
