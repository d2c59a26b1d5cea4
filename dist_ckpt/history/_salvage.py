"""Keeps what a repair cuts: short in the journal, longer in ``archive/``. Layer 4, I/O.

A torn entry is a few bytes. A power cut may take more: then whole entries can lie behind the
damage, and nothing is deleted into thin air.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from dist_ckpt.storage import exists, make_dir, sync_dir, write_durable

if TYPE_CHECKING:
    from dist_ckpt.history._journal import Journal

__all__ = ["Salvage"]

_SHORT_BYTES: Final = 120  # an entry of the loss file has some 30


class Salvage:
    """What was cut from one file.

    Args:
        run_dir: The run's directory.
        path: The file that is being repaired.
        attempt: Number of this lifetime of the job.
    """

    def __init__(self, run_dir: str, path: str, attempt: int) -> None:
        self._run_dir = run_dir
        self._base = os.path.basename(path)
        self._attempt = attempt
        self._cut = b""
        self._kept_as: str | None = None

    def keep(self, cut: bytes) -> None:
        """Make sure that ``cut`` isn't lost when it is cut off; durable where it is long.

        Raises:
            StorageError: The file system refused; nothing should be cut then.
        """
        self._cut = cut
        if len(cut) <= _SHORT_BYTES or not cut.strip(b" \t\r\n\0]"):
            return
        archive = os.path.join(self._run_dir, "archive")
        make_dir(archive, exist_ok=True, follow=False)
        sync_dir(self._run_dir)
        number = 1
        while exists(os.path.join(archive, self._name(number))):
            number += 1
        write_durable(os.path.join(archive, self._name(number)), cut)
        sync_dir(archive)
        self._kept_as = f"archive/{self._name(number)}"

    def report(self, journal: Journal, num_behind: int = 0) -> str | None:
        """Say in the journal what was cut, where anything was.

        Args:
            journal: Gets the event.
            num_behind: Items behind damage in the middle of the file, which were kept.

        Returns:
            What to tell who looks on: of damage in the middle. A torn end is nothing unusual.
        """
        if not self._cut:
            return None
        short = len(self._cut) <= _SHORT_BYTES
        fields: dict[str, Any] = {"file": self._base, "num_bytes": len(self._cut)}
        if short:
            fields["cut"] = self._cut.decode("ascii", "backslashreplace")
        if self._kept_as is not None:
            fields["kept_as"] = self._kept_as
        if num_behind:
            fields["kept_behind"] = num_behind
        journal.append("torn_tail_cut", step=None, sync=True, **fields)
        if not num_behind:
            return None
        where = self._kept_as or "the journal (torn_tail_cut)"
        return (
            f"{self._base} was damaged: {len(self._cut):,} bytes were cut out of its middle and "
            f"lie in {where}; what stood behind them is kept. To have the lost entries again, put "
            "back a copy of the file while the run is stopped"
        )

    def _name(self, number: int) -> str:
        return f"{self._base}.torn-{self._attempt}-{number}"
