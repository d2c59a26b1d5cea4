"""The whole of it: read, send, read back, load from there, confirm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dist_ckpt import __version__
from dist_ckpt.canonical import bin_name, bin_size
from dist_ckpt.lifecycle import Origin, find_origin
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.runs import Generation
from dist_ckpt.shipping._check import check_folder, check_place
from dist_ckpt.shipping._contents import (
    Contents,
    bin_items,
    folder_name,
    list_contents,
    resume_point_content,
)
from dist_ckpt.shipping._folder import Folder, open_folder
from dist_ckpt.shipping._items import Item, content_of_bytes, measure
from dist_ckpt.shipping._place import Place
from dist_ckpt.shipping._scratch import scratch
from dist_ckpt.shipping._sending import Sending, untold
from dist_ckpt.shipping._source import SourcePin, journal_shipment
from dist_ckpt.shipping._texts import (
    MARKER,
    RESTORE,
    SUMS,
    encode_marker,
    encode_sums,
    restore_text,
    spell_command,
)
from dist_ckpt.shipping._trial import Trial, try_loading

__all__ = ["Plan", "Shipped", "plan_shipment", "ship", "work_bytes"]

Progress = Callable[[int], None]

_SMALL_BYTES: Final = 1 << 20
_FORMAT: Final = "dist_ckpt.confirmation"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What `ship` would do.

    Attributes:
        label: Of the folder at the destination, without credentials.
        files: Name → size, in the order of sending.
        there: Names that are there with their size; whether they are right, reading them tells.
        no_bin: Why there is no canonical file; None where there is one.
    """

    label: str
    files: dict[str, int]
    there: tuple[str, ...]
    no_bin: str | None


@dataclass(frozen=True, slots=True)
class Shipped:
    """A shipment that is there, read back, loaded from there and confirmed.

    Attributes:
        confirmation: What ``confirmation.json`` holds.
        journalled: Whether the run's journal tells of it: not while a job trains.
    """

    confirmation: dict[str, Any]
    journalled: bool


def work_bytes(point: ResumePoint, *, with_bin: bool) -> int:
    """Return about how many bytes `ship` reads, sends, reads back and loads in all."""
    whole = with_bin and point.canonical.refused is None
    size_bytes = point.num_bytes + (bin_size(point.canonical.num_params) if whole else 0)
    return 3 * size_bytes + point.num_bytes


def plan_shipment(generation: Generation, run: str, place: Place, *, with_bin: bool = True) -> Plan:
    """Return what `ship` would do. Connects, looks, and changes nothing."""
    point = generation.manifest
    origin = find_origin(generation.store, point.step)
    check_place(place, origin)
    folder = open_folder(place, folder_name(point, run))
    is_begun = check_folder(folder, point, run)
    contents = list_contents(generation, origin, run, with_bin=with_bin)
    files = _sizes(contents, generation)
    there = [name for name, size in files.items() if is_begun and folder.size(name) == size]
    return Plan(folder.label, files, tuple(there), contents.no_bin)


def _sizes(contents: Contents, generation: Generation) -> dict[str, int]:
    sizes = {content.name: content.size_bytes for content in contents.files}
    if contents.bin is not None:
        sizes[contents.bin.name] = contents.bin.size_bytes
    elif contents.bin_is is not None:
        sizes[bin_name(generation.step)] = sizes[contents.bin_is]
    last = resume_point_content(generation)
    return sizes | {last.name: last.size_bytes}


