"""What belongs into a shipment: the generation, its .bin, and the history that led to it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.canonical import bin_name, bin_size, step_name
from dist_ckpt.errors import DistCkptError, UsageError
from dist_ckpt.export import canonical_pieces
from dist_ckpt.history import (
    LOSS_NOT_FINITE,
    Past,
    encode_event,
    encode_kinds,
    encode_past,
    encode_settings,
    history_path,
    read_journal,
    read_policy,
    run_name,
)
from dist_ckpt.lifecycle import Origin, Pivot, past_of, pivot_due
from dist_ckpt.provenance import SIGNATURE_NAME
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME, ResumePoint, shard_name
from dist_ckpt.runs import Generation
from dist_ckpt.shipping._items import Bytes, Content, Item, content_of_bytes, file_pieces
from dist_ckpt.storage import FileDigest

__all__ = [
    "ABOUT",
    "Contents",
    "bin_items",
    "folder_name",
    "is_shipped_event",
    "list_contents",
    "resume_point_content",
]

#: Below it lies what is for people: no command reads it.
ABOUT: Final = "shipped"
#: Event with which the copy's journal begins.
ARRIVED: Final = "arrived"
_BY: Final = "ship"


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a shipment in the order in which they are sent.

    Attributes:
        files: All but the .bin's own sum, ``resume_point.json``, and what is told of the shipment.
        bin: The canonical file where it isn't a shard, so that it is put together on the way.
        bin_is: Name of the shard that the canonical file is; None otherwise.
        no_bin: Why there is no canonical file; None where there is one.
        num_losses: How many losses go along.
    """

    files: tuple[Content, ...]
    bin: Content | None
    bin_is: str | None
    no_bin: str | None
    num_losses: int


def folder_name(point: ResumePoint, run: str) -> str:
    """Return the name of the shipped folder.

    Raises:
        UsageError: The run's name can't be part of one, nor of the texts that tell of it: no line
            holds a line break, no key of a store bytes that aren't UTF-8.
    """
    is_text = all(unicodedata.category(character) not in ("Cc", "Cs") for character in run)
    if not run or "/" in run or not is_text or run.startswith("."):
        raise UsageError(
            f"A run called {run!r} can't be shipped: a folder and texts are named after it.",
            next_step="Make a run of another name of it, and ship that: `dist-ckpt fork RUN NEW`.",
            found=run,
        )
    return f"{run}-{step_name(point.step)}"


def list_contents(generation: Generation, origin: Origin, run: str, *, with_bin: bool) -> Contents:
    """Return what is to be shipped. Reads manifests and the history, no tensors.

    Raises:
        CorruptFileError, NotFoundError: The generation or its history can't be read.
    """
    point, store = generation.manifest, generation.store
    store.check_files(point)
    digests = store.digests(point)
    home = f"checkpoints/{step_name(point.step)}"
    files = [
        _file(f"{home}/{name}", generation, name, digest)
        for name, digest in sorted(digests.items())
    ]
    store.index(point)  # its digest is compared here
    size_bytes = int(point.index["size_bytes"])
    index = storage.read_file(generation.path / INDEX_NAME, limit_bytes=size_bytes)
    files.append(content_of_bytes(f"{home}/{INDEX_NAME}", index, mode=0o400))
    if storage.exists(generation.path / SIGNATURE_NAME):
        data = storage.read_file(generation.path / SIGNATURE_NAME, limit_bytes=1 << 16)
        files.append(content_of_bytes(f"{home}/{SIGNATURE_NAME}", data, mode=0o400))
    past = past_of(origin)
    if origin.run_dir is not None:
        pivot = pivot_due(origin, point)
        journal = _arrived(point, origin, past, pivot)
        history = {**encode_past(past), "journal": journal}
        files += [
            content_of_bytes(history_path("", run, what), data) for what, data in history.items()
        ]
        files += _settings(point, origin, run, pivot)
    files += _about(point, origin)
    refused = point.canonical.refused if with_bin else "it was left out on wish"
    is_shard = refused is None and point.canonical.is_shard
    return Contents(
        tuple(files),
        _assembled(generation) if refused is None and not is_shard else None,
        f"{home}/{shard_name(0)}" if is_shard else None,
        refused,
        len(past.loss),
    )


def _file(name: str, generation: Generation, file: str, digest: FileDigest) -> Content:
    chunks = file_pieces(generation.path / file, digest)
    return Content(name, digest.size_bytes, chunks, digest=digest)


