"""``import``: a run begun from a .bin alone. Layer 8.

The command does the work: its `Checkpointer` finds the file in the environment, takes weights and
moments over and commits them as the run's first generation.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_ckpt import storage
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._text import plain
from dist_ckpt.errors import CorruptFileError, IncompleteError, UsageError
from dist_ckpt.export import read_bin
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.history import read_journal
from dist_ckpt.runs import Depth, check_bin, find_origin, refuse_export
from dist_ckpt.wording import counted

__all__ = ["COMMANDS"]

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE.bin", help="Weights and both moments.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The new run directory.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What trains, as in a shell.")
    ],
    *,
    only: Annotated[
        bool, typer.Option("--only", help="End once the first generation is committed.")
    ] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Start a run from a .bin: COMMAND builds the model that it must fit, and trains on.

    Weights, moments and the step are the file's; learning rate, schedule, data and random state are
    the command's own. Returns when the command ends. Status 1: the file is faulty. 2: it doesn't
    fit, or the command failed.
    """
    path, target = Path(os.path.abspath(file)), Path(os.path.abspath(run))
    step, num_params = _check_file(path, quiet=as_json)
    _check_run(target)
    status = _carry_out(command, _environment(path, target, step if only else None), quiet=as_json)
    event = _require_done(command, status, _find_import(target, path))
    document = {
        "file": str(path),
        "run": str(target),
        "step": step,
        "num_params": num_params,
        "stateless": event["stateless"],
        "notes": event["notes"],
        "latest_step": StoredGenerations(target).steps()[-1],
    }

    def tell() -> str:
        parameters = counted(num_params, "parameter")
        head = f"{target}: step {step} imported, {parameters} with both moments"
        lines = [head, *(f"  {note}" for note in document["notes"])]
        if document["latest_step"] != step:
            lines.append(f"  trained on to step {document['latest_step']}")
        return "".join(f"{plain(line)}\n" for line in lines)

    return Answer(document, tell)


def _check_file(path: Path, *, quiet: bool) -> tuple[int, int]:
    """Return step and number of parameters of a file that is whole, as far as can be told."""
    if storage.is_dir(path):
        raise UsageError(
            f"{path} is a directory; an import begins from one file.",
            next_step="Name a step_N.bin in it; to branch off a run: `dist-ckpt fork RUN@N NEW`.",
            path=str(path),
        )
    refuse_export(path)
    state = read_bin(path)
    with byte_bar("verifying", storage.file_size(path), quiet=quiet) as progress:
        finding = check_bin(path, Depth(), origin=find_origin(path), progress=progress)
    if not finding.is_whole:
        faults = [*finding.faults, *([finding.refused] if finding.refused else [])]
        raise CorruptFileError(
            f"{path} isn't whole, nothing was started: "
            + " ".join(fault.message for fault in faults),
            next_step="Use another step's file.",
            path=str(path),
        )
    return state.step, state.num_params


def _check_run(run: Path) -> None:
    steps = StoredGenerations(run).steps() if storage.exists(run) else []
    if steps:
        raise UsageError(
            f"{run} has generations up to step {steps[-1]}; an import begins a run.",
            next_step="Give a new run directory.",
            path=str(run),
        )


def _environment(path: Path, run: Path, stop_at: int | None) -> dict[str, str]:
    from dist_ckpt import service  # noqa: PLC0415 - imports torch, as looking commands must not

    chosen = {service.IMPORT_VARIABLE: str(path), service.RUN_DIR_VARIABLE: str(run)}
    if stop_at is not None:
        chosen[service.STOP_AT_VARIABLE] = str(stop_at)
    return {**os.environ, **chosen}


def _carry_out(command: Sequence[str], environment: Mapping[str, str], *, quiet: bool) -> int:
    """Return the command's status once it has ended; signals that end or ask go on to it."""
    from dist_ckpt.proof import resolve_command  # noqa: PLC0415 - imports torch, as above

    words = resolve_command(command)
    # One JSON document belongs on stdout: what the command says there goes to stderr then.
    with subprocess.Popen(words, env=environment, stdout=2 if quiet else None) as child:
        # Ctrl-C reaches the command by itself, which ends after a checkpoint: wait for that.
        before: dict[Any, Any] = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
        for number in _FORWARDED:
            before[number] = signal.signal(number, lambda which, _: child.send_signal(which))
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _find_import(run: Path, path: Path) -> dict[str, Any] | None:
    """Return the journal's event of the import, if its generation was committed."""
    if not storage.exists(run) or not StoredGenerations(run).steps():
        return None
    events = read_journal(run)
    saved = any(e["event"] == "saved" and "import" in e.get("reasons", []) for e in events)
    found = [e for e in events if e["event"] == "imported" and e.get("file") == str(path)]
    return found[-1] if found and saved else None


def _require_done(
    command: Sequence[str], status: int, event: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Return the journal's event of the import where all went well."""
    words = shlex.join(command)
    if event is None:
        raise IncompleteError(
            f"`{words}` ended with status {status} and imported nothing.",
            next_step="What it printed says why."
            if status
            else "It must enter a Checkpointer, which does the importing.",
            command=list(command),
            status=status,
        )
    if status:
        raise IncompleteError(
            f"Step {event['step']} was imported, but then `{words}` ended with status {status}.",
            next_step="The run has its first generation: start the command on it without import.",
            command=list(command),
            status=status,
        )
    return event


COMMANDS = (import_,)
