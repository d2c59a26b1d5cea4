"""The generations of one run directory: prepare → commit or abort; verified, retired. Layer 4.

Not collective: rank 0 writes, while it holds the run's lock; any rank may read. A generation exists
only once it is committed; its files never change after that.
"""

from __future__ import annotations

import errno
import json
import secrets
import time
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import step_name
from dist_ckpt.errors import StorageError
from dist_ckpt.generations._stored import StoredGenerations
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


class GenerationStore(StoredGenerations):
    """The generations below one run directory, to be read, and by rank 0 to be written.

    Args:
        run_dir: The run directory; needn't exist for reading to answer "none".
    """

    def create(self) -> None:
        """Have the run directory and ``checkpoints/``, each found again after a power cut.

        A generation is no more durable than the names that lead to it.
        """
        _make_durable(self.run_dir.parent, mode=0o777)
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


def _make_durable(directory: Path, mode: int = 0o700) -> None:
    """Have a directory whose name is durable, and so are those of the parents made for it."""
    if storage.exists(directory):
        return
    _make_durable(directory.parent, mode)
    storage.make_dir(directory, mode, exist_ok=True)
    try:
        storage.sync_dir(directory.parent)
    except StorageError as error:
        # Others' directory, where one may write but not look: nothing more can be done.
        if error.errno != errno.EACCES:
            raise
