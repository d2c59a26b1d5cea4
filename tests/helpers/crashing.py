"""A process that dies at an instant, imitated: from there on nothing reaches the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Call, RecordingOps

#: Operations that change something; a crash between two others leaves nothing else.
CHANGES = {
    *("clone", "fallocate", "fchmod", "fdatasync", "fsync", "ftruncate", "link", "mkdir"),
    *("pwrite", "rename", "rmdir", "unlink"),
}


class Crash(BaseException):
    """The end of the imagined process; no handler of errors takes it for one."""


class UnsyncedOps(RecordingOps):
    """Does everything but wait for the disk: a process that dies takes nothing written with it."""

    def _around(self, call: Call, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return None if call.op in ("fsync", "fdatasync") else do(*args)


class CrashingOps(UnsyncedOps):
    """Does everything as it is up to the ``nth`` change, which isn't made, and nothing after it."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._left = nth
        self.struck: Call | None = None

    def _around(self, call: Call, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if call.op == "close":
            return do(*args)  # the kernel does it
        with self._guard:
            is_change = call.op in CHANGES or (call.op == "open" and args[1] & 0o100)  # O_CREAT
            self._left -= is_change
            if self.struck is None and self._left < 0:
                self.struck = call
        if self.struck is not None:
            raise Crash
        return super()._around(call, do, args)


def crash(nth: int, command: Callable[[], object]) -> Call | None:
    """Have a command crash before its change number ``nth``; None where it ended before that."""
    ops = CrashingOps(nth)
    try:
        with use_ops(ops):
            command()
    except Crash:
        pass
    return ops.struck
