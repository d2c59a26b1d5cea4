"""A second name for a file, or a second file with its bytes. Layer 2, I/O."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, Literal

from dist_ckpt.storage._files import fill, new_file, open_regular, write_all
from dist_ckpt.storage._guard import named
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Path

_NO_LINK: Final = (
    errno.EPERM,
    errno.EXDEV,
    errno.EMLINK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EACCES,
)
_CHUNK_BYTES: Final = 4 * 2**20


def link_or_copy(src: Path, dst: Path, *, copy: bool = False) -> Literal["link", "reflink", "copy"]:
    """Return how ``dst`` came to have the bytes of ``src``.

    A hard link; else, or on wish, a new file of mode 0400 that shares its blocks (reflink) or has
    blocks of its own. What is new is synced, the directory isn't.

    Args:
        src: A regular file.
        dst: Must not exist.
        copy: A file of its own is wanted: no hard link.

    Raises:
        NotFoundError: No ``src``.
        ForeignFileError: ``src`` isn't a regular file.
        StorageError: ``dst`` exists, or the system refused; what was begun is gone.
        NoSpaceError: No room.
    """
    with open_regular(src) as (src_fd, size):
        if not copy and _link(src, dst):
            return "link"
        with new_file(dst, mode=0o400, need_bytes=size) as dst_fd:
            if _clone(src_fd, dst_fd):
                return "reflink"
            _copy(src_fd, src, dst_fd, dst, size)
        return "copy"


def share_file(src: Path, dst: Path) -> Literal["reflink", "link", "copy"]:
    """Return how ``dst`` came to have the bytes of ``src``, sharing them where that can be.

    A new file of mode 0400 that shares all blocks (reflink); else a hard link; else a copy. For
    files that nobody changes: a link is the same file under a second name. What is new is synced,
    the directory isn't.

    Args:
        src: A regular file that is never written to again.
        dst: Must not exist.

    Raises:
        NotFoundError, ForeignFileError, StorageError, NoSpaceError: As `link_or_copy`.
    """
    with open_regular(src) as (src_fd, size):
        if _reflink(src_fd, dst):
            return "reflink"
        if _link(src, dst):
            return "link"
        with new_file(dst, mode=0o400, need_bytes=size) as dst_fd:
            _copy(src_fd, src, dst_fd, dst, size)
        return "copy"


class _NoReflinkError(Exception):
    """Leaves ``new_file``, so that the empty file goes."""


def _reflink(src_fd: int, dst: Path) -> bool:
    try:
        with new_file(dst, mode=0o400) as dst_fd:
            if not _clone(src_fd, dst_fd):
                raise _NoReflinkError
    except _NoReflinkError:
        return False
    return True


def _link(src: Path, dst: Path) -> bool:
    try:
        get_ops().link(src, dst)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise named(error, "link to", dst, creating=True) from error
    return True


def _clone(src_fd: int, dst_fd: int) -> bool:
    try:
        get_ops().clone(src_fd, dst_fd)
    except OSError:
        # Whatever the reason (no such feature, another device, …), copying either works or says why
        # it can't.
        return False
    return True


def _copy(src_fd: int, src: Path, dst_fd: int, dst: Path, size_bytes: int) -> None:
    buffer = memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
    for start in range(0, size_bytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, size_bytes - start)]
        fill(src_fd, [chunk], start, src)
        write_all(dst_fd, chunk, start, dst)
