"""The launcher's command line: its own options, torchrun's, the script. Layer 7, pure.

torchrun's parser can't be asked: importing torch takes seconds, in which a signal would kill the
launcher. So this module knows only which of torchrun's options stand alone; every other one takes a
value. Whether an option exists is for torchrun to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dist_ckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_GRACE_SECS", "HELP", "LaunchOptions", "parse_options", "plan_torchrun_args"]

DEFAULT_GRACE_SECS = 120.0

HELP = f"""\
Usage: dist-ckpt run [OPTIONS] [TORCHRUN'S OPTIONS] SCRIPT [SCRIPT'S ARGUMENTS]

torchrun with signals that work. All of torchrun's options are passed on; without an
option for the rendezvous the job runs on this machine alone (--standalone), and without
--nproc-per-node as one process, whatever GPUs there are.

What differs from torchrun:
  SIGUSR1            reaches rank 0: the job writes a checkpoint and goes on
  SIGTERM, Ctrl-C    the job finishes its step, writes, and ends with status 0
  Ctrl-C twice       ends everything at once (status 130)
  held back          signals wait until the workers' handlers are installed
  SIGKILL            of launcher or agent: the workers write and end, none is left over
  lost nodes         another node's launcher is killed: the job writes, and restarts
                     (--max-restarts) with the nodes that are left (--nnodes 1:2)
  NOTIFY_SOCKET      systemd is told READY, STATUS, WATCHDOG and STOPPING
  exit status        the workers' own where they agree, else torchrun's; 69: nodes didn't meet

Options:
  --grace SECS          what a stop may take once delivered, then the job is killed;
                        longer while the bytes of its save move [{DEFAULT_GRACE_SECS:g}]
  --announce-wait SECS  how long a stop is held back for workers that have no handlers
                        yet, before torchrun is asked to end them [as --grace]; short
                        for scripts without dist_ckpt
  -h, --help            this text; torchrun's own: torchrun --help
"""

# Options of torchrun that take no value.
_FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")
_SHORT_FLAGS = ("-m",)
# Options (and PET_ variables) with which the user sets up the rendezvous.
_RENDEZVOUS = (
    "standalone",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "node-rank",
    "master-addr",
    "master-port",
)
_ONE_NODE = ("1", "1:1")


@dataclass(frozen=True)
class LaunchOptions:
    """A parsed command line. ``script_args`` starts with the script (or module) itself."""

    torchrun_args: tuple[str, ...]
    script_args: tuple[str, ...]
    grace_secs: float = DEFAULT_GRACE_SECS
    announce_wait_secs: float | None = None
    show_help: bool = False


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Split a command line where the script begins; nothing behind the script is looked at.

    Raises:
        UsageError: No script, or a bad value for one of the launcher's own options.
    """
    torchrun_args: list[str] = []
    own: dict[str, float] = {}
    at = 0
    while at < len(argv):
        token = argv[at]
        if token in {"-h", "--help"}:
            return LaunchOptions((), (), show_help=True)
        if token == "--":
            at += 1
            break
        if not token.startswith("-") or token == "-":
            break
        name, equals, value = token.partition("=")
        taken = 1 if equals or _is_flag(name) else 2
        if name in {"--grace", "--announce-wait"}:
            own[name] = _seconds(name, value if equals else _value_behind(argv, at))
        else:
            torchrun_args += argv[at : at + taken]
        at += taken
    if at >= len(argv):
        raise UsageError(
            "No script was given.",
            next_step="Usage: dist-ckpt run [torchrun's options] SCRIPT [arguments]; see --help.",
        )
    return LaunchOptions(
        tuple(torchrun_args),
        tuple(argv[at:]),
        grace_secs=own.get("--grace", DEFAULT_GRACE_SECS),
        announce_wait_secs=own.get("--announce-wait"),
    )


def plan_torchrun_args(torchrun_args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's options, with ``--standalone`` where no rendezvous was set up."""
    given = _given_options(torchrun_args)
    nnodes = given.get("nnodes", environ.get("PET_NNODES", "1"))
    chosen = any(
        name in given or f"PET_{name.upper().replace('-', '_')}" in environ for name in _RENDEZVOUS
    )
    if chosen or nnodes not in _ONE_NODE:
        return list(torchrun_args)
    return ["--standalone", *torchrun_args]


def names_a_file(torchrun_args: Sequence[str]) -> bool:
    """Return whether the script is a path that must exist: no module, no command."""
    given = _given_options(torchrun_args)
    return not ({"module", "no-python"} & given.keys())


def _given_options(torchrun_args: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    at = 0
    while at < len(torchrun_args):
        name, equals, value = torchrun_args[at].partition("=")
        if name in _SHORT_FLAGS:
            given["module"] = ""
        elif _is_flag(name):
            given[_whole_name(name, _FLAGS)] = ""
        elif equals:
            given[_whole_name(name)] = value
        else:
            given[_whole_name(name)] = torchrun_args[at + 1] if at + 1 < len(torchrun_args) else ""
            at += 1
        at += 1
    return given


def _is_flag(name: str) -> bool:
    """Return whether an option stands alone; torchrun takes underscores and short forms too."""
    if not name.startswith("--"):
        return name in _SHORT_FLAGS or len(name) > len("-r")  # "-r3" carries its value
    plain = name[2:].replace("_", "-")
    return any(flag.startswith(plain) for flag in _FLAGS)


def _whole_name(name: str, known: Sequence[str] = (*_RENDEZVOUS, "nnodes")) -> str:
    if not name.startswith("--"):
        return name
    plain = name[2:].replace("_", "-")
    return next((whole for whole in known if whole.startswith(plain)), plain)


def _value_behind(argv: Sequence[str], at: int) -> str:
    if at + 1 >= len(argv):
        raise UsageError(f"{argv[at]} needs a number of seconds.", next_step="See --help.")
    return argv[at + 1]


def _seconds(name: str, text: str) -> float:
    try:
        secs = float(text)
    except ValueError:
        secs = math.nan
    if not (math.isfinite(secs) and secs >= 0):
        raise UsageError(
            f"{name} takes a number of seconds, not {text!r}.", next_step=f"Give {name} 120, say."
        )
    return secs