def ship(
    generation: Generation,
    run: str,
    place: Place,
    *,
    with_bin: bool = True,
    scratch_dir: Path | None = None,
    train_command: Sequence[str] = (),
    command: Sequence[str] = (),
    progress: Progress = lambda _num_bytes: None,
) -> Shipped:
    """Have a run directory with this one generation at a place, read back and loaded from there.

    The source is read whole before anything is sent, and is pinned meanwhile. What was cut off is
    gone on with by the same call: files that are there are read back, and only those that are
    missing or wrong are sent. ``confirmation.json`` comes last.

    Args:
        generation: What to ship.
        run: The run's name.
        place: Where to.
        with_bin: Whether the canonical file goes along.
        scratch_dir: Where to have what is fetched for the trial load; None for the system's
            temporary directory. A directory as destination needs none.
        train_command: How the training was started, for RESTORE.md.
        command: How this was called, for the confirmation.
        progress: Told bytes since the last call.

    Raises:
        CorruptFileError: The source isn't whole, and nothing was sent; or a copy came out wrong
            however often it was sent.
        UsageError, ForeignFileError: Something else is in the way there.
        StorageError, NoSpaceError: The destination refused; call again.
    """
    point = generation.manifest
    origin = find_origin(generation.store, point.step)
    check_place(place, origin)
    folder = open_folder(place, folder_name(point, run))
    is_continued = check_folder(folder, point, run)
    pin = SourcePin(origin, folder.label)
    pin.take()
    marker = content_of_bytes(MARKER, encode_marker(point, run))
    sending = Sending(folder, marker, progress, is_continued)
    try:
        contents = list_contents(generation, origin, run, with_bin=with_bin)
        items = _read_source(contents, generation, progress)
        guide = restore_text(
            point, run, folder.label,
            is_url=place.path is None, command=train_command, has_bin=contents.no_bin is None,
        )  # fmt: skip
        items.append(measure(content_of_bytes(RESTORE, guide), untold))
        items.append(measure(content_of_bytes(SUMS, encode_sums(items)), untold))
        if folder.home is not None:  # no store tells its room
            folder.check_room(_missing_bytes(folder, items) + _SMALL_BYTES)
        with _trial_place(folder, scratch_dir, generation) as there:
            for item in items:
                sending.bring(item, None if folder.home is not None else there)
            folder.settle()
            trial = try_loading(there, progress)
        confirmation = {
            "format": _FORMAT,
            "version": _VERSION,
            "run": run,
            "step": trial.step,
            "id": trial.id,
            "destination": folder.label,
            "command": spell_command(command),
            "time": time.time(),
            "dist_ckpt": __version__,
            **sending.tell(items),
            "trial_load": _tell_trial(trial),
            "bin": _tell_bin(items, generation.step),
            "no_bin": contents.no_bin,
            "num_losses": contents.num_losses,
        }
        sending.end(confirmation)
    except BaseException:
        if not sending.begun:  # else it is to be gone on with, and must not be retired before
            pin.give_back()
        raise
    return Shipped(confirmation, _close(origin, pin, confirmation))


def _close(origin: Origin, pin: SourcePin, confirmation: dict[str, Any]) -> bool:
    journalled = journal_shipment(
        origin,
        {
            "id": confirmation["id"],
            "destination": confirmation["destination"],
            "num_files": len(confirmation["files"]),
            "num_bytes": confirmation["read_back"]["num_bytes"],
        },
    )
    pin.give_back()
    return journalled


def _read_source(contents: Contents, generation: Generation, progress: Progress) -> list[Item]:
    """Return all files that make the run directory, each read whole, in the order of sending."""
    items = [measure(content, progress) for content in contents.files]
    by_name = {item.name: item for item in items}
    whole = None
    if contents.bin is not None:
        whole = measure(contents.bin, progress)
    elif contents.bin_is is not None:
        whole = by_name[contents.bin_is]
        progress(whole.size_bytes)
    if whole is not None:
        item, sums = bin_items(whole, generation.step)
        items += [item, measure(sums, untold)]
    return [*items, measure(resume_point_content(generation), progress)]


def _missing_bytes(folder: Folder, items: Sequence[Item]) -> int:
    return sum(i.size_bytes for i in items if folder.size(i.name) != i.size_bytes)


@contextmanager
def _trial_place(
    folder: Folder, scratch_dir: Path | None, generation: Generation
) -> Iterator[Path]:
    """Give where the copy is to be loaded from: in place, or where it is fetched to."""
    if folder.home is not None:
        yield folder.home
        return
    point = generation.manifest
    need_bytes = point.num_bytes + int(point.index["size_bytes"]) + _SMALL_BYTES
    with scratch(scratch_dir, point.id, need_bytes) as path:
        yield path


def _tell_trial(trial: Trial) -> dict[str, Any]:
    return {
        "passed": True,
        "num_tensors": trial.num_tensors,
        "num_bytes": trial.num_bytes,
        "num_ranks": trial.num_ranks,
    }


def _tell_bin(items: Sequence[Item], step: int) -> dict[str, Any] | None:
    for item in items:
        if item.name == bin_name(step):
            return {"name": item.name, "size_bytes": item.size_bytes, "sha256": item.sha256}
    return None
