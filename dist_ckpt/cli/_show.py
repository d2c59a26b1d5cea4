"""One resume point, or one .bin, as a document and in words. Layer 8."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.cli._text import ago, plain, size, spell_settings, table
from dist_ckpt.errors import DistCkptError
from dist_ckpt.history import FollowedHistory, read_gap
from dist_ckpt.runs import Generation, Run
from dist_ckpt.wording import counted

__all__ = ["describe_bin", "describe_generation", "tell_bin", "tell_generation"]


def describe_bin(path: Path) -> dict[str, Any]:
    """Return what the header of a canonical file says."""
    from dist_ckpt.export import read_header  # noqa: PLC0415 - a generation is shown without numpy

    step, num_params = read_header(path)
    return {
        "path": str(path),
        "step": step,
        "num_params": num_params,
        "bytes": storage.file_size(path),
        "has_sum": storage.exists(path.with_name(f"{path.name}.sha256")),
    }


def tell_bin(document: dict[str, Any]) -> str:
    """Return it in words."""
    beside = "its .sha256 lies beside it" if document["has_sum"] else "no .sha256 beside it"
    return (
        f"{plain(document['path'])}: step {document['step']}, "
        f"{counted(document['num_params'], 'parameter')} with both moments, "
        f"{size(document['bytes'])}, "
        f"{beside}\n"
    )


def describe_generation(run: Run, generation: Generation, *, with_tensors: bool) -> dict[str, Any]:
    """Return what the manifest, and if wanted the index, of a generation say."""
    point = generation.manifest
    canonical = point.canonical
    store = run.store
    path = store.bin_path(point.step)
    gap = None
    with contextlib.suppress(DistCkptError):  # a damaged loss file is no fault of a generation
        mark = point.notes.get("history")
        gap = read_gap(FollowedHistory(store.run_dir), point.id, point.step, mark)
    document: dict[str, Any] = {
        "run": point.run,
        "path": str(generation.path),
        "step": point.step,
        "id": point.id,
        "parent": point.parent,
        "attempt": point.attempt,
        "time": point.time,
        "reasons": list(point.reasons),
        "world_size": point.world_size,
        "bytes": point.num_bytes,
        "files": {name: record["size_bytes"] for name, record in point.files.items()},
        "canonical": {
            "num_params": canonical.num_params,
            "num_tensors": len(canonical.names),
            "is_shard": canonical.is_shard,
            "refused": canonical.refused,
            "bin": str(path) if storage.exists(path) else None,
        },
        "stateless": list(canonical.stateless),
        "identity": point.identity,
        "verified_at": generation.verified_at,
        "pinned": store.pins().get(point.step),
        "proven": run.proven().get(point.step),
        "pivots": [dataclasses.asdict(pivot) for pivot in run.pivots() if pivot.step <= point.step],
        "notes": point.notes,
        "losses_missing": None if gap is None else str(gap),
    }
    if with_tensors:
        document["tensors"] = [
            {
                "key": tensor.key,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "where": [
                    {
                        "file": place.location,
                        "offsets": list(place.box.offsets),
                        "sizes": list(place.box.sizes),
                        "bytes": [place.byte_range.start, place.byte_range.stop],
                    }
                    for place in tensor.placements
                ],
            }
            for tensor in generation.tensors.values()
        ]
    return document


def tell_generation(document: dict[str, Any]) -> str:
    """Return it in words."""
    now = time.time()
    parent = document["parent"]
    verified = document["verified_at"]
    head = [
        ("step", document["step"]),
        ("run", document["run"]),
        ("path", document["path"]),
        ("id", document["id"]),
        ("parent", f"step {parent.get('step')}, {parent.get('id')}" if parent else "none"),
        ("attempt", document["attempt"]),
        ("saved", ago(now - document["time"])),
        ("reasons", ", ".join(document["reasons"])),
        ("ranks", document["world_size"]),
        ("bytes", size(document["bytes"])),
        ("verified", "not yet" if verified is None else ago(now - verified)),
        ("pinned", document["pinned"]),
        ("proven", document["proven"]),
        ("canonical", _tell_canonical(document["canonical"])),
        ("losses", _tell_losses(document)),
        ("stateless", ", ".join(document["stateless"]) or "none"),
    ]
    head += _tell_policy(document)
    lines = [f"{name:<10} {plain('-' if value is None else value)}\n" for name, value in head]
    lines += _tell_identity(document["identity"])
    files = [(name, f"{num_bytes:,}") for name, num_bytes in document["files"].items()]
    lines += ["\n", table(("file", "bytes"), files, right=("bytes",))]
    if "tensors" in document:
        lines += ["\n", _tell_tensors(document["tensors"])]
    return "".join(lines)


def _tell_losses(document: dict[str, Any]) -> str | None:
    mark = document["notes"].get("history")
    if not isinstance(mark, dict):
        return None
    missing = document["losses_missing"]
    return f"{mark.get('losses')} up to it" + (f"; {missing}" if missing else "")


def _tell_policy(document: dict[str, Any]) -> list[tuple[str, Any]]:
    notes = document["notes"]
    told = [("policy", spell_settings(notes["policy"]))] if notes.get("policy") else []
    for pivot in document["pivots"]:
        where = "by hand" if pivot["archive"] is None else pivot["archive"]
        change = f"{spell_settings(pivot['previous'])} -> {spell_settings(pivot['policy'])}"
        told.append(("pivot", f"step {pivot['step']}, {where}: {change}"))
    return told


def _tell_canonical(canonical: dict[str, Any]) -> str:
    if canonical["refused"] is not None:
        return f"none: {canonical['refused']}"
    tensors = counted(canonical["num_tensors"], "tensor")
    about = f"{counted(canonical['num_params'], 'parameter')} in {tensors}"
    where = canonical["bin"] or "no .bin yet"
    return f"{about}; {where}"


def _tell_identity(identity: Any) -> list[str]:
    lines = []
    for part in ("structure", "config", "data", "code", "versions"):
        value = identity.get(part)
        if part == "structure" and isinstance(value, dict):  # its tensors are a table of their own
            value = {key: value[key] for key in ("digest", "ties") if key in value}
        if not isinstance(value, dict) or not value:
            lines.append(f"{part:<10} {plain('-' if value is None else json.dumps(value))}\n")
            continue
        for number, (key, item) in enumerate(value.items()):
            text = item if isinstance(item, str) else json.dumps(item)
            lines.append(f"{part if number == 0 else '':<10} {plain(key)}: {plain(text)}\n")
    return lines


def _tell_tensors(tensors: list[dict[str, Any]]) -> str:
    rows = [
        (
            tensor["key"],
            tensor["dtype"],
            " x ".join(map(str, tensor["shape"])) or "scalar",
            ", ".join(f"{p['file']}:{p['bytes'][0]}-{p['bytes'][1]}" for p in tensor["where"]),
        )
        for tensor in tensors
    ]
    return table(("tensor", "dtype", "shape", "where"), rows)
