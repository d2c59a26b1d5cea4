"""``save``, ``stop``: asking a live run. Layer 8."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from dist_ckpt.cli._address import RunArgument, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._text import duration, plain
from dist_ckpt.errors import SettingError
from dist_ckpt.runs import Answered, Run, ask_save, ask_stop

__all__ = ["COMMANDS"]

_TimeoutOption = Annotated[
    float, typer.Option(metavar="SECS", help="How long to wait for the answer.")
]


def save(
    run: RunArgument,
    *,
    timeout: _TimeoutOption = 600.0,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Have the run write a checkpoint and go on; returns when it is committed."""
    found = find_run(run)
    answered = ask_save(found, timeout_secs=_checked(timeout))
    return _answer(found, answered, f"step {answered.step} is committed")


def stop(
    run: RunArgument,
    *,
    timeout: _TimeoutOption = 600.0,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Have the run write a checkpoint and end; returns when its process is gone."""
    found = find_run(run)
    answered = ask_stop(found, timeout_secs=_checked(timeout))
    return _answer(found, answered, f"stopped, step {answered.step} is committed")


def _checked(timeout: float) -> float:
    if not timeout > 0:
        raise SettingError(
            f"--timeout {timeout} isn't a number of seconds above 0.",
            next_step="Give --timeout 60, say.",
            found=str(timeout),
        )
    return timeout


def _answer(run: Run, answered: Answered, text: str) -> Answer:
    document = {"run": run.name, "path": str(run.path), **dataclasses.asdict(answered)}
    line = f"{plain(run.name)}: {text} ({duration(answered.secs)})\n"
    return Answer(document, lambda: line)


COMMANDS = (save, stop)
