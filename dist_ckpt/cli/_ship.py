"""``ship``: a resume point copied away, checked, loaded from there. Layer 8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_ckpt.cli._address import AddressArgument, find_generation
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._settings_file import DryRunOption
from dist_ckpt.cli._text import plain, size
from dist_ckpt.runs import settings_of
from dist_ckpt.wording import counted

__all__ = ["COMMANDS"]


def ship(
    address: AddressArgument,
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="A directory, or a URL as s3://bucket/folder.")
    ],
    *,
    leave_out_bin: Annotated[
        bool, typer.Option("--no-bin", help="Without the canonical .bin file.")
    ] = False,
    scratch: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where a URL's copy is fetched to be loaded for trial."),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Copy a resume point away with all that is needed to train on, check it, load it from there.

    DEST/NAME-step_N becomes a run directory. Cut off, the same command goes on; wrong copies are
    found and sent again. Credentials come from where fsspec looks for them, and go nowhere.
    """
    run, generation = find_generation(address)
    from dist_ckpt import shipping  # noqa: PLC0415 - only who ships needs fsspec and the rest

    place = shipping.parse_place(destination)
    with_bin = not leave_out_bin
    if dry_run:
        plan = shipping.plan_shipment(generation, run.name, place, with_bin=with_bin)
        return _tell_plan(plan, generation.step)
    told = settings_of(run).get("command")
    work_bytes = shipping.work_bytes(generation.manifest, with_bin=with_bin)
    with byte_bar("shipping", work_bytes, quiet=as_json) as progress:
        shipped = shipping.ship(
            generation,
            run.name,
            place,
            with_bin=with_bin,
            scratch_dir=None if scratch is None else Path(scratch),
            train_command=told if isinstance(told, list) else (),
            command=["dist-ckpt", "ship", address, place.label, *(["--no-bin"] * leave_out_bin)],
            progress=progress,
        )
    document = {**shipped.confirmation, "journalled": shipped.journalled, "dry_run": False}
    return Answer(document, lambda: _tell(document))


def _tell_plan(plan: Any, step: int) -> Answer:
    missing = {name: count for name, count in plan.files.items() if name not in plan.there}
    document = {
        "step": step,
        "destination": plan.label,
        "files": plan.files,
        "there": list(plan.there),
        "send_bytes": sum(missing.values()),
        "no_bin": plan.no_bin,
        "dry_run": True,
    }

    def tell() -> str:
        head = (
            f"would ship step {step} to {plan.label}: {len(missing)} of {len(plan.files)} files, "
            f"{size(document['send_bytes'])}"
        )
        rows = [
            f"  {name}  {size(count)}{'' if name in missing else '  (there; would be read back)'}"
            for name, count in plan.files.items()
        ]
        return "".join(f"{plain(line)}\n" for line in (head, *rows))

    return Answer(document, tell)


def _tell(document: Mapping[str, Any]) -> str:
    back, trial, whole = document["read_back"], document["trial_load"], document["bin"]
    sent, wrong = len(document["sent"]), document["found_wrong"]
    files = f"{counted(back['num_files'], 'file')}, {size(back['num_bytes'])}"
    there = back["num_files"] - sent
    loaded = f"{counted(trial['num_tensors'], 'tensor')}, {size(trial['num_bytes'])}"
    lines = [
        f"{document['destination']}: shipped and confirmed",
        f"  command run: {document['command']}",
        f"  step found: {document['step']}, resume point {document['id'][:8]}",
        f"  check passed: {files}, sizes and digests read back; {sent} sent, {there} were there",
        f"  loaded from there: {loaded}, values of {counted(trial['num_ranks'], 'rank')}",
    ]
    if wrong:
        lines.append(f"  wrong and sent again: {', '.join(dict.fromkeys(wrong))}")
    if whole is None:
        lines.append(f"  no .bin: {document['no_bin']}")
    else:
        lines.append(
            f"  result exported: {whole['name']}, {size(whole['size_bytes'])}, "
            f"sha256 {whole['sha256']}"
        )
    lines.append("  how to train on: RESTORE.md there")
    if not document["journalled"]:
        lines.append("  the run's journal doesn't tell of it: a job trains, or it can't be written")
    return "".join(f"{plain(line)}\n" for line in lines)


COMMANDS = (ship,)
