"""A directory of this machine as a destination: durable, and read back from the device."""

from __future__ import annotations

import os
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

    def names(self) -> Collection[str]:
        """Return the names at its top; those of files half written aren't told."""
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

    def is_right(self, item: Item, progress: Progress, copy_to: Path | None) -> bool:  # noqa: ARG002 - it is here already
        """Return whether the file on the device is what it must be."""
        try:
            storage.verify_file(self.path / item.name, item.digest, progress=progress)
        except (CorruptFileError, ForeignFileError, NotFoundError):
            return False
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
        """Have a directory, this folder or one below it, for this user alone."""
        if directory == self.path:
            storage.make_dir(directory, exist_ok=True, parents=True)
        elif not storage.exists(directory):
            self._make_private(directory.parent)
            storage.make_dir(directory, exist_ok=True)

    def check_room(self, num_bytes: int) -> None:
        """Return if so much fits beside what is there."""
        existing = self.path
        while not storage.exists(existing) and existing != existing.parent:
            existing = existing.parent
        storage.check_space(existing, num_bytes)

    def settle(self) -> None:
        """Have the directories' names durable, up to the one that was there before."""
        # What lies below the folder was synced with each file. Of its parents nobody knows which
        # were made for it, by this call or by one that was cut off.
        device = storage.device_of(self.path)
        storage.sync_dir(self.path / "checkpoints")
        place = Path(os.path.realpath(self.path))
        for path in (place, *place.parents):
            with suppress(StorageError):  # a parent may be somebody else's
                if storage.device_of(path) != device:
                    break
                storage.sync_dir(path)
