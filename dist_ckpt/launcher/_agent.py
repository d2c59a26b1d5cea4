"""torchrun's agent as a child of the launcher: ``python -m dist_ckpt.launcher._agent``. Layer 7.

It runs torchrun itself, in this process, and adds what the launcher needs: it ends its workers when
the launcher dies, doesn't restart a job that was asked to stop, gives workers the same time on
every path, and leaves the exit status of each worker in ``result.json`` of the launch's directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dist_ckpt.announce import (
    AGENT_PID_ENV,
    LAUNCH_DIR_ENV,
    LAUNCH_ID_ENV,
    any_lost_a_peer,
    any_stopped,
    die_with_parent,
    read_announcements,
    stop_requested,
    take_again,
    write_json,
)
from dist_ckpt.launcher._names import (
    LAUNCHER_PID_ENV,
    RESULT_NAME,
    SHUTDOWN_ENV,
    UNMET_STATUS,
    say,
)
from dist_ckpt.launcher._processes import launched_as, send_signal

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main"]

# What `StoppableAgent` overrides; private to torch, so a release may move it.
_SEAMS = ("_start_workers", "_monitor_workers", "_shutdown")
# Errors of torch's rendezvous that come without a text.
_WORDLESS = {
    "RendezvousTimeoutError": "not all of them came in time",
    "RendezvousClosedError": "the others have ended",
}
_LEFTOVER_SECS = 5.0
_POLL_SECS = 0.05


def main(argv: list[str]) -> int:
    """Run torchrun with these arguments until its workers have ended; return the exit status."""
    launcher_pid = int(os.environ.pop(LAUNCHER_PID_ENV, "0"))
    progress = _Progress()

    def end(signum: int, _frame: FrameType | None) -> None:
        # Until torch has its own handlers there are no workers, only a directory to remove.
        progress.asked_to_end = True
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != launcher_pid:
        return 1  # the launcher died before the kernel was asked to tell
    os.environ[AGENT_PID_ENV] = str(os.getpid())
    directory = Path(os.environ[LAUNCH_DIR_ENV])
    try:
        return _run_torchrun(argv, directory, progress)
    finally:
        if os.getppid() != launcher_pid:
            _clean_up_for_the_launcher(directory)


def _run_torchrun(argv: list[str], directory: Path, progress: _Progress) -> int:
    from torch.distributed import DistError  # noqa: PLC0415 - seconds
    from torch.distributed import run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415
        ChildFailedError,
        record,
    )
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415

    parser = torchrun.get_args_parser()
    parser.error = _usage_error  # type: ignore[method-assign]
    options = parser.parse_args(argv)
    with contextlib.suppress(ValueError):  # "gpu", "auto": torchrun counts them
        if int(options.nproc_per_node) < 1:
            _usage_error(
                f"--nproc-per-node {options.nproc_per_node} starts no rank: give at least 1."
            )
    _use_our_agent(directory, progress)
    try:
        record(torchrun.run)(options)
    except ChildFailedError as error:
        if not progress.stopping:
            sys.stderr.write(f"{error}\n")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError) as error:
        if os.environ.get("DIST_CKPT_DEBUG"):
            raise
        progress.stopping |= stop_requested(directory)
        return _say_apart(_why_unmet(error), progress)
    except (ValueError, AssertionError) as error:
        if progress.started or os.environ.get("DIST_CKPT_DEBUG"):
            raise
        sys.stderr.write(f"dist-ckpt run: torchrun refused: {_reason(error)}\n")
        return 2
    if progress.deserted:
        say("another node was lost, and no restarts are left (--max-restarts); all is saved.")
    return int(progress.deserted)


@dataclass
class _Progress:
    started: bool = False  # workers were started at least once
    asked_to_end: bool = False  # SIGTERM came before torch handled it
    deserted: bool = False  # the workers ended since another node was lost; no restarts are left
    stopping: bool = False  # the job was asked to end, by the launcher or at its ranks


def _reason(error: Exception) -> str:
    """Return why torchrun refused; where it has no words for it, in which place of it."""
    text = str(error).strip()
    if text:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"it says no more than line {frame.lineno} of {frame.filename}. "
        "Look at the numbers that its options were given (--nnodes, --nproc-per-node)."
    )


def _why_unmet(error: Exception) -> str:
    """Return one line; of an error that wraps another the inner one says more."""
    cause = error.__cause__ or error
    name = type(cause).__name__
    text = str(cause).strip() or _WORDLESS.get(name, name)
    return text.splitlines()[0].rstrip(".")


def _say_apart(why: str, progress: _Progress) -> int:
    """Say why the nodes don't train together, and return the agent's status."""
    if progress.stopping:  # the first one to end may have been the one with the store
        return 1
    if "server socket has failed" in why and not progress.started:
        is_taken = "EADDRINUSE" in why
        what = "the rendezvous' port is in use" if is_taken else "no rendezvous can be hosted"
        say(
            f"{what} here ({why}). Choose another port (--master-port, or the one in "
            "--rdzv-endpoint), or end what has this one."
        )
        return 2
    if progress.started:
        say(f"the nodes of this job lost each other ({why}).")
    else:
        say(
            f"the nodes of this job didn't meet ({why}). Start the launcher on each of them, with "
            "the same --nnodes, --rdzv-endpoint and --rdzv-id, and this one again."
        )
    # Of its own also where they had met: how the workers ended is what they did for a restart.
    return UNMET_STATUS


def _usage_error(message: str) -> NoReturn:
    sys.stderr.write(f"dist-ckpt run: {message}\nSee torchrun --help for its options.\n")
    raise SystemExit(2)


def _agent_of_torch(api: Any) -> Any:
    """Return torchrun's own agent, or end where this torch has none that we know."""
    import torch  # noqa: PLC0415

    base = getattr(api, "LocalElasticAgent", None)
    missing = [name for name in _SEAMS if not callable(getattr(base, name, None))]
    if not missing:
        return base
    say(
        f"torch {torch.__version__} has no LocalElasticAgent with {', '.join(missing)}, by which "
        "the launcher works. Use a torch that it was tested with (2.13), or plain torchrun, with "
        "torchrun's own signals."
    )
    raise SystemExit(2)


