"""Journal and losses of a run that somebody trains, each byte parsed once. Layer 4, reads only."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from dist_ckpt.history._growing import GrowingFile
from dist_ckpt.history._journal import parse_journal
from dist_ckpt.history._loss_format import (
    CanonicalIndex,
    pair_columns,
    parse_appended,
    scan_loss,
)
from dist_ckpt.history._marks import void_losses
from dist_ckpt.history._paths import history_path, run_name

if TYPE_CHECKING:
    import os

    from dist_ckpt.history._loss_format import LossEntry

__all__ = ["FollowedHistory", "FollowedLosses"]


class FollowedLosses:
    """A loss file as it was at one look: 16 bytes an entry, where as many tuples take a hundred.

    Args:
        steps: Of all entries in the order of the file; what comes later is appended to it.
        losses: Beside them; null as NaN.
        void: How many from the beginning of the file don't count at all.
        index: Those that count.

    Attributes:
        void: As given.
        newest: The last step and loss that count, and how many do.
    """

    def __init__(
        self, steps: array[int], losses: array[float], void: int, index: CanonicalIndex
    ) -> None:
        self._steps, self._losses, self._num = steps, losses, len(steps)
        self.void = void
        step = index.last_step
        last = index.at_or_before(step) if step is not None else None
        self.newest = (*(last or (None, None)), len(index))

    def __len__(self) -> int:
        return self._num

    def entries(self, since: int = 0) -> list[LossEntry]:
        """Return the entries from a place of the file on, in its order."""
        place = slice(since, self._num)
        return list(pair_columns(self._steps[place], self._losses[place]))


class FollowedHistory:
    """The history of a run, looked at again and again, also beside the job that writes it.

    The first look at a file reads all of it, a later one what was appended. One thread at a time.

    Args:
        run_dir: The run directory.

    Raises:
        NotFoundError: No such directory.

    Attributes:
        loss_path: The loss file's.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        name = run_name(run_dir)
        self.loss_path = history_path(run_dir, name, "loss")
        self._journal = GrowingFile(history_path(run_dir, name, "journal"))
        self._events: list[dict[str, Any]] = []
        self._num_lines = 0
        self._loss = GrowingFile(self.loss_path)
        self._steps, self._losses = array("q"), array("d")
        self._void: int | None = 0  # None: not told yet of these entries
        self._index = CanonicalIndex(array("q"), array("d"))

    def journal(self) -> list[dict[str, Any]]:
        """Return the events so far, as `parse_journal` does; empty where there is no journal.

        Raises:
            StorageError: The file system refused.
        """
        is_all, data = self._journal.read()
        if is_all:
            self._events, self._num_lines = [], 0
        end = data.rfind(b"\n") + 1
        self._events += parse_journal(data[:end], first_line=self._num_lines + 1)
        self._num_lines += data.count(b"\n")
        self._journal.settle(data, end)
        return self._events + parse_journal(data[end:], first_line=self._num_lines + 1)

    def losses(self) -> FollowedLosses:
        """Return all entries so far; none where there is no loss file.

        Raises:
            CorruptFileError: The file is something else.
            StorageError: The file system refused.
        """
        self.index()
        return FollowedLosses(self._steps, self._losses, self._void or 0, self._index)

    def index(self) -> CanonicalIndex:
        """Return the losses so far that count, kept up to date by later looks; as `losses`."""
        is_all, data = self._loss.read()
        if not is_all and not self._append(data):
            self._loss.begin_anew()
            is_all, data = self._loss.read()
        if is_all:
            self._read_all(data)
        # Behind the losses: what a rewind voids meanwhile is among them.
        void = min(void_losses(self.journal()), len(self._steps))
        if void != self._void:
            # Slices, even of everything: the index has columns of its own.
            self._index = CanonicalIndex(self._steps[void:], self._losses[void:])
            self._void = void
        return self._index

    def _read_all(self, data: bytes) -> None:
        self._steps, self._losses, scan = scan_loss(data, path=self.loss_path)
        self._void = None
        if scan.whole:  # else an append is under way, or was torn: the next look reads all again
            self._loss.settle(data, scan.end)

    def _append(self, data: bytes) -> bool:
        """Take what was appended to a whole loss file; return whether it was that."""
        columns = parse_appended(data)
        if columns is None:
            return False
        steps, losses = columns
        for step, loss in zip(steps, losses, strict=True):
            self._index.push(step, loss)
        self._steps.extend(steps)
        self._losses.extend(losses)
        self._loss.settle(data, data.rindex(b"]"))
        return True
