"""``reshard``: a generation rewritten for another number of ranks. Layer 8."""

from __future__ import annotations

from typing import Annotated

import typer

from dist_ckpt.cli._address import AddressArgument, find_generation
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._sizes import parse_size
from dist_ckpt.cli._text import duration, plain, size

__all__ = ["COMMANDS"]


def reshard(
    address: AddressArgument,
    *,
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="M", help="Number of ranks it is written for.")
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="The new run; must not exist."),
    ],
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What the buffers may take: 256MiB, 1GiB.")
    ] = "256MiB",
    as_json: JsonOption = False,
) -> Answer:
    """Rewrite a generation for M ranks, as a new run directory that training resumes from.

    No GPU is needed and the source isn't touched. Every byte is compared with its digest, and the
    result is loaded for trial before it gets its name. Status 1: the source is faulty.
    """
    memory_bytes = parse_size(memory, "--memory")
    run, generation = find_generation(address)
    from dist_ckpt import reshard as resharding  # noqa: PLC0415 - imports torch; see `cli`

    job = resharding.prepare(run.store, generation.manifest, world_size)
    with byte_bar("resharding", 2 * job.num_bytes, quiet=as_json) as progress:
        done = resharding.reshard(job, output, memory_bytes=memory_bytes, progress=progress)
    point = done.point
    document = {
        "path": str(done.path),
        "run": point.run,
        "step": point.step,
        "id": point.id,
        "world_size": point.world_size,
        "source": {
            "path": str(generation.path),
            "run": generation.manifest.run,
            "id": generation.manifest.id,
            "world_size": generation.manifest.world_size,
            "bytes": generation.manifest.num_bytes,
        },
        "bytes": point.num_bytes,
        "canonical_is_shard": point.canonical.is_shard,
        "verified": True,
        "memory_bytes": memory_bytes,
        "chunk_bytes": done.chunk_bytes,
        "secs": done.secs,
        "notes": list(done.notes),
    }

    def tell() -> str:
        ranks = f"{generation.manifest.world_size} → {point.world_size} ranks"
        what = f"step {point.step}, {ranks}, {size(point.num_bytes)}"
        head = f"{done.path}: {what}, read back and found whole, in {duration(done.secs)}"
        lines = [head, *(f"  {note}" for note in done.notes)]
        return "".join(f"{plain(line)}\n" for line in lines)

    return Answer(document, tell)


COMMANDS = (reshard,)
