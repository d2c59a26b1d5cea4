"""What a check of a run finds, and how deep it looks. Layer 6, pure."""

from __future__ import annotations

import errno
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dist_ckpt.errors import (
    DistCkptError,
    FormatVersionError,
    SettingError,
    StorageError,
)
from dist_ckpt.storage import FileDigest

__all__ = ["Depth", "Fault", "Finding"]

#: Said of sectors that can't be read back; any other refusal says nothing of the file.
_MEDIA_ERRORS: Final = (errno.EIO, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO))


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is read.

    Attributes:
        quick: Sizes and manifests only, no data.
        fraction: Share of each file's 16 MiB pieces, chosen at random, one at least; None: all.

    Raises:
        SettingError: The fraction isn't above 0 and at most 1, or both are given.
    """

    quick: bool = False
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.fraction is None:
            return
        if not (math.isfinite(self.fraction) and 0 < self.fraction <= 1):
            raise SettingError(
                f"A sample of {self.fraction:.3g} isn't above 0 and at most 1.",
                next_step="Give a share such as 5%.",
                found=self.fraction,
            )
        if self.quick:
            raise SettingError(
                "A quick check reads no data, so there is nothing to sample.",
                next_step="Give --quick or --sample.",
            )

    def pieces(self, digest: FileDigest) -> list[int] | None:
        """Return which pieces of a file to read; None for all."""
        if self.fraction is None or not digest.pieces:
            return None
        count = math.ceil(self.fraction * len(digest.pieces))
        return random.sample(range(len(digest.pieces)), count)

    @property
    def is_whole(self) -> bool:
        """Every byte is read."""
        return not self.quick and self.fraction is None


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that isn't as it was written.

    Attributes:
        path: The file.
        id: Stable name of the kind of fault.
        message: A sentence with the numbers.
    """

    path: str
    id: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"path": self.path, "id": self.id, "message": self.message}


@dataclass
class Finding:
    """What the check of one generation, or one .bin, found.

    Attributes:
        kind: ``"generation"``, ``"bin"``, or ``"run"``: generations that should be there.
        path: Its directory or file.
        step: None where a .bin's header can't be read.
        num_bytes: Bytes that were read and compared.
        num_digests: Digests that were compared: of pieces, manifests, sums.
        faults: What isn't right.
        refused: Why it could not be checked at all.
        is_gone: It was retired while this ran.
        notes: What a reader should know.
    """

    kind: str
    path: str
    step: int | None
    num_bytes: int = 0
    num_digests: int = 0
    faults: list[Fault] = field(default_factory=list)
    refused: Fault | None = None
    is_gone: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Checked, and nothing found."""
        return not self.faults and self.refused is None and not self.is_gone

    def add(self, error: DistCkptError, path: Path) -> None:
        """Take an error as a fault of the file, or as a reason why nothing can be said of it."""
        refuses = isinstance(error, FormatVersionError) or (
            isinstance(error, StorageError) and error.errno not in _MEDIA_ERRORS
        )
        if refuses:
            self.refuse(error, path)
        else:
            self.faults.append(_fault(error, path))

    def refuse(self, error: DistCkptError, path: Path) -> None:
        """Take an error as a reason why nothing can be said."""
        self.refused = self.refused or _fault(error, path)

    def drop_if_gone(self, *, gone: bool) -> None:
        """Forget the faults of what was retired while it was read: a live run may do that."""
        if gone and not self.is_whole:
            self.is_gone = True
            self.faults.clear()
            self.refused = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "kind": self.kind,
            "path": self.path,
            "step": self.step,
            "ok": self.is_whole,
            "bytes_read": self.num_bytes,
            "digests_compared": self.num_digests,
            "faults": [fault.to_json() for fault in self.faults],
            "refused": None if self.refused is None else self.refused.to_json(),
            "retired_meanwhile": self.is_gone,
            "notes": list(self.notes),
        }


def _fault(error: DistCkptError, path: Path) -> Fault:
    return Fault(str(error.values.get("path") or path), error.id, error.message)
