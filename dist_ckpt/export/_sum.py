"""``FILE.sha256``, as ``sha256sum`` writes and checks it. Layer 5, not collective."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, DigestMismatchError, NotFoundError
from dist_ckpt.export._put import put_whole

__all__ = ["check_sum", "read_sum", "write_sum"]

# With its end: a file without one was cut.
_SUM_LINE: Final = re.compile(rb"(\\?)([0-9a-f]{64}) [ *]([^\n\0]+)\n")
_LIMIT_BYTES: Final = 1 << 16


def write_sum(path: Path, digest: str | None = None) -> str:
    """Have ``FILE.sha256`` beside a file; return the sum, computed where it isn't given."""
    found = digest or storage.sha256_file(path)
    mark, name = _spell(path.name)
    line = b"%s%s  %s\n" % (mark, found.encode(), name)
    # By a name of its own: two may export to one name, beside each other.
    put_whole(_beside(path), lambda beside: storage.write_durable(beside, line, mode=0o600))
    return found


def read_sum(path: Path) -> str | None:
    """Return the SHA-256 that ``FILE.sha256`` says, as ``sha256sum`` writes it; None without one.

    Raises:
        CorruptFileError: It isn't such a file, or is about another one.
    """
    beside = _beside(path)
    try:
        data = storage.read_file(beside, limit_bytes=_LIMIT_BYTES)
    except NotFoundError:
        return None
    match = _SUM_LINE.fullmatch(data)
    names = (_spell(path.name), (b"", os.fsencode(path.name)))
    if match is None or (match[1], match[3]) not in names:
        raise CorruptFileError(
            f"{beside} isn't the sum of {path.name} as sha256sum writes it.",
            next_step=f"Make it again: sha256sum {path.name} > {beside.name}",
            path=str(beside),
            expected=f"<64 hex>  {path.name}",
            found=repr(data[:100]),
        )
    return match[2].decode()


def check_sum(path: Path) -> bool:
    """Return whether a sum lies beside the file; where one does, it is the file's.

    Reads the whole file then.

    Raises:
        DigestMismatchError: It is another file's.
        CorruptFileError: It isn't a sum.
    """
    wanted = read_sum(path)
    if wanted is None:
        return False
    found = storage.sha256_file(path)
    if found != wanted:
        raise DigestMismatchError(
            f"{path} has SHA-256 {found}, its sum in {_beside(path).name} is {wanted}.",
            next_step="Copy both again, or use another step's.",
            path=str(path),
            expected=wanted,
            found=found,
        )
    return True


def _spell(name: str) -> tuple[bytes, bytes]:
    """Return a name as sha256sum writes it, and the mark that its line begins with then."""
    raw = os.fsencode(name)
    spelled = raw.replace(b"\\", rb"\\").replace(b"\n", rb"\n").replace(b"\r", rb"\r")
    return (b"" if spelled == raw else b"\\"), spelled


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