def _assembled(generation: Generation) -> Content:
    point, store = generation.manifest, generation.store

    def chunks() -> Iterator[Bytes]:
        yield from canonical_pieces(store, point)

    return Content(bin_name(point.step), bin_size(point.canonical.num_params), chunks)


def bin_items(item: Item, step: int) -> tuple[Item, Content]:
    """Return the canonical file, given as itself or as the shard that it is, and its sum's file."""
    name = bin_name(step)
    content = item.content
    renamed = Content(name, content.size_bytes, content.chunks, content.mode, item.digest)
    line = f"{item.sha256}  {name}\n".encode()
    return Item(renamed, item.digest, item.sha256), content_of_bytes(f"{name}.sha256", line)


def resume_point_content(generation: Generation) -> Content:
    """Return ``resume_point.json``, which comes after all that it speaks of."""
    data = generation.store.manifest_bytes(generation.step)
    name = f"checkpoints/{step_name(generation.step)}/{RESUME_POINT_NAME}"
    return content_of_bytes(name, data, mode=0o400)


def _arrived(point: ResumePoint, origin: Origin, past: Past, pivot: Pivot | None) -> bytes:
    """Return the journal that the copy begins with; the same at each call.

    The run's own journal can't go on there: what it counts of the loss file, and what it says of
    saves whose generations stayed behind, holds in its own directory only.
    """
    facts = {
        "id": point.id,
        "run": point.run,
        "path": str(origin.run_dir),
        "num_losses": len(past.loss),
    }
    arrived = encode_event(ARRIVED, point.step, facts, when=point.time, attempt=0)
    arrived += encode_kinds(past, when=point.time)
    if pivot is None:
        return arrived
    told: dict[str, Any] = {
        "id": pivot.id,
        "by": _BY,
        "archive": None,
        "archived": [],
        "policy": pivot.policy,
        "previous": pivot.previous,
    }
    return arrived + encode_event("pivot", point.step, told, when=point.time, attempt=0)


def is_shipped_event(event: Mapping[str, Any]) -> bool:
    """Return whether an event of the copy's journal came with the shipment, see `_arrived`."""
    if event.get("event") == LOSS_NOT_FINITE:
        return event.get("attempt") == 0  # of training that went on there it is of a later one
    return event.get("event") == ARRIVED or event.get("by") == _BY


def _settings(point: ResumePoint, origin: Origin, run: str, pivot: Pivot | None) -> list[Content]:
    """Return the policy's settings that training goes on with, where there are any.

    Those that the point was made under, unless the run has pivoted behind it.

    What the policy has learned lies in the generation; a resume writes the file of it.
    """
    settings = point.notes.get("policy")
    if pivot is not None and origin.run_dir is not None:
        settings = read_policy(origin.run_dir, run_name(origin.run_dir))
    if settings is None:
        return []
    return [content_of_bytes(history_path("", run, "policy"), encode_settings(settings))]


def _about(point: ResumePoint, origin: Origin) -> list[Content]:
    """Return configuration, identities and the run's own journal, to be read by people."""
    identity = dict(point.identity)
    structure = identity.get("structure")
    told: dict[str, Any] = {
        "run": point.run,
        "step": point.step,
        "id": point.id,
        "time": point.time,
        "reasons": list(point.reasons),
        "world_size": point.world_size,
        "data": identity.get("data"),
        "code": identity.get("code"),
        "versions": identity.get("versions"),
        "structure": structure.get("digest") if isinstance(structure, dict) else None,
    }
    files = [
        content_of_bytes(f"{ABOUT}/configuration.json", _document(identity.get("config"))),
        content_of_bytes(f"{ABOUT}/identity.json", _document(told)),
    ]
    if origin.run_dir is not None and (journal := _journal_up_to(point, origin)):
        files.append(content_of_bytes(f"{ABOUT}/journal.jsonl", journal))
    return files


def _journal_up_to(point: ResumePoint, origin: Origin) -> bytes:
    """Return the run's events until the generation was there, so that a live run changes nothing.

    All of them where none tells of it.
    """
    if origin.run_dir is None:
        return b""
    try:
        events = read_journal(origin.run_dir)
    except DistCkptError:
        return b""  # a run without one, or with one that nobody can read, can be shipped
    for number, event in enumerate(events, start=1):
        if event.get("id") == point.id and event.get("event") != "resumed":
            events = events[:number]
            break
    return b"".join(map(_line, events))


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(", ", ": ")).encode() + b"\n"


def _document(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
