"""The end of a growing file that isn't durable yet, kept to be written anew. Layer 2, pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Bytes


class Unsynced:
    """A copy of the bytes at the end of a file that no sync has covered.

    The kernel tells of a failed write once and then takes the pages for clean: a second sync would
    succeed without having written them. Only bytes that are written again make it mean something.

    One caller at a time.

    Attributes:
        start: Where in the file the copy begins; it reaches to the end of the file.
        data: The copy.
        is_doubtful: The last sync failed: what the device holds from ``start`` on isn't known.
    """

    def __init__(self, size_bytes: int) -> None:
        self.start = size_bytes
        self.data = bytearray()
        self.is_doubtful = False
        self._touched: int | None = None

    def put(self, offset: int, data: Bytes) -> None:
        """Note that the file is its first ``offset`` bytes and then ``data``."""
        self.start = min(self.start, offset)
        self.data[offset - self.start :] = data
        if self._touched is None or offset < self._touched:
            self._touched = offset

    def begin_sync(self) -> None:
        """Note that a sync covers what was put until now, and nothing of what comes meanwhile."""
        self._touched = None

    def end_sync(self) -> None:
        """Let go of what the sync has made durable."""
        self.is_doubtful = False
        end = self.start + len(self.data)
        durable = end if self._touched is None else max(self._touched, self.start)
        del self.data[: durable - self.start]
        self.start = durable
