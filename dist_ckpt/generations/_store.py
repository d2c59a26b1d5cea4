"""The generations of a run: prepare → commit or abort; list, read, verify, retire. Layer 4.

Not collective: rank 0 prepares, commits and retires, every rank may read. A generation exists only
once it is committed; its files never change after that.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.canonical import bin_name, parse_step_name, step_name
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    DistCkptError,
    NotFoundError,
)
from dist_ckpt.resume_point import (
    INDEX_NAME,
    RESUME_POINT_NAME,
    VERIFIED_NAME,
    ResumePoint,
    encode_resume_point,
    load_strict_json,
    parse_resume_point,
)
from dist_ckpt.snapshot_index import IndexedTensor, parse_index
from dist_ckpt.storage import FileDigest

__all__ = ["GenerationStore"]

#: Nobody's manifest is larger; a larger file isn't read into memory.
_MANIFEST_LIMIT_BYTES = 1 << 30
_TEMPORARY = ".tmp-"
_SUM_SUFFIX = ".sha256"
_WAY_OUT = "Use another generation; `dist-ckpt verify RUN` names the whole ones."


class GenerationStore:
    """The generations below one run directory.

    Args:
        run_dir: The run directory; needn't exist for reading to answer "none".
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoints"
        self.archive = run_dir / "archive"

    # Reading

    def steps(self) -> list[int]:
        """Return the steps of the committed generations, as numbers, ascending."""
        if not storage.exists(self.directory):
            return []
        names = [name for name in storage.list_names(self.directory) if not name.endswith(".bin")]
        found = (parse_step_name(name) for name in names)
        return sorted(step for step in found if step is not None)

    def path(self, step: int) -> Path:
        """Return where the generation of ``step`` lies or would lie."""
        return self.directory / step_name(step)

    def bin_path(self, step: int) -> Path:
        """Return where ``step_N.bin`` of ``step`` lies or would lie."""
        return self.run_dir / bin_name(step)

    def manifest_bytes(self, step: int) -> bytes:
        """Return the bytes of ``resume_point.json``, unchecked."""
        path = self.path(step) / RESUME_POINT_NAME
        return storage.read_file(path, limit_bytes=_MANIFEST_LIMIT_BYTES)

    def manifest(self, step: int) -> ResumePoint:
        """Return the checked resume point of ``step``.

        Raises:
            NotFoundError: No such generation, or it lacks the file.
            CorruptFileError: The file isn't whole, or belongs to another step.
        """
        path = self.path(step) / RESUME_POINT_NAME
        point = parse_resume_point(self.manifest_bytes(step), path=path)
        if point.step != step:
            raise CorruptFileError(
                f"{path} is of step {point.step}, in the directory of step {step}.",
                next_step="Move the directory out of checkpoints/.",
                path=str(path),
                expected=step,
                found=point.step,
            )
        return point

    def index(self, point: ResumePoint) -> dict[str, IndexedTensor]:
        """Return where every tensor of ``point`` lies; the index's digest is checked."""
        path = self.path(point.step) / INDEX_NAME
        data = storage.read_file(path, limit_bytes=_MANIFEST_LIMIT_BYTES)
        found = storage.digest_bytes(data)
        if found != point.index["digest"]:
            raise DigestMismatchError(
                f"{path} was changed: its digest is {found}, "
                f"the resume point says {point.index['digest']}.",
                next_step=_WAY_OUT,
                path=str(path),
                expected=point.index["digest"],
                found=found,
            )
        sizes = {name: int(record["size_bytes"]) for name, record in point.files.items()}
        return parse_index(data, path=path, file_sizes=sizes)

    def digests(self, point: ResumePoint) -> dict[str, FileDigest]:
        """Return the digest of each rank file of ``point``."""
        where = self.path(point.step) / RESUME_POINT_NAME
        digests = {}
        for name, record in point.files.items():
            try:
                digests[name] = FileDigest.from_json(record)
            except (KeyError, TypeError, ValueError, DistCkptError) as error:
                raise CorruptFileError(
                    f"{where} has no usable digests of {name}: {error}",
                    next_step="Use another generation.",
                    path=str(where),
                ) from error
        return digests

    def check_files(self, point: ResumePoint) -> None:
        """Return if every file of ``point`` is there with its length; reads no data.

        Raises:
            NotFoundError: One is missing.
            CorruptFileError: One has another length.
        """
        for name, record in point.files.items():
            path = self.path(point.step) / name
            if not storage.exists(path):
                raise NotFoundError(
                    f"{path} is missing.",
                    next_step=_WAY_OUT,
                    path=str(path),
                )
            size = storage.file_size(path)
            if size != record["size_bytes"]:
                raise CorruptFileError(
                    f"{path} has {size} bytes instead of {record['size_bytes']}.",
                    next_step=_WAY_OUT,
                    path=str(path),
                    expected=record["size_bytes"],
                    found=size,
                )

    def verified_at(self, step: int) -> float | None:
        """Return when this very generation was read back whole, in seconds since the epoch.

        None where it wasn't, or where ``verified.json`` is of another generation or unreadable.
        """
        try:
            data = storage.read_file(self.path(step) / VERIFIED_NAME, limit_bytes=1 << 16)
            body = load_strict_json(data, path=VERIFIED_NAME)
            if body.get("resume_point") != storage.digest_bytes(self.manifest_bytes(step)):
                return None
            when = float(body["time"])
        except (DistCkptError, KeyError, TypeError, ValueError, OverflowError):
            return None
        return when if math.isfinite(when) else None

    def verify(
        self,
        point: ResumePoint,
        *,
        names: Collection[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Return the bytes read after every byte of the files was compared with its digest.

        Args:
            point: The resume point, already checked by itself.
            names: Only these files; None for all, the index among them.
            progress: Called with the bytes read since the last call.

        Raises:
            DigestMismatchError, CorruptFileError, NotFoundError: The first fault found.
        """
        total = 0
        if names is None:
            self.index(point)
        for name, digest in self.digests(point).items():
            if names is None or name in names:
                path = self.path(point.step) / name
                total += storage.verify_file(path, digest, progress=progress)
        return total

    # Writing, rank 0

    def create(self) -> None:
        """Have the run directory and ``checkpoints/``, each found again after a power cut.

        A generation is no more durable than the names that lead to it.
        """
        _make_durable(self.directory)

    def prepare(self, step: int, save_id: str) -> Path:
        """Return a fresh temporary directory for the files of a save.

        A ``step_N.bin`` without a generation is of an earlier generation of that step and would be
        taken for the new one's: it is moved to ``archive/``.
        """
        self.create()
        if not storage.exists(self.path(step)):
            self._set_bin_aside(step, f"leftover_{step:06d}")
        temporary = self.directory / f"{_TEMPORARY}{step_name(step)}-{save_id}"
        storage.make_dir(temporary)
        return temporary

    def commit(self, temporary: Path, point: ResumePoint, index: bytes) -> None:
        """Make the prepared directory the generation of ``point.step``; durable when it returns.

        The files of all ranks are in place and synced. ``resume_point.json`` is written last, the
        directory is synced before it gets its name, and the parent after.

        Raises:
            StorageError: This step is committed already, or the system refused. Where only the
                last sync failed the generation is there, and a power cut may take it away.
        """
        storage.write_durable(temporary / INDEX_NAME, index)
        storage.write_durable(temporary / RESUME_POINT_NAME, encode_resume_point(point))
        storage.sync_dir(temporary)
        storage.rename_durable(temporary, self.path(point.step))

    def abort(self, temporary: Path) -> None:
        """Remove what a failed save left."""
        storage.remove_tree(temporary)

    def mark_verified(self, step: int, how: str) -> None:
        """Record durably that the generation was read back whole."""
        body = {
            "resume_point": storage.digest_bytes(self.manifest_bytes(step)),
            "time": time.time(),
            "how": how,
        }
        path = self.path(step) / VERIFIED_NAME
        storage.replace_durable(path, json.dumps(body, allow_nan=False).encode(), mode=0o400)

    def retire(self, step: int) -> None:
        """Remove a generation and its .bin.

        The .bin goes first: a crash in between leaves a whole generation, which is retired again.
        The generation loses its name before its first file, so that no half of it has that name.
        """
        self.drop_bin(step)
        trash = self.directory / f"{_TEMPORARY}trash-{step_name(step)}-{secrets.token_hex(4)}"
        storage.rename_durable(self.path(step), trash)
        storage.remove_tree(trash)

    def drop_bin(self, step: int) -> None:
        """Remove ``step_N.bin`` and its sum, if there."""
        for path in reversed(self._bin_files(step)):
            storage.unlink(path, missing_ok=True)
        storage.sync_dir(self.run_dir)

    def set_aside(self, step: int, label: str) -> Path:
        """Move a generation and its .bin into ``archive/LABEL…/``; return where it lies now.

        Nothing is removed or replaced: the label gets a number where it is taken. The .bin goes
        first: a crash in between leaves a whole generation, whose .bin can be made again.
        """
        home = self._home(label, step)
        self._move_bin(step, home)
        storage.rename_durable(self.path(step), home / step_name(step))
        return home / step_name(step)

    def _set_bin_aside(self, step: int, label: str) -> None:
        if any(storage.exists(path) for path in self._bin_files(step)):
            self._move_bin(step, self._home(label, step))

    def _home(self, label: str, step: int) -> Path:
        """Return a directory of the archive with nothing of ``step`` in it, its name durable."""
        names = [step_name(step), *(path.name for path in self._bin_files(step))]
        home, number = self.archive / label, 1
        while any(storage.exists(home / name) for name in names):
            number += 1
            home = self.archive / f"{label}-{number}"
        _make_durable(home)
        return home

    def _bin_files(self, step: int) -> tuple[Path, Path]:
        path = self.bin_path(step)
        return path, path.with_name(path.name + _SUM_SUFFIX)

    def _move_bin(self, step: int, home: Path) -> None:
        for path in self._bin_files(step):
            if storage.exists(path):
                storage.rename_durable(path, home / path.name)

    def clean(self) -> list[str]:
        """Remove what interrupted saves and retirements left; return the names."""
        removed = []
        prefixes = {self.directory: _TEMPORARY, self.run_dir: f"{_TEMPORARY}step_"}
        for directory, prefix in prefixes.items():
            if storage.exists(directory):
                for name in storage.list_names(directory):
                    if name.startswith(prefix):
                        storage.remove_tree(directory / name)
                        removed.append(name)
        return removed

    # Pins

    def pins(self) -> Mapping[int, str]:
        """Return step → reason of the pinned generations.

        Raises:
            CorruptFileError: ``pins.json`` isn't an object of step numbers: nobody may guess what
                was pinned.
        """
        path = self.run_dir / "pins.json"
        if not storage.exists(path):
            return {}
        body: dict[str, Any] = load_strict_json(
            storage.read_file(path, limit_bytes=1 << 24), path=path
        )
        if wrong := [key for key in body if not (key.isascii() and key.isdigit())]:
            raise CorruptFileError(
                f"{path} pins {wrong[0]!r}, which isn't a step number.",
                next_step="Mend it by hand or move it away; until then nothing is retired.",
                path=str(path),
                found=wrong[0],
            )
        return {int(step): str(reason) for step, reason in body.items()}


def _make_durable(directory: Path) -> None:
    """Have a directory whose name is durable, and so are those of the parents made for it."""
    if storage.exists(directory):
        return
    _make_durable(directory.parent)
    storage.make_dir(directory, exist_ok=True)
    storage.sync_dir(directory.parent)
