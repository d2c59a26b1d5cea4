"""A directory of this machine as a destination: durable, and read back from the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, ForeignFileError, NotFoundError, StorageError
from dist_ckpt.shipping._items import Item, watched

__all__ = ["LocalFolder"]

Progress = Callable[[int], None]

_TEMPORARY = ".tmp-ship-"


class LocalFolder:
    """A `Folder` in a file system; through ``storage`` alone.

    Args:
        path: The folder, absolute; its parents are made where they are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)
        self.home: Path | None = path
        self._written: set[Path] = set()
        self._right: set[Path] = set()

    def names(self) -> Collection[str]:
        """Return the names at its top; those of files half written aren't told."""
        storage.require_no_link(self.path)
        if not storage.exists(self.path):
            return []
        return [name for name in storage.list_names(self.path) if not name.startswith(_TEMPORARY)]

    def size(self, name: str) -> int | None:
        """Return a file's size; None where there is none."""
        path = self.path / name
        if not storage.exists(path):
            return None
        return None if storage.is_dir(path) else storage.file_size(path)

    def write(self, item: Item, progress: Progress) -> None:
        """Have the file there: under another name until it is whole and durable."""
        target = self.path / item.name
        self._make_private(target.parent)
        beside = target.with_name(f"{_TEMPORARY}{target.name}")
        storage.unlink(beside, missing_ok=True)
        mode = item.content.mode
        with storage.StreamWriter(beside, item.size_bytes, mode=mode, sha256=False) as writer:
            for chunk in watched(item.content.chunks(), progress):
                writer.write(chunk)
        try:
            storage.rename(beside, target)
        except BaseException:
            with suppress(StorageError):
                storage.unlink(beside, missing_ok=True)
            raise
        storage.sync_dir(target.parent)
        self._written.add(target)

    def is_right(self, item: Item, progress: Progress, copy_to: Path | None) -> bool:  # noqa: ARG002 - it is here already
        """Return whether the file on the device is what it must be."""
        path = self.path / item.name
        try:
            for directory in self._inside(path):
                storage.require_no_link(directory)  # what it leads to is no part of the copy
            storage.verify_file(path, item.digest, progress=progress)
        except (CorruptFileError, ForeignFileError, NotFoundError):
            return False
        self._right.add(path)
        return True

    def read_small(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small file's bytes; None where there is none, or it is larger."""
        try:
            return storage.read_file(self.path / name, limit_bytes=limit_bytes)
        except (CorruptFileError, ForeignFileError, NotFoundError):
            return None

    def remove(self, name: str) -> None:
        """Have no file of that name, durably."""
        path = self.path / name
        if storage.exists(path):
            storage.unlink(path)
            storage.sync_dir(path.parent)

    def _make_private(self, directory: Path) -> None:
        """Have a directory, this folder or one below it, for this user alone; none is a link."""
        if directory == self.path:
            storage.make_dir(directory, exist_ok=True, parents=True, follow=False)
        else:
            self._make_private(directory.parent)
            storage.make_dir(directory, exist_ok=True, follow=False)

    def check_room(self, num_bytes: int) -> None:
        """Return if so much fits beside what is there."""
        existing = self.path
        while not storage.exists(existing) and existing != existing.parent:
            existing = existing.parent
        storage.check_space(existing, num_bytes)

    def settle(self) -> None:
        """Have everything durable that is there, and the names that lead to it."""
        # What this call wrote is. What it found right may be that of a call which was killed before
        # it had synced the bytes, the name, or the directory's.
        for path in sorted(self._right - self._written):
            storage.sync_file(path)
        self._written |= self._right
        above = {parent for path in self._written for parent in self._inside(path)}
        for directory in sorted(above, reverse=True):
            storage.sync_dir(directory)
        storage.sync_names(self.path)

    def _inside(self, path: Path) -> list[Path]:
        """Return the directories that lead to a file, this folder and those below it."""
        return [parent for parent in path.parents if parent.is_relative_to(self.path)]
