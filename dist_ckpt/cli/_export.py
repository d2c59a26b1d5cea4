"""``export``: a generation as files for others. Layer 8."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import storage
from dist_ckpt.cli._address import AddressArgument, find_generation
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._text import plain, size
from dist_ckpt.errors import CorruptFileError, SettingError, UsageError
from dist_ckpt.runs import (
    FORMATS,
    Depth,
    Generation,
    check_generation,
    holds_format,
    write_export,
)

__all__ = ["COMMANDS"]


def export(
    address: AddressArgument,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="The file, or a directory.")
    ],
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="bin, safetensors or both with a comma [by PATH's ending, else bin].",
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Without optimizer state, for inference: safetensors."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Verify a generation and write it as a .bin or safetensors file, each with its .sha256.

    An export isn't a resume point: training goes on from the run directory.
    """
    run, generation = find_generation(address)
    if output.endswith("/") and not storage.is_dir(Path(output)):
        raise UsageError(
            f"-o {output} names a directory, and there is none.",
            next_step="Make it first, or leave out the slash to name a file.",
            path=output,
        )
    targets = _targets(Path(output), formats, generation, weights_only=weights_only)
    for target in targets.values():
        _check_target(target, force=force)
    with byte_bar("verifying", generation.manifest.num_bytes, quiet=as_json) as progress:
        finding = check_generation(run.store, generation.step, Depth(), progress=progress)
    if not finding.is_whole:
        faults = [*finding.faults, *([finding.refused] if finding.refused else [])]
        raise CorruptFileError(
            f"Step {generation.step} isn't whole, nothing was written: "
            + " ".join(fault.message for fault in faults),
            next_step="`dist-ckpt verify` names the whole ones.",
            path=str(generation.path),
        )
    written = [
        write_export(generation, target, kind, weights_only=weights_only)
        for kind, target in targets.items()
    ]
    document = {
        "run": generation.manifest.run,
        "step": generation.step,
        "weights_only": weights_only,
        "resumable": False,
        "files": [dataclasses.asdict(file) for file in written],
    }

    def tell() -> str:
        lines = [
            f"{file.path}: step {generation.step}, {size(file.num_bytes)}, sha256 {file.sha256}\n"
            f"  {file.note}"
            for file in written
        ]
        return "".join(f"{plain(part)}\n" for line in lines for part in line.split("\n"))

    return Answer(document, tell)


def _targets(
    output: Path, formats: str | None, generation: Generation, *, weights_only: bool
) -> dict[str, Path]:
    """Return format → file to write."""
    if formats is None:
        is_safetensors = output.suffix == ".safetensors" or weights_only
        kinds = ["safetensors" if is_safetensors and output.suffix != ".bin" else "bin"]
    else:
        kinds = list(dict.fromkeys(kind.strip() for kind in formats.split(",")))
    if unknown := [kind for kind in kinds if kind not in FORMATS]:
        raise SettingError(
            f"--format {unknown[0]!r} isn't one of {', '.join(FORMATS)}.",
            next_step=f"Give --format {FORMATS[0]}.",
            found=formats,
        )
    if weights_only and "bin" in kinds:
        raise UsageError(
            "A .bin holds weights and both moments; there is none of weights only.",
            next_step="Use --format safetensors --weights-only.",
        )
    name = generation.path.name
    if storage.is_dir(output):
        step = f"step_{generation.step:06d}"
        return {kind: output / f"{step}.{kind}" for kind in kinds}
    if not output.name:
        raise UsageError(f"-o {name!r} names no file.", next_step="Give the path of a file.")
    if len(kinds) == 1:
        return {kinds[0]: output}
    # `lr.0003` has no ending: only one of ours gives way to the other.
    is_ours = output.suffix.removeprefix(".") in FORMATS
    stem = output.stem if is_ours else output.name
    return {kind: output.with_name(f"{stem}.{kind}") for kind in kinds}


def _check_target(target: Path, *, force: bool) -> None:
    parent = target.parent
    if not storage.is_dir(parent):
        raise UsageError(
            f"{parent} isn't a directory, so {target.name} can't be written there.",
            next_step="Make it first, or choose another -o.",
            path=str(target),
        )
    if holds_format(parent) or Path(os.path.realpath(parent)).name == "checkpoints":
        raise UsageError(
            f"{parent} belongs to the generations, whose files never change.",
            next_step="Choose an -o outside of checkpoints/.",
            path=str(target),
        )
    if storage.is_dir(target):
        raise UsageError(
            f"{target} is a directory.", next_step="Choose another -o.", path=str(target)
        )
    for path in (target, target.with_name(f"{target.name}.sha256")):
        if not force and storage.exists(path):
            raise UsageError(
                f"{path} is there already.",
                next_step="Choose another -o, or replace it with --force.",
                path=str(path),
            )


COMMANDS = (export,)
