"""The generations of one run directory: prepare → commit or abort; verified, retired. Layer 4.

Not collective: rank 0 writes, while it holds the run's lock; any rank may read. A generation exists
only once it is committed; its files never change after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name, step_name
from dist_ckpt.errors import CorruptFileError, ForeignFileError, NotFoundError
from dist_ckpt.generations._pins import PINS_NAME, encode_pins
from dist_ckpt.generations._stored import StoredGenerations
from dist_ckpt.provenance import SIGNATURE_NAME
from dist_ckpt.resume_point import (
    INDEX_NAME,
    RESUME_POINT_NAME,
    VERIFIED_NAME,
    ResumePoint,
    encode_resume_point,
)

__all__ = ["GenerationStore"]

_TEMPORARY = ".tmp-"
_SUM_SUFFIX = ".sha256"
#: Writing the pins, or giving a generation another name, takes far less.
_PINS_WAIT_SECS = 30.0


class GenerationStore(StoredGenerations):
    """The generations below one run directory, to be read, and by rank 0 to be written.

    Args:
        run_dir: The run directory; needn't exist for reading to answer "none".
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._is_durable = False

    def create(self) -> None:
        """Have the run directory and ``checkpoints/``, each found again after a power cut.

        A generation is no more durable than the names that lead to it. Those that are there already
        are made durable as well.
        """
        if self._is_durable and storage.exists(self.directory):
            return
        storage.make_dir(self.run_dir.parent, 0o777, exist_ok=True, parents=True)
        storage.make_dir(self.run_dir, exist_ok=True)
        storage.make_dir(self.directory, exist_ok=True, follow=False)
        storage.sync_names(self.directory)
        # The names in it too: the attempt before may have ended between a commit's rename and its
        # sync, and what is older than that commit is about to be retired.
        storage.sync_dir(self.directory)
        self._is_durable = True

    def prepare(self, step: int, save_id: str) -> Path:
        """Return a fresh temporary directory for the files of a save.

        A ``step_N.bin`` without a generation is of an earlier generation of that step and would be
        taken for the new one's: it is moved to ``archive/``.
        """
        self.create()
        if not storage.exists(self.path(step)):
            self.set_bin_aside(step, f"leftover_{step:06d}")
        temporary = self.directory / f"{_TEMPORARY}{step_name(step)}-{save_id}"
        storage.make_dir(temporary)
        return temporary

    def commit(
        self,
        temporary: Path,
        point: ResumePoint,
        index: bytes,
        *,
        sign: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Make the prepared directory the generation of ``point.step``; durable when it returns.

        The files of all ranks are in place and synced. ``resume_point.json`` is written last, the
        directory is synced before it gets its name, and the parent after. ``sign`` returns the
        signature of its bytes, which then lies beside it.

        Raises:
            StorageError: This step is committed already, or the system refused. Where only the
                last sync failed the generation is there, and a power cut may take it away.
        """
        storage.write_durable(temporary / INDEX_NAME, index)
        data = encode_resume_point(point)
        if sign is not None:
            storage.write_durable(temporary / SIGNATURE_NAME, sign(data))
        storage.write_durable(temporary / RESUME_POINT_NAME, data)
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

    def retire(self, step: int) -> bool:
        """Remove a generation and its .bin; return False where it was pinned meanwhile.

        The .bin goes first: a crash in between leaves a whole generation, which is retired again.
        The generation loses its name before its first file, so that no half of it has that name.
        Once a pin was accepted, its generation stays: the pins are read where nobody writes them.

        Raises:
            CorruptFileError: ``pins.json`` can't be understood.
            LockedError: Somebody else holds the pins, for longer than it takes.
        """
        self.create()  # the newer ones have their names for good before an older one loses its
        trash = self.directory / f"{_TEMPORARY}trash-{step_name(step)}-{secrets.token_hex(4)}"
        with self._holding_pins():
            if step in self.pins():
                return False
            self.drop_bin(step)
            storage.rename_durable(self.path(step), trash)
        storage.remove_tree(trash)
        return True

    def pin(self, step: int, reason: str) -> None:
        """Have a generation that retention keeps, durably; also beside a job that trains.

        Raises:
            NotFoundError: No such generation (any more).
            CorruptFileError: Its manifest, or ``pins.json``, can't be read.
        """
        self.manifest(step)  # where it can't be read no lock file is left either
        with self._holding_pins():
            pins = self._read_pins().with_pin(step, self.manifest(step).id, reason)
            storage.replace_durable(self.run_dir / PINS_NAME, encode_pins(pins))

    def unpin(self, step: int) -> bool:
        """Leave a generation to retention again; return whether it was pinned."""
        if not storage.exists(self.run_dir / PINS_NAME):
            return False
        with self._holding_pins():
            pins = self._read_pins()
            id_ = None  # where the manifest isn't whole: all of that step
            with contextlib.suppress(NotFoundError, CorruptFileError, ForeignFileError):
                id_ = self.manifest(step).id
            rest = pins.without(step, id_)
            if rest == pins:
                return False
            storage.replace_durable(self.run_dir / PINS_NAME, encode_pins(rest))
        return True

    def repin(self, step: int, change: Callable[[str | None], str | None]) -> None:
        """Have what ``change`` makes of a pin's reason, None for no pin; nobody else pins then."""
        with self._holding_pins():
            was = self.pins().get(step)
            if (reason := change(was)) != was:
                id_ = self.manifest(step).id
                pins = self._read_pins().without(step, id_)
                if reason is not None:
                    pins = pins.with_pin(step, id_, reason)
                storage.replace_durable(self.run_dir / PINS_NAME, encode_pins(pins))

    @contextlib.contextmanager
    def _holding_pins(self) -> Iterator[None]:
        lock = storage.RunLock(self.run_dir / "pins.lock")
        lock.acquire({"pid": os.getpid(), "for": "pins.json"}, wait_secs=_PINS_WAIT_SECS)
        try:
            yield
        finally:
            lock.release()

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
        self.create()  # as in `retire`
        home = self._home(label, step)
        self._move_bin(step, home)
        storage.rename_durable(self.path(step), home / step_name(step))
        return home / step_name(step)

    def set_bin_aside(self, step: int, label: str) -> bool:
        """Move ``step_N.bin`` and its sum into ``archive/LABEL…/``; return whether one was."""
        if not any(storage.exists(path) for path in self._bin_files(step)):
            return False
        self._move_bin(step, self._home(label, step))
        return True

    def new_home(self, label: str) -> str:
        """Return LABEL, with a number behind it where something is in ``archive/LABEL``.

        An empty one is what a move that was cut off before its first file has left.
        """
        name, number = label, 1
        while self._is_taken(self.archive / name):
            number += 1
            name = f"{label}-{number}"
        return name

    @staticmethod
    def _is_taken(home: Path) -> bool:
        if not storage.exists(home):
            return False
        return not storage.is_dir(home) or bool(storage.list_names(home))

    def make_home(self, home: str) -> Path:
        """Return ``archive/HOME/``, made if need be, its name durable."""
        return self._durable_home(self.archive / home)

    def archived(self) -> list[tuple[str, int]]:
        """Return ``(home, step)`` of each generation in ``archive/HOME/``, ascending by step."""
        found = []
        for home in storage.list_names(self.archive) if storage.is_dir(self.archive) else ():
            if storage.is_dir(self.archive / home):
                names = storage.list_names(self.archive / home)
                steps = (parse_step_name(name) for name in names if not name.endswith(".bin"))
                found += [(home, step) for step in steps if step is not None]
        return sorted(found, key=lambda item: (item[1], item[0]))

    def bring_back(self, home: str, step: int) -> None:
        """Move a generation and its .bin from ``archive/HOME/`` to where they were; durable.

        The .bin goes first, so that the last rename is what brings the generation back. A .bin that
        lies there without a generation is set aside.

        Raises:
            StorageError: A generation of this step is there, or the system refused.
        """
        self.create()
        source = self.archive / home
        moved = [path for path in self._bin_files(step) if storage.exists(source / path.name)]
        if any(storage.exists(path) for path in moved):
            self.set_bin_aside(step, f"leftover_{step:06d}")
        for path in moved:
            storage.rename_durable(source / path.name, path)
        storage.rename_durable(source / step_name(step), self.path(step))

    def _home(self, label: str, step: int) -> Path:
        """Return a directory of the archive where nothing is in the way, its name durable.

        What a move that was cut off has moved there already isn't in the way.
        """
        sources = (self.path(step), *self._bin_files(step))
        names = [path.name for path in sources if storage.exists(path)]
        home, number = self.archive / label, 1
        while any(storage.exists(home / name) for name in names):
            number += 1
            home = self.archive / f"{label}-{number}"
        return self._durable_home(home)

    def _durable_home(self, home: Path) -> Path:
        storage.make_dir(self.archive, exist_ok=True, follow=False)
        storage.make_dir(home, exist_ok=True, follow=False)
        storage.sync_names(home)
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
