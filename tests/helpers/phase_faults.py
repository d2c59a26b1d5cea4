"""Strikes a rank in a phase of a save or a load: an exception, a hang, a death.

Where storage's faults strike system calls, these strike the steps of the work: the function that
does a phase raises, never comes back, or takes its process with it. A child of a test finds its
faults in the environment.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["PHASES", "PhaseFault", "install_phase_faults", "phase_environment", "phase_strikes"]

_VARIABLE = "TEST_PHASE_FAULTS"

#: phase → module, class (or none) and function that does it; those of a load are the last two.
PHASES = {
    "capture": ("dist_ckpt.capture", "Captured", "tensors"),
    "staging": ("dist_ckpt.staging", "Staging", "stage"),
    "write": ("dist_ckpt.staging._staged", "Staged", "write"),
    "gather": ("dist_ckpt.comm._ranks", "RankComm", "exchange"),
    "commit": ("dist_ckpt.generations", "GenerationStore", "commit"),
    "verify": ("dist_ckpt.service._finish", None, "_read_back"),
    "plan": ("dist_ckpt.resume._restore", None, "Reader"),
    "read": ("dist_ckpt.resume._read", "Reader", "into"),
}


@dataclass(frozen=True)
class PhaseFault:
    """What happens at the ``nth`` time that a rank comes to a phase: raise, hang or die."""

    phase: str
    how: str
    nth: int = 1


def phase_environment(faults: Sequence[PhaseFault], log: Path) -> dict[str, str]:
    """Return the variables by which a child has these faults; strikes are logged there."""
    return {_VARIABLE: json.dumps({"log": str(log), "faults": [asdict(one) for one in faults]})}


def phase_strikes(log: Path) -> list[str]:
    """Return the phases that were struck, in order."""
    return log.read_text(encoding="utf-8").split() if log.exists() else []


def install_phase_faults() -> None:
    """The faults that the environment tells of are in force in this process."""
    text = os.environ.get(_VARIABLE)
    if not text:
        return
    told = json.loads(text)
    for one in told["faults"]:
        _install(PhaseFault(**one), Path(told["log"]))


def _install(fault: PhaseFault, log: Path) -> None:
    import importlib

    module, class_name, name = PHASES[fault.phase]
    home: Any = importlib.import_module(module)
    home = getattr(home, class_name) if class_name else home
    original: Callable[..., Any] = getattr(home, name)
    count = 0

    @functools.wraps(original, updated=())
    def struck(*args: Any, **named: Any) -> Any:
        nonlocal count
        # Of the exchanges only the one in which reports are gathered for the commit, and of the
        # looks at the tensors those of a save.
        is_meant = {
            "gather": lambda: str(args[1]).startswith("writing"),
            "capture": lambda: sys._getframe(2).f_code.co_name == "save",
        }
        if is_meant.get(fault.phase, lambda: True)():
            count += 1
            if count == fault.nth:
                _strike(fault, log)
        return original(*args, **named)

    setattr(home, name, struck)


def _strike(fault: PhaseFault, log: Path) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{fault.phase}\n")
    if fault.how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.how == "hang":
        threading.Event().wait()
    raise RuntimeError(f"struck in {fault.phase}")
