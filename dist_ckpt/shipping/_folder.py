"""What a destination has to offer, whatever it is: a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from dist_ckpt.shipping._items import Item
from dist_ckpt.shipping._place import Place

__all__ = ["Folder", "open_folder"]

Progress = Callable[[int], None]


class Folder(Protocol):
    """The folder of one shipment at its destination; it needn't exist yet.

    Names are paths below it, with ``/``. One thread. All but the local one turn every error of
    theirs into a `StorageError` whose text holds no credentials.

    Attributes:
        label: For people, without credentials.
        home: Where it lies, if it is a directory of this machine.
    """

    label: str
    home: Path | None

    def names(self) -> Collection[str]:
        """Return the names at its top; empty where it doesn't exist."""
        ...

    def size(self, name: str) -> int | None:
        """Return a file's size; None where there is none."""
        ...

    def write(self, item: Item, progress: Progress) -> None:
        """Have the file there, whole; one of that name is replaced.

        A call that is cut off may leave the old file, none, or half of the new one.
        """
        ...

    def is_right(self, item: Item, progress: Progress, copy_to: Path | None) -> bool:
        """Return whether the file, read back, is byte for byte what it must be.

        Args:
            item: Which.
            progress: Told the bytes read.
            copy_to: Where to have what was read, if it is right and not of this machine; its parent
                exists and it doesn't.
        """
        ...

    def read_small(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small file's bytes; None where there is none, or it is larger."""
        ...

    def remove(self, name: str) -> None:
        """Have no file of that name."""
        ...

    def check_room(self, num_bytes: int) -> None:
        """Return if so much fits, or if nobody can tell.

        Raises:
            NoSpaceError: It doesn't.
        """
        ...

    def settle(self) -> None:
        """Return when everything written is durable, names and all."""
        ...


def open_folder(place: Place, name: str) -> Folder:
    """Return the folder ``name`` at a place. Connects to it, and changes nothing there."""
    if place.path is not None:
        from dist_ckpt.shipping._local import LocalFolder  # noqa: PLC0415 - one of two is needed

        return LocalFolder(place.path / name)
    from dist_ckpt.shipping._remote import RemoteFolder  # noqa: PLC0415 - as above

    return RemoteFolder(place, name)
