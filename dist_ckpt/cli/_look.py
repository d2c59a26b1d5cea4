"""``ls``, ``status``, ``show``: looking at a run. Layer 8."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_ckpt.cli._address import AddressArgument, RunArgument, find, find_generation, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._show import describe_bin, describe_generation, tell_bin, tell_generation
from dist_ckpt.cli._text import ago, duration, first_line, plain, size, table
from dist_ckpt.errors import SettingError
from dist_ckpt.generations import VANISHED_ADVICE
from dist_ckpt.runs import (
    Row,
    State,
    Status,
    is_bin,
    list_rows,
    read_status,
    require_no_file,
)
from dist_ckpt.wording import counted

__all__ = ["COMMANDS"]

#: Where what is told in one line can be read whole.
_MORE = "`--json` and the journal have all"
_ROW_NAMES = tuple(field.name for field in dataclasses.fields(Row))


def ls(run: RunArgument, *, as_json: JsonOption = False) -> Answer:  # noqa: ARG001 - see JsonOption
    """List the generations of a run."""
    found = find(run).run
    rows = list_rows(found.store, found.proven())
    now = time.time()
    document = {
        "run": found.name,
        "path": str(found.path),
        "generations": [_row_document(row, now) for row in rows],
        "vanished": found.vanished(),
    }
    status = 1 if document["vanished"] or any(row.fault is not None for row in rows) else 0
    return Answer(document, lambda: _tell_rows(rows, now, document), status)


def _row_document(row: Row, now: float) -> dict[str, Any]:
    document = {name: getattr(row, name) for name in _ROW_NAMES}
    document["bytes"] = document.pop("num_bytes")
    document["reasons"] = list(row.reasons)
    document["age_secs"] = None if row.time is None else max(0.0, now - row.time)
    return document


def _tell_rows(rows: Sequence[Row], now: float, document: Mapping[str, Any]) -> str:
    if document["vanished"]:
        return f"{plain(document['vanished'])}\n{VANISHED_ADVICE}\n"
    if not rows:
        return f"{plain(document['path'])} has no generation yet.\n"
    heads = ("step", "age", "reason", "ranks", "bytes", "verified", "pinned", "proven")
    cells = [
        (
            row.step,
            None if row.time is None else ago(now - row.time),
            "UNREADABLE" if row.time is None else ", ".join(row.reasons),
            row.world_size,
            size(row.num_bytes),
            _verified(row, now),
            None if row.pinned is None else row.pinned or "yes",
            row.proven,
        )
        for row in rows
    ]
    faults = "".join(f"{plain(row.fault)}\n" for row in rows if row.fault is not None)
    return table(heads, cells, right=("step", "ranks", "bytes")) + faults


def _verified(row: Row, now: float) -> str | None:
    # That it was whole once says nothing where its files are known to be otherwise now.
    if row.fault is not None and row.time is not None:
        return "DAMAGED"
    return None if row.verified_at is None else ago(now - row.verified_at)


def status(
    run: RunArgument,
    *,
    max_age: Annotated[
        float | None,
        typer.Option(
            metavar="SECS", help="Health probe: status 1 if it is dead or its last step is older."
        ),
    ] = None,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Say whether a run is alive and by what evidence, how far it is, what a crash would cost."""
    if max_age is not None and not max_age >= 0:
        raise SettingError(
            f"--max-age {max_age} isn't a number of seconds from 0 up.",
            next_step="Give --max-age 300, say.",
            found=str(max_age),
        )
    found = read_status(find_run(run))
    document = found.to_json()
    code, verdict = 0, None
    if max_age is not None:
        ailments = found.ailments(max_age)
        document["healthy"], document["ailments"] = not ailments, ailments
        code = 1 if ailments else 0
        verdict = f"no, so status 1: {'; '.join(ailments)}" if ailments else "yes"
    return Answer(document, lambda: _tell_status(found, verdict), code)


def _tell_status(found: Status, verdict: str | None) -> str:
    ranks = found.liveness.facts.get("world_size")
    about = [] if found.attempt is None else [f"attempt {found.attempt}"]
    about += [] if ranks is None else [counted(ranks, "rank")]
    state = found.liveness.state
    word = "dead" if state is State.DEAD else state.value
    lines = [f"{found.name}: {word}" + (f" ({', '.join(about)})" if about else "")]
    for number, evidence in enumerate(found.liveness.evidence):
        text = first_line(evidence.text, _MORE)
        lines.append(f"  {'evidence' if number == 0 else '':<10} {text}")
    lines += [f"  {head:<10} {first_line(text, _MORE)}" for head, text in _facts(found)]
    lines += [] if verdict is None else [f"  {'healthy':<10} {verdict}"]
    return "".join(f"{plain(line)}\n" for line in lines)


def _facts(found: Status) -> list[tuple[str, str]]:
    committed = "nothing yet"
    if found.committed_step is not None:
        verified = found.verified_step
        committed = f"step {found.committed_step}, {ago(found.committed_age_secs)}; " + (
            "none verified yet" if verified is None else f"verified: step {verified}"
        )
    elif found.damaged:
        committed = "none that can be used"
    elif found.vanished is not None:
        committed = "nothing any more"
    facts = [("committed", committed), *_troubles(found)]
    if found.lost_steps is not None:
        verb = "lost now" if found.is_alive else "lost"
        time_ = "" if found.lost_secs is None else f", {duration(found.lost_secs)}"
        flight = " and the one in flight" if found.is_alive else ""
        facts.append((verb, f"{counted(found.lost_steps, 'step')}{flight}{time_}"))
    if found.secs_per_step:
        facts.append(("speed", f"{60 / found.secs_per_step:.3g} steps a minute"))
    if found.free_bytes is not None:
        fits = ""
        if found.fitting is not None:
            more = counted(found.fitting, "more generation")
            fits = f": {more} of {size(found.generation_bytes)}"
        facts.append(("disk", f"{size(found.free_bytes)} free{fits}"))
    return facts


def _troubles(found: Status) -> list[tuple[str, str]]:
    troubles = [("DAMAGED", f"step {step}: {why}") for step, why in found.damaged.items()]
    if found.vanished is not None:
        troubles.append(("VANISHED", f"{found.vanished} {VANISHED_ADVICE}"))
    if found.failing is not None:
        failing = found.failing
        count = "the last save" if failing.count == 1 else f"the last {failing.count} saves"
        since = None if failing.since is None else time.time() - failing.since
        when = "" if since is None else f", {'since ' if failing.count > 1 else ''}{ago(since)}"
        troubles.append(("FAILING", f"{count} failed{when}: {failing.error}"))
    if found.lost_losses is not None:
        troubles.append(("LOSSES", str(found.lost_losses)))
    if found.set_aside:
        troubles.append(("set aside", f"archive/: {', '.join(found.set_aside)}"))
    return troubles


def show(
    address: AddressArgument,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Show one resume point, or a .bin."""
    path = Path(address)
    if is_bin(path):
        document = describe_bin(path)
        return Answer(document, lambda: tell_bin(document))
    require_no_file(path)
    run, generation = find_generation(address)
    document = describe_generation(run, generation, with_tensors=tensors)
    return Answer(document, lambda: tell_generation(document))


COMMANDS = (ls, status, show)
