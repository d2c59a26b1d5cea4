"""A fixed set of page-aligned buffers, so that memory doesn't depend on files' sizes. Layer 2."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import SettingError
from dist_ckpt.storage._arena import Arena
from dist_ckpt.storage._ops import PAGE_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from dist_ckpt.storage._types import ByteArray

__all__ = ["Buffers"]

_LEAST_CHUNK_BYTES: Final = 16 * PAGE_BYTES


class Buffers:
    """Equal page-aligned buffers in one arena, handed out and taken back. Any thread.

    Args:
        least: So many there must be: what one thread may hold at a time, and one more.
        memory_bytes: How much they may take together.

    Attributes:
        chunk_bytes: Size of each, a power of two, `PIECE_BYTES` at most.

    Raises:
        SettingError: The memory is too small for that many.
        StorageError: The memory can't be had.
    """

    def __init__(self, least: int, memory_bytes: int) -> None:
        self.chunk_bytes = PIECE_BYTES
        while self.chunk_bytes > _LEAST_CHUNK_BYTES and self.chunk_bytes * least > memory_bytes:
            self.chunk_bytes //= 2
        if self.chunk_bytes * least > memory_bytes:
            need = _LEAST_CHUNK_BYTES * least
            raise SettingError(
                f"{memory_bytes:,} bytes of memory are too few for that many files at a time; "
                f"{need:,} are needed.",
                next_step=f"Give at least {-(-need // 2**20)} MiB.",
                expected=need,
                found=memory_bytes,
            )
        self._arena = Arena(self.chunk_bytes * least)
        self._free: queue.SimpleQueue[ByteArray] = queue.SimpleQueue()
        for at in range(0, self.chunk_bytes * least, self.chunk_bytes):
            self.give(self._arena.array[at : at + self.chunk_bytes])

    def take(self) -> ByteArray:
        """Return a buffer, once one is free; what it holds means nothing."""
        return self._free.get()

    def give(self, buffer: ByteArray) -> None:
        """Have a buffer back."""
        self._free.put(buffer)

    def close(self) -> None:
        """Give the memory back, once nobody holds a view of it."""
        self._free = queue.SimpleQueue()
        self._arena.close()
