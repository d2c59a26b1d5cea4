"""Names in directories: make, rename, remove, list, sync. Layer 2, I/O."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.storage._files import open_regular, require_regular
from dist_ckpt.storage._guard import guard, named
from dist_ckpt.storage._ops import get_ops

if TYPE_CHECKING:
    from dist_ckpt.storage._types import Path

#: What a system says of a directory that is somebody else's.
_OTHERS: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP)


def sync_dir(path: Path, *, pass_over_others: bool = False) -> None:
    """Return when the names in the directory are durable.

    A few network file systems can't sync a directory and say EINVAL: nothing more can be done
    there, so that isn't an error.

    Args:
        path: The directory.
        pass_over_others: Where it is somebody else's, and can't be looked into or synced, that is
            no error either.

    Raises:
        NotFoundError: No such directory.
        StorageError: The system refused. Not tried again.
    """
    ops = get_ops()
    fine = (errno.EINVAL, *_OTHERS) if pass_over_others else (errno.EINVAL,)
    try:
        with guard("open", path):
            fd = ops.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except StorageError as error:
        if pass_over_others and error.errno in _OTHERS:
            return
        raise
    try:
        ops.fsync(fd)
    except OSError as error:
        if error.errno not in fine:
            raise named(error, "sync", path) from error
    finally:
        with suppress(OSError):
            ops.close(fd)


def make_dir(
    path: Path,
    mode: int = 0o700,
    exist_ok: bool = False,
    *,
    parents: bool = False,
    follow: bool = True,
) -> None:
    """Return when ``path`` is a directory; a new one has ``mode``. Its name isn't durable yet.

    Args:
        path: The directory.
        mode: Permission bits, less the umask.
        exist_ok: A directory that is already there is fine, and left as it is.
        parents: Missing parents are made too, with the default mode of the process.
        follow: With ``exist_ok`` a symbolic link to a directory is fine, too. Only for what a user
            has named: whoever fills and empties a directory of our own must not be led elsewhere.

    Raises:
        ForeignFileError: A symbolic link lies there, and isn't to be followed.
        StorageError: It exists, something else lies there, the parent is missing, or the system
            refused.
    """
    ops = get_ops()
    if parents:
        parent = os.path.dirname(os.path.abspath(path))
        if not exists(parent):
            make_dir(parent, 0o777, exist_ok=True, parents=True)
    with guard("make directory", path, creating=True):
        try:
            ops.mkdir(path, mode)
        except FileExistsError:
            if exist_ok and not follow:
                require_no_link(path)
            if not exist_ok or not is_dir(path):
                raise


def rename(src: Path, dst: Path) -> None:
    """Return when ``dst`` names what ``src`` named.

    A file or an empty directory at ``dst`` is replaced. Not durable before both parents are synced.
    Does nothing where both are hard links of one file.

    Raises:
        NotFoundError: No ``src``.
        StorageError: The system refused.
    """
    with guard(f"rename {os.fspath(src)} to", dst):
        get_ops().rename(src, dst)


def rename_durable(src: Path, dst: Path) -> None:
    """Return when ``dst`` durably names what ``src`` named, and nothing was replaced.

    The check for ``dst`` comes before the rename: the caller holds the run's lock, so nobody makes
    it in between.

    Raises:
        NotFoundError: No ``src``.
        StorageError: Something is at ``dst``, be it an empty directory, or the system refused. When
            the sync failed, the rename was made and may be lost in a power cut.
    """
    if exists(dst):
        taken = OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        raise named(taken, f"rename {os.fspath(src)} to", dst)
    rename(src, dst)
    # The new name first: were the old one's going durable before it, a power cut in between could
    # leave neither. A dict, so that one parent is synced once.
    for parent in dict.fromkeys(os.path.dirname(os.path.abspath(name)) for name in (dst, src)):
        sync_dir(parent)


def sync_names(path: Path) -> None:
    """Return when the names that lead to ``path`` are durable, up to where its file system begins.

    Also those that others made: a process that was killed between making a name and syncing it
    leaves one that is there, and may be gone after a power cut.

    Raises:
        NotFoundError: Nothing is there.
        StorageError: The system refused. A parent that is somebody else's, and can't be looked into
            or synced, is left out: nothing more can be done.
    """
    place = os.path.realpath(path)
    device = device_of(place)
    while (parent := os.path.dirname(place)) != place:
        try:
            if device_of(parent) != device:
                return
            sync_dir(parent, pass_over_others=True)
        except StorageError as error:
            if error.errno not in _OTHERS:
                raise
        place = parent


def sync_file(path: Path) -> None:
    """Return when the bytes of a file are durable, whoever wrote them; its name isn't synced.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused. Not tried again.
    """
    with open_regular(path) as (fd, _), guard("sync", path):
        get_ops().fsync(fd)


def unlink(path: Path, missing_ok: bool = False) -> None:
    """Return when the name of the file is gone; a symbolic link goes, not what it leads to.

    Raises:
        NotFoundError: No such name, unless ``missing_ok``.
        StorageError: The system refused.
    """
    try:
        with guard("remove", path):
            get_ops().unlink(path)
    except NotFoundError:
        if not missing_ok:
            raise


def remove_tree(path: Path) -> None:
    """Return when nothing is at ``path`` any more; symbolic links are removed and never followed.

    What is missing, also what vanishes meanwhile, is fine. When it fails half-way, the rest is
    still there.

    Raises:
        StorageError: The system refused.
    """
    ops = get_ops()
    with suppress(FileNotFoundError), guard("remove", path):
        if not stat.S_ISDIR(ops.lstat(path).st_mode):
            ops.unlink(path)
            return
        for name in sorted(ops.listdir(path)):
            remove_tree(os.path.join(path, name))
        ops.rmdir(path)


def list_names(path: Path) -> list[str]:
    """Return the names in a directory, sorted as text.

    Raises:
        NotFoundError: No such directory.
        StorageError: Not a directory, or the system refused.
    """
    with guard("list", path):
        return sorted(get_ops().listdir(path))


def exists(path: Path) -> bool:
    """Return whether anything has this name, be it a symbolic link that leads nowhere.

    Raises:
        StorageError: The system refused to tell.
    """
    with guard("look at", path):
        try:
            get_ops().lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def is_dir(path: Path) -> bool:
    """Return whether ``path`` leads to a directory, symbolic links followed.

    Raises:
        StorageError: The system refused to tell.
    """
    with guard("look at", path):
        try:
            status = get_ops().stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return stat.S_ISDIR(status.st_mode)


def require_no_link(path: Path) -> None:
    """Return unless a symbolic link has this name; what isn't there is none.

    Raises:
        ForeignFileError: One has.
        StorageError: The system refused to tell.
    """
    with guard("look at", path), suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISLNK(get_ops().lstat(path).st_mode):
            raise named(OSError(errno.ELOOP, os.strerror(errno.ELOOP)), "look at", path)


def lstat(path: Path) -> os.stat_result:
    """Return the status of the name itself, symbolic links not followed.

    Raises:
        NotFoundError: No such name.
        StorageError: The system refused.
    """
    with guard("look at", path):
        return get_ops().lstat(path)


def device_of(path: Path) -> int:
    """Return the number of the file system on which ``path`` leads to something.

    Raises:
        NotFoundError: No such name, or a symbolic link that leads nowhere.
        StorageError: The system refused.
    """
    with guard("look at", path):
        return get_ops().stat(path).st_dev


def longest_name_bytes(directory: Path) -> int:
    """Return how many bytes the name of a file may have on the file system of ``directory``.

    Raises:
        NotFoundError: No such name.
        StorageError: The system refused to tell.
    """
    with guard("look up the longest name of", directory):
        return get_ops().statvfs(directory).f_namemax or 255


def file_size(path: Path) -> int:
    """Return the size in bytes of a regular file.

    Raises:
        NotFoundError: No such file.
        ForeignFileError: Not a regular file, or a symbolic link.
        StorageError: The system refused.
    """
    status = lstat(path)
    require_regular(status, path)
    return status.st_size
