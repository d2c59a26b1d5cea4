"""``loss``: the canonical curve, in the terminal, as JSON or PNG. Layer 8."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dist_ckpt import storage
from dist_ckpt.cli._address import find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._branches import describe_branches, tell_branches
from dist_ckpt.cli._text import plain, table
from dist_ckpt.errors import DistCkptError, NotFoundError, UsageError
from dist_ckpt.history import LossEntry, LossGap, replay_summary
from dist_ckpt.runs import Run, label_runs, missing_losses
from dist_ckpt.wording import counted

if TYPE_CHECKING:
    from dist_ckpt.report import Panel

__all__ = ["COMMANDS"]

#: Of the exponential mean: the weight of what was before.
_EMA_KEEP = 0.98
_NUM_LAST = 5


def loss(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories.")],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="All entries in the file's order, void ones too.")
    ] = False,
    replays: Annotated[
        bool, typer.Option("--replays", help="Steps that resumes computed again: did they agree?")
    ] = False,
    png: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw the curves (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Show the loss of one run or several, through restarts and rewinds.

    Of several: from where they part, which has the lower mean.
    """
    found = [find_run(run) for run in runs]
    labels = label_runs(found, with_paths=True)
    curves = [
        _read(run, label, raw=raw, replays=replays)
        for run, label in zip(found, labels, strict=True)
    ]
    document: dict[str, Any] = {"runs": curves}
    if png is not None:
        document["png"] = _draw(curves, Path(png))
    if len(curves) > 1 and not raw:
        document["branches"] = describe_branches(curves)

    def text() -> str:
        compared = tell_branches(document["branches"]) if "branches" in document else ""
        return _tell(curves) + compared + (f"{plain(png)}\n" if png else "")

    return Answer(document, text)


def _read(run: Run, label: str, *, raw: bool, replays: bool) -> dict[str, Any]:
    entries = run.loss_raw() if raw else run.loss()
    about = {"run": run.name, "label": label, "path": str(run.path), "raw": raw}
    curve = {**about, **_sum_up(entries)}
    gap = None
    with contextlib.suppress(DistCkptError):  # a damaged generation is no fault of the losses
        gap = missing_losses(run)
    curve["losses_missing"] = None if gap is None else dataclasses.asdict(gap)
    curve["entries"] = [list(entry) for entry in entries]
    if replays:
        curve["replays"] = [
            {**dataclasses.asdict(result), "all_agreed": result.all_agreed}
            for result in replay_summary(run.journal())
        ]
    return curve


def _sum_up(entries: Sequence[LossEntry]) -> dict[str, Any]:
    finite = [(step, value) for step, value in entries if value is not None]
    lowest = min(finite, key=lambda entry: entry[1], default=None)
    mean = None
    for _, value in finite:
        mean = value if mean is None else _EMA_KEEP * mean + (1 - _EMA_KEEP) * value
    return {
        "count": len(entries),
        "not_finite": len(entries) - len(finite),
        "first_step": entries[0][0] if entries else None,
        "last_step": entries[-1][0] if entries else None,
        "last_loss": entries[-1][1] if entries else None,
        "ema": mean,
        "lowest": None if lowest is None else list(lowest),
    }


def _tell(curves: Sequence[dict[str, Any]]) -> str:
    heads = ("run", "entries", "steps", "last", f"EMA {_EMA_KEEP}", "lowest", "at step")
    rows = [_row(curve) for curve in curves]
    parts = [table(heads, rows, right=heads[1:])]
    if lines := _plot(curves):
        parts.append("\n" + "".join(f"{line}\n" for line in lines))
    for curve in curves:
        name = f"{plain(curve['label'])} " if len(curves) > 1 else ""
        if curve["entries"]:
            parts.append(f"\n  {name}last: {_tell_last(curve['entries'])}\n")
        if curve["not_finite"]:
            parts.append(
                f"  {curve['not_finite']} entries aren't finite; the journal says which.\n"
            )
        if (missing := curve["losses_missing"]) is not None:
            parts.append(f"  LOSSES: {LossGap(**missing)}\n")
        parts += [f"  {_tell_replay(result)}\n" for result in curve.get("replays", ())]
        if curve.get("replays") == []:
            parts.append("  no step was computed again.\n")
    return "".join(parts)


def _plot(curves: Sequence[dict[str, Any]]) -> list[str]:
    """Return the curves in lines, over each other where the terminal has colours."""
    from dist_ckpt import report  # noqa: PLC0415 - not for `status`: it holds a server

    is_terminal = sys.stdout.isatty()
    colored = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(30, min(shutil.get_terminal_size().columns, 120))
    return report.draw_panels(_panels(curves), width=width, colored=colored, braille=_has_braille())


def _panels(curves: Sequence[dict[str, Any]]) -> list[Panel]:
    from dist_ckpt.report import Panel  # noqa: PLC0415 - as above

    return [Panel(plain(curve["label"]), curve["entries"]) for curve in curves]


def _has_braille() -> bool:
    try:
        "\u28ff│└─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _row(curve: dict[str, Any]) -> tuple[object, ...]:
    lowest = curve["lowest"] or (None, None)
    steps = None if not curve["count"] else f"{curve['first_step']}-{curve['last_step']}"
    return (
        curve["label"],
        curve["count"],
        steps,
        _number(curve["last_loss"]),
        _number(curve["ema"]),
        _number(lowest[1]),
        lowest[0],
    )


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _tell_last(entries: Sequence[Sequence[Any]]) -> str:
    last = entries[-_NUM_LAST:]
    return ", ".join(f"{step}: {_number(value) or 'not finite'}" for step, value in last)


def _tell_replay(result: dict[str, Any]) -> str:
    agreed = f"{result['agreed']} of {counted(result['num_logged'], 'step')} came out the same"
    text = f"attempt {result['attempt']} from step {result['resumed_step']}: {agreed}"
    if result["first_difference"] is not None:
        text += f", the first that differs is {result['first_difference']}"
    if not result["comparable"]:
        text += " (bit-equality couldn't be asked for)"
    text += "" if result["complete"] else "; ended inside the window"
    cause = result.get("likely_cause")
    return text if cause is None else f"{text}\n    likely cause: {cause}"


def _draw(curves: Sequence[dict[str, Any]], path: Path) -> str:
    if path.suffix != ".png":
        raise UsageError(f"{path} doesn't end in .png.", next_step="Give --png PATH.png.")
    if not path.absolute().parent.is_dir():
        raise NotFoundError(
            f"{path.parent} isn't a directory.", next_step="Make it first.", path=str(path)
        )
    from dist_ckpt import report  # noqa: PLC0415 - as above
    from dist_ckpt.export import put_whole  # noqa: PLC0415 - as above

    data = report.draw_png(_panels(curves))
    put_whole(path, lambda beside: storage.write_durable(beside, data, mode=0o644))
    return str(path)


COMMANDS = (loss,)
