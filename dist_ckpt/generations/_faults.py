"""Which errors speak against a generation, and which against the moment or the program. Pure."""

from __future__ import annotations

import errno

from dist_ckpt.errors import (
    CorruptFileError,
    ForeignFileError,
    FormatVersionError,
    NotFoundError,
    StorageError,
)

__all__ = ["is_bad_bytes"]


def is_bad_bytes(error: BaseException) -> bool:
    """Return whether ``error``, met while reading a generation, condemns it.

    Bytes that aren't right, are missing, or that the device can't give (EIO) do, and a file where a
    directory belongs. A lack of descriptors or memory, a permission, a program's mistake don't: the
    same generation may be read later. A format of a later version speaks for another program, and
    going back would lose what that one has done.
    """
    if isinstance(error, FormatVersionError):
        return False
    if isinstance(error, CorruptFileError | NotFoundError | ForeignFileError):
        return True
    return isinstance(error, StorageError) and error.errno in {errno.EIO, errno.ENOTDIR}
