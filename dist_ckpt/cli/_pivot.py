"""``pivot``: the run goes on with another policy, or a fresh one. Layer 8."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from dist_ckpt.cli._address import RunArgument, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._settings_file import DryRunOption, read_settings
from dist_ckpt.cli._text import duration, plain, spell_settings
from dist_ckpt.errors import SettingError
from dist_ckpt.runs import Pivoted, PivotPlan, Run, pivot_run, plan_pivot

__all__ = ["COMMANDS"]


def pivot(
    run: RunArgument,
    *,
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The policy's new settings, one JSON object."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECS", help="How long to wait for boundary and restart.")
    ] = 3600.0,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Change the policy at a checkpoint: samples and state to archive/, the rest goes on.

    A live run comes to its next boundary, saves and stops, and is started again by the launcher.
    Weights, moments and losses run on. Cut off at any instant, the command can be run again.
    """
    if not timeout > 0:
        raise SettingError(
            f"--timeout {timeout} isn't a number of seconds above 0.",
            next_step="Give --timeout 3600, say.",
            found=str(timeout),
        )
    found = find_run(run)
    settings = read_settings(policy)
    if dry_run:
        return _plan(found, settings, plan_pivot(found, settings))
    return _tell(found, pivot_run(found, settings, timeout_secs=timeout))


def _plan(run: Run, settings: dict[str, Any] | None, plan: PivotPlan) -> Answer:
    document = {
        "run": run.name,
        "path": str(run.path),
        "dry_run": True,
        "policy": settings,
        **dataclasses.asdict(plan),
    }
    where = f"at the checkpoint of step {plan.step}"
    if plan.is_live:
        again = "is started again by its launcher" if plan.restarts else "is to be started again"
        where = f"at the next boundary: the run saves, stops and {again}"
    lines = [f"{run.name}: would pivot {where}"]
    lines += [f"  {name} would go to archive/" for name in plan.moved]
    lines.append(
        f"  policy: {spell_settings(settings) if settings is not None else 'as it is, but fresh'}"
    )
    return Answer(document, lambda: "".join(f"{plain(line)}\n" for line in lines))


def _tell(run: Run, done: Pivoted) -> Answer:
    pivot = done.pivot
    document = {
        "run": run.name,
        "path": str(run.path),
        **dataclasses.asdict(pivot),
        "restarted": done.restarted,
        "command": done.command,
        "secs": done.secs,
    }
    lines = [
        f"{run.name}: pivot at step {pivot.step} ({duration(done.secs)})",
        f"  set aside in {pivot.archive}: {', '.join(pivot.archived) or 'nothing'}",
        f"  policy before: {spell_settings(pivot.previous)}",
        f"  policy now:    {spell_settings(pivot.policy)}",
    ]
    if done.restarted:
        lines.append("  the launcher has started the run again; it has resumed with a fresh policy")
    else:
        lines.append("  the run is stopped; start it again, and it goes on with a fresh policy:")
        lines.append(f"    {done.command or 'as you started it'}")
    return Answer(document, lambda: "".join(f"{plain(line)}\n" for line in lines))


COMMANDS = (pivot,)
