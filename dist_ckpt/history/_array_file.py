"""A file that is a JSON array after every append. Layer 4, I/O through ``storage`` only.

An append is one positional write that begins at the closing bracket. So old bytes stay, all but
that bracket, the cost doesn't grow with the file, and a torn append leaves a whole beginning.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.history._json_array import EMPTY_ARRAY, encode_append
from dist_ckpt.storage import AppendFile, read_file, replace_durable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt.history._json_array import Mended

__all__ = ["LIMIT_BYTES", "ArrayFile", "read_or_none"]

LIMIT_BYTES: Final = 2**31  # nothing of ours grows so far: 200,000 losses take 6 MB


def read_or_none(path: str | os.PathLike[str]) -> bytes | None:
    """Return all bytes of a file, None where there is no such file.

    Raises:
        StorageError: The file system refused.
        CorruptFileError: Larger than any file of a history.
    """
    try:
        return read_file(path, limit_bytes=LIMIT_BYTES)
    except NotFoundError:
        return None


class ArrayFile:
    """The open end of a JSON array in a file; made, or repaired, when it is built.

    One thread appends; `sync` may run on another meanwhile.

    Args:
        path: The file; made where it is missing.
        data: Its bytes as just read, None where it is missing.
        num_items: How many whole items they hold.
        end: Offset of the closing bracket, or where it has to be put.
        whole: Whether nothing has to be repaired.
        mended: What the file has to be where it is damaged in the middle: it is replaced then.
        keep_cut: Given the bytes that a repair is about to cut, before anything changes.

    Attributes:
        repaired: Bytes that a repair has cut.
        num_behind: Items behind damage in the middle, which were kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data: bytes | None,
        *,
        num_items: int,
        end: int,
        whole: bool,
        mended: Mended | None = None,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.num_items = num_items
        self._end = end
        cut = b"" if whole or data is None else data[end:]
        if mended is not None:
            cut = mended.cut
        if cut and keep_cut is not None:
            keep_cut(cut)
        self.repaired = len(cut)
        self.num_behind = 0
        if mended is not None:  # not in place: a power cut must not take what was durable
            replace_durable(self.path, mended.data + b"]")
            self._end, whole, self.num_behind = len(mended.data), True, mended.num_behind
        self._file = AppendFile(path, mode=0o600)
        if not whole:
            try:
                self._repair()
            except BaseException:
                self._file.close()
                raise

    def append(self, item: bytes) -> None:
        """Add one item; afterwards the file is valid JSON. O(1).

        Raises:
            StorageError: The file system refused; the file is put back as it was as far as that
                is possible, and is repaired when it is opened next otherwise.
        """
        data = encode_append(item, first=self.num_items == 0)
        try:
            self._file.overwrite_tail(self._end, data)
        except StorageError:
            # The bracket went with the half item that was cut; putting it back needs no new block.
            with contextlib.suppress(StorageError):
                self._repair()
            raise
        self._end += len(data) - 1
        self.num_items += 1

    def doubt(self, first: int) -> None:
        """Have the next sync write the items anew of which the first begins at this offset.

        Raises:
            StorageError: The file system refused.
        """
        if first < self._end:  # from the bracket on that its append has replaced
            self._file.doubt(max(1, first - len(b",\n")))

    def touch(self) -> None:
        """Have the file be changed now for whoever looks at its time; no error comes of it."""
        self._file.touch()

    def has_its_name(self) -> bool:
        """Return whether the path still leads to this file. Any thread."""
        return self._file.has_its_name()

    def revive(self) -> None:
        """Have the path lead to all that was appended again, durable; not beside an append."""
        self._file.revive()

    def sync(self) -> None:
        """Make all appends that returned before this call durable. Any thread."""
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()

    def _repair(self) -> None:
        # Overwriting also ends the file there: what was behind is cut.
        if self._end == 0:  # NUL bytes or spaces before the array aren't worth keeping
            self._file.overwrite_tail(0, EMPTY_ARRAY)
            self._end = 1
            # An append that outlives the bracket before it would look like somebody else's file.
            self._file.sync()
        else:
            self._file.overwrite_tail(self._end, b"]")
