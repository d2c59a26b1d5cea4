"""Proves the scripts of `wrong_scripts`; their processes are forked from one with torch imported.

20 ms instead of 2 s. A scenario's process is still its own: nothing but imported modules is shared.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from dist_ckpt.proof import Order, Plan, Proof, run_proof, write_report

SCRIPTS = Path(__file__).resolve().parent / "wrong_scripts"
ROOT = SCRIPTS.parents[2]

_NURSERY = """
import json, os, runpy, signal, sys, traceback
sys.path.insert(0, sys.argv[1])
import torch, dist_ckpt, dist_ckpt.service, dist_ckpt.loader
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.AdamW([parameter]).step()  # imports what the first optimizer imports

def child(order):
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["command"][1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in iter(sys.stdin.readline, ""):
    pid = os.fork()
    if pid == 0:
        child(json.loads(line))
    _, status = os.waitpid(pid, 0)
    sys.stdout.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\\n")
    sys.stdout.flush()
"""


class Nursery:
    """The process that scenarios are forked from."""

    def __init__(self) -> None:
        self.num_scenarios = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        atexit.register(self._process.kill)

    def launch(self, order: Order) -> int | None:
        """Run one order to its end."""
        self.num_scenarios += 1
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the nursery has no pipes")
        asked = {
            "command": list(order.command),
            "environ": order.whole_environ(),
            "log": str(order.log),
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], order.timeout_secs)[0]:
            raise TimeoutError(f"{order.command} takes too long")
        status: int = json.loads(self._process.stdout.readline())
        return status


@functools.cache
def nursery() -> Nursery:
    """Return the one nursery of this pytest process."""
    return Nursery()


def command_of(script: str, *arguments: str) -> list[str]:
    """Return the command of a script of `wrong_scripts`."""
    return ["python", str(SCRIPTS / f"{script}.py"), *arguments]


def prove(script: str, output: Path, **changes: Any) -> tuple[Proof, dict[str, Any]]:
    """Return the proof of a script, and what its ``verification.json`` holds."""
    plan = Plan(command_of(script), output, **{"timeout_secs": 60.0, **changes})
    proof = run_proof(plan, launch=nursery().launch)
    write_report(proof)
    document: dict[str, Any] = json.loads((output / "verification.json").read_bytes())
    return proof, document
