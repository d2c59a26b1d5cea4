"""``NAME.loss.json``: one entry a step, append only, valid JSON at all times. Layer 4, I/O.

Besides the file, the canonical history is kept in memory (16 bytes an entry), so that a replay
can be compared with what was logged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dist_ckpt.history._array_file import ArrayFile, read_or_none
from dist_ckpt.history._gap import mark_of_columns
from dist_ckpt.history._loss_format import CanonicalIndex, encode_entry, loss_kind, scan_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_ckpt.history._loss_format import LossEntry, Missing

__all__ = ["LossFile"]


class LossFile:
    """The loss file of a run that is under way. Use `open`.

    One thread appends and reads; `sync` may run on another meanwhile.

    Attributes:
        repaired: Bytes that were cut when the file was opened: a torn end, or damage.
    """

    def __init__(self, file: ArrayFile, index: CanonicalIndex, num_void: int = 0) -> None:
        self._file = file
        self._index = index
        self._num_void = num_void
        self.repaired = file.repaired

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        void_entries: int = 0,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> LossFile:
        """Return the file, open at its end, whole and valid, made where it is missing.

        An end torn by a crash is cut after the last whole entry and closed; damage in the middle
        is cut out. Linear in the number of entries; 200,000 take some 0.1 s.

        Args:
            path: The file.
            void_entries: How many entries from the beginning of the file don't count (a rewind
                to before all of them).
            keep_cut: Given the bytes that a repair is about to cut, before anything changes.

        Raises:
            CorruptFileError: The file never was an array of ``[step, loss]``; it isn't touched.
            StorageError: The file system refused.
        """
        data = read_or_none(path)
        steps, losses, scan = scan_loss(data or b"", path=path)
        file = ArrayFile(
            path,
            data,
            num_items=len(steps),
            end=scan.end,
            whole=scan.whole,
            mended=scan.mended,
            keep_cut=keep_cut,
        )
        if void_entries:
            steps, losses = steps[void_entries:], losses[void_entries:]
        return cls(file, CanonicalIndex(steps, losses), void_entries)

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._file.path

    @property
    def num_entries(self) -> int:
        """Entries in the file, void ones included."""
        return self._file.num_items

    @property
    def num_after_void(self) -> int:
        """Entries behind those that the journal calls void."""
        return max(0, self.num_entries - self._num_void)

    @property
    def num_canonical(self) -> int:
        """Entries that count."""
        return len(self._index)

    @property
    def last_step(self) -> int | None:
        """The last step that counts, None where there is none."""
        return self._index.last_step

    def append(self, step: int, loss: float | None) -> None:
        """Add the entry of ``step``, which voids those of a step >= ``step``; O(1).

        The float is kept exactly; None, or one that isn't finite, is ``null``. Not durable
        before `sync`.

        Raises:
            UsageError: ``step`` is negative.
            StorageError: The file system refused; the entry isn't in the history then.
        """
        self._file.append(encode_entry(step, loss))
        self._index.push(step, None if loss is None or loss_kind(loss) else loss)

    def get(self, step: int) -> LossEntry | Missing:
        """Return the canonical entry ``(step, loss)`` of ``step``, or `MISSING`. O(log n)."""
        return self._index.get(step)

    def at_or_before(self, step: int) -> LossEntry | None:
        """Return the last canonical entry of a step <= ``step``, None where there is none."""
        return self._index.at_or_before(step)

    def after(self, step: int) -> list[LossEntry]:
        """Return the canonical entries of a step > ``step``."""
        return self._index.after(step)

    def mark(self, step: int) -> dict[str, Any]:
        """Return number and digest of the entries that count up to ``step``. 1 ms for 200,000."""
        return mark_of_columns(*self._index.columns_up_to(step))

    def entries(self) -> list[LossEntry]:
        """Return the canonical history, rising in step."""
        return list(self._index)

    def void_all(self) -> None:
        """Let no entry count any more, in memory: the journal has to say so for readers."""
        self._index.clear()
        self._num_void = self.num_entries

    @property
    def file(self) -> ArrayFile:
        """The file itself."""
        return self._file

    def sync(self) -> None:
        """Make all entries appended before this call durable. Any thread."""
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()
