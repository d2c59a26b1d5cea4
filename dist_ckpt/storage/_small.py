"""Small files: written durably in one go, replaced whole, read whole. Layer 2, I/O."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.storage._arena import Arena
from dist_ckpt.storage._files import fill, new_file, open_regular, write_all
from dist_ckpt.storage._guard import guard, named
from dist_ckpt.storage._names import sync_dir
from dist_ckpt.storage._ops import get_ops, round_up

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Bytes, Path

_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


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
        StorageError: The system refused; the old content is still there, but where only the sync of
            the name failed: the new one is there then, and a power cut may bring back the old.
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


def read_file(path: Path, *, limit_bytes: int, from_device: bool = False, start: int = 0) -> bytes:
    """Return the bytes of a regular file that isn't larger than ``limit_bytes``.

    The size is checked before memory is taken.

    Args:
        path: The file.
        limit_bytes: Its largest size.
        from_device: Past the page cache: directly, or where the file system refuses that, after
            asking the kernel to forget its pages, which it may decline. All of it.
        start: From this byte on; nothing where the file is shorter.

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
        if from_device and size:
            return _from_device(fd, size, path)
        data = bytearray(max(0, size - start))
        if data:
            fill(fd, [memoryview(data)], start, path)
    return bytes(data)


def read_head(path: Path, num_bytes: int) -> tuple[bytes, int]:
    """Return the first bytes of a regular file, all where it is shorter, and its size in bytes.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused.
    """
    with open_regular(path) as (fd, size):
        data = bytearray(min(num_bytes, size))
        if data:
            fill(fd, [memoryview(data)], 0, path)
    return bytes(data), size


def _from_device(fd: int, size: int, path: Path) -> bytes:
    ops = get_ops()
    with suppress(OSError):  # advice; it also has nothing stale in the cache for later readers
        ops.fadvise_dontneed(fd, 0, 0)
    buffer = Arena(round_up(size)).array.data  # a direct read wants whole pages
    got = 0
    try:
        ops.set_direct(fd, on=True)
        got = ops.preadv(fd, [buffer], 0)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise named(error, "read", path) from error
    if got < size:  # refused, or short: the rest as it comes
        with suppress(OSError):
            ops.set_direct(fd, on=False)
        fill(fd, [buffer[:size]], 0, path)
    return bytes(buffer[:size])
