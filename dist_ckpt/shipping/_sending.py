"""The destination's side of a shipment: each file sent, read back, sent again where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError
from dist_ckpt.shipping._folder import Folder
from dist_ckpt.shipping._items import Content, Item, content_of_bytes, measure
from dist_ckpt.shipping._texts import CONFIRMATION, MARKER

__all__ = ["Sending", "untold"]

Progress = Callable[[int], None]

_TRIES: Final = 3


def untold(_num_bytes: int) -> None:
    """Do nothing: so few bytes are no progress."""


@dataclass
class Sending:
    """What was done to the destination.

    Attributes:
        folder: The folder there.
        marker: Says whose files these are, until all have arrived.
        progress: Told the bytes sent and read.
        is_continued: Files of it may be there already.
        begun: Something was written.
        sent: Files that were sent.
        wrong: Files that were there and weren't right, or arrived so.
    """

    folder: Folder
    marker: Content
    progress: Progress
    is_continued: bool
    begun: bool = False
    sent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def bring(self, item: Item, fetched: Path | None) -> None:
        """Have the file at the destination, read back and found right.

        Args:
            item: Which.
            fetched: Where a generation's files are to be, as they were read back.
        """
        copy_to = None
        if fetched is not None and item.name.startswith("checkpoints/"):
            copy_to = fetched / item.name
            storage.make_dir(copy_to.parent, exist_ok=True, parents=True)
        if self.is_continued:
            if self.folder.is_right(item, self.progress, copy_to):
                self.progress(item.size_bytes)
                return
            if self.folder.size(item.name) is not None:
                self.wrong.append(item.name)
        for _ in range(_TRIES):
            self._begin()
            self.folder.write(item, self.progress)
            if self.folder.is_right(item, self.progress, copy_to):
                self.sent.append(item.name)
                return
            self.wrong.append(item.name)
        raise CorruptFileError(
            f"{self.folder.label}/{item.name} came out wrong {_TRIES} times; nothing is confirmed.",
            next_step="Look at the destination and what lies between, then call again.",
            path=f"{self.folder.label}/{item.name}",
        )

    def end(self, confirmation: dict[str, Any]) -> None:
        """Have the confirmation there, the last of all; the marker goes."""
        data = json.dumps(confirmation, indent=1, allow_nan=False).encode() + b"\n"
        item = measure(content_of_bytes(CONFIRMATION, data), untold)
        self.folder.write(item, untold)
        if not self.folder.is_right(item, untold, None):
            self.folder.remove(CONFIRMATION)
            raise CorruptFileError(
                f"{self.folder.label}/{CONFIRMATION} came out wrong.",
                next_step="Call again.",
                path=f"{self.folder.label}/{CONFIRMATION}",
            )
        self.folder.remove(MARKER)
        self.folder.settle()

    def tell(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return what was found, as JSON."""
        return {
            "files": {
                item.name: {
                    "size_bytes": item.size_bytes,
                    "sha256": item.sha256,
                    "digest": item.digest.whole,
                }
                for item in items
            },
            "sent": list(self.sent),
            "found_wrong": list(self.wrong),
            "read_back": {
                "num_files": len(items),
                "num_bytes": sum(item.size_bytes for item in items),
                "all_right": True,
            },
        }

    def _begin(self) -> None:
        """Say whose files these are, and that not all of them are right."""
        if not self.begun:
            self.begun = True
            self.folder.write(measure(self.marker, untold), untold)
            self.folder.remove(CONFIRMATION)
