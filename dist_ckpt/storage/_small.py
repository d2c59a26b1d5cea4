"""Small files: written durably in one go, replaced whole, read whole. Layer 2, I/O."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.storage._files import fill, new_file, open_regular, write_all
from dist_ckpt.storage._guard import guard
from dist_ckpt.storage._names import sync_dir
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Bytes, Path


def write_durable(path: Path, data: Bytes, *, mode: int = 0o400) -> None:
    """Return when a new file holds ``data`` durably; its directory isn't synced.

    Raises:
        StorageError: It exists, or the system refused; after a failure the new file is gone.
        NoSpaceError: No room.
    """
    with new_file(path, mode=mode, need_bytes=len(data)) as fd:
        write_all(fd, data, 0, path)


def replace_durable(path: Path, data: Bytes, *, mode: int = 0o600) -> None:
    """Return when ``path`` holds ``data`` durably, name and all.

    A crash leaves the old content or the new. Works through ``.NAME.tmp`` beside it, which a crash
    may leave and the next call removes. One caller at a time for a path.

    Raises:
        StorageError: The system refused; the old content is still there.
        NoSpaceError: No room.
    """
    parent, name = os.path.split(os.fspath(path))
    beside = os.path.join(parent, f".{name}.tmp")
    ops = get_ops()
    with guard("remove", beside), suppress(FileNotFoundError):
        ops.unlink(beside)
    with new_file(beside, mode=mode, need_bytes=len(data)) as fd:
        write_all(fd, data, 0, beside)
    try:
        with guard("replace", path):
            ops.rename(beside, path)
    except BaseException:
        with suppress(OSError):
            ops.unlink(beside)
        raise
    sync_dir(parent or ".")


def read_file(path: Path, *, limit_bytes: int) -> bytes:
    """Return all bytes of a regular file that isn't larger than ``limit_bytes``.

    The size is checked before memory is taken.

    Raises:
        NotFoundError: No such file.
        CorruptFileError: It is larger than the limit.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused.
    """
    with open_regular(path) as (fd, size):
        if size > limit_bytes:
            msg = f"{os.fspath(path)} has {size:,} bytes, at most {limit_bytes:,} are expected."
            raise CorruptFileError(
                msg,
                next_step="This isn't a file that dist_ckpt wrote: move it away.",
                path=os.fspath(path),
                expected=limit_bytes,
                found=size,
            )
        data = bytearray(size)
        if size:
            fill(fd, [memoryview(data)], 0, path)
    return bytes(data)