def _use_our_agent(directory: Path, progress: _Progress) -> None:
    # torchrun takes no agent class; it looks this name up when it launches.
    from torch.distributed.elastic.agent.server.api import (  # noqa: PLC0415
        RunResult,
        WorkerState,
    )
    from torch.distributed.launcher import api  # noqa: PLC0415

    base: Any = _agent_of_torch(api)

    class StoppableAgent(base):  # type: ignore[misc]
        """The agent of torchrun; a stop is final, and the end of each worker is written down."""

        def _start_workers(self, worker_group: Any) -> Any:
            if progress.asked_to_end:  # where the exception was swallowed
                raise SystemExit(128 + signal.SIGTERM)
            progress.started = True
            with contextlib.suppress(OSError):
                (directory / RESULT_NAME).unlink(missing_ok=True)
            take_again(directory)  # of workers that failed after they asked for it
            started = super()._start_workers(worker_group)
            _give_time(self._pcontext, float(getattr(self, "_shutdown_timeout", 30)))
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            # Looked at before torch sees that a worker has ended: it then sends SIGTERM to the
            # others, and what they stop for is no wish to end the job.
            progress.stopping |= stop_requested(directory) or any_stopped(
                directory, set(self._pcontext.pids().values())
            )
            if progress.stopping:
                self._remaining_restarts = 0
            pids = set(self._pcontext.pids().values())
            result = super()._monitor_workers(worker_group)
            if result.state != WorkerState.SUCCEEDED or progress.stopping:
                return result
            # They wrote and ended with 0, but the training isn't over.
            if any_lost_a_peer(directory, pids):  # as after a failure
                progress.deserted = self._remaining_restarts <= 0
                return RunResult(state=WorkerState.UNHEALTHY)
            if take_again(directory):
                # A pivot: one restart more than the user allows for failures, and counted as one.
                worker_group.spec.max_restarts += 1
                self._restart_workers(worker_group)
                return RunResult(state=worker_group.state)
            return result

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            try:
                super()._shutdown(*args, **kwargs)
            finally:
                self._write_result()

        def _write_result(self) -> None:
            codes = {
                str(worker.global_rank): code
                for worker in self._worker_group.workers
                if (code := _exit_code(self._pcontext, worker.local_rank)) is not None
            }
            with contextlib.suppress(OSError):
                write_json(directory / RESULT_NAME, {"exit_codes": codes})

    api.LocalElasticAgent = StoppableAgent  # type: ignore[attr-defined]


def _give_time(context: Any, timeout_secs: float) -> None:
    """Make the shutdown time that was set count on the path where a worker failed, too."""
    original = context.close

    def close(death_sig: Any = None, timeout: float = 30) -> None:
        original(death_sig, max(timeout, timeout_secs))

    context.close = close


def _exit_code(context: Any, local_rank: int) -> int | None:
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        code = handlers[local_rank].proc.poll() if local_rank in handlers else None
    else:  # --run-path: multiprocessing
        processes = getattr(getattr(context, "_pc", None), "processes", ())
        code = processes[local_rank].exitcode if local_rank < len(processes) else None
    return None if code is None else int(code)


def _clean_up_for_the_launcher(directory: Path) -> None:
    """End what is left when the launcher is gone; workers that still write get their time."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    name = os.environ[LAUNCH_ID_ENV]
    grace_secs = float(os.environ.get(SHUTDOWN_ENV, _LEFTOVER_SECS))
    announced = read_announcements(directory)
    end = time.monotonic() + (grace_secs if announced else _LEFTOVER_SECS)
    for process in launched_as(name):
        send_signal(process.pid, process.start_time, signal.SIGTERM)
    while time.monotonic() < end and launched_as(name):
        time.sleep(_POLL_SECS)
    for process in launched_as(name):
        send_signal(process.pid, process.start_time, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
