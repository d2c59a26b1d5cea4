"""Anything that fsspec speaks to as a destination: S3, SFTP, FTP and more."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, StorageError, UsageError
from dist_ckpt.shipping._items import Bytes, Item, RunningDigest, watched
from dist_ckpt.shipping._place import Place, secrets_in

__all__ = ["RemoteFolder"]

Progress = Callable[[int], None]

#: They have no directories; asking S3 for one would make the bucket.
_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
)
#: What an upload is cut into; S3 takes 10,000 parts of 5 MiB at least.
_PART_BYTES: Final = 64 << 20
_MOST_PARTS: Final = 9_000
_READ_BYTES: Final = storage.PIECE_BYTES
_AGAIN = "What has arrived stays and is found: give the same command again."
_SIGN_IN = (
    "Give the credentials that the place wants, in its own way (for S3 AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or a profile), and the same command again: what has arrived stays."
)


class RemoteFolder:
    """A `Folder` behind a URL.

    Args:
        place: The destination.
        name: Of the folder.

    Raises:
        UsageError: Its protocol isn't known here, or needs a package.
        StorageError: It can't be reached.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self.label = f"{place.label}/{name}"
        self.home: Path | None = None
        self._secrets: set[str] = set()
        self._fs, root = self._connect()
        self._root = f"{str(root).rstrip('/')}/{name}"

    def names(self) -> Collection[str]:
        """Return the names at its top; empty where there is nothing."""
        with self._telling("list", ""):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted(names - {"", self._root.rpartition("/")[2]})

    def size(self, name: str) -> int | None:
        """Return a file's size; None where there is none."""
        with self._telling("look up", name):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found.get("type") == "file" else None

    def write(self, item: Item, progress: Progress) -> None:
        """Have the file there. On an object store it appears whole or not at all."""
        path = self._path(item.name)
        part_bytes = max(_PART_BYTES, -(-item.size_bytes // _MOST_PARTS))
        with self._telling("write", item.name):
            if self._place.scheme not in _OBJECT_STORES:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb", block_size=part_bytes)
            try:
                for chunk in watched(item.content.chunks(), progress):
                    file.write(chunk)
            except BaseException:
                _drop(file)
                raise
            file.close()

    def is_right(self, item: Item, progress: Progress, copy_to: Path | None) -> bool:
        """Return whether the file, fetched, is what it must be."""
        if self.size(item.name) != item.size_bytes:
            return False
        running = RunningDigest()
        try:
            with contextlib.ExitStack() as stack:
                writer = None
                if copy_to is not None:
                    fresh = storage.StreamWriter(copy_to, item.size_bytes, sha256=False)
                    writer = stack.enter_context(fresh)
                for chunk in watched(self._read(item), progress):
                    running.update(chunk)
                    if writer is not None:
                        writer.write(chunk)
        except _ChangedUnderneathError:
            return False
        is_right = running.finish() == (item.digest, item.sha256)
        if copy_to is not None and not is_right:
            storage.unlink(copy_to)
        return is_right

    def _read(self, item: Item) -> Iterator[Bytes]:
        """Give what is there in ranges: nothing is kept anywhere in between."""
        path = self._path(item.name)
        for start in range(0, item.size_bytes, _READ_BYTES):
            stop = min(start + _READ_BYTES, item.size_bytes)
            with self._telling("read", item.name):
                data: bytes = self._fs.cat_file(path, start=start, end=stop)
            if len(data) != stop - start:
                raise _ChangedUnderneathError
            yield data

    def read_small(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small file's bytes; None where there is none, or it is larger."""
        size = self.size(name)
        if size is None or size > limit_bytes:
            return None
        with self._telling("read", name):
            data: bytes = self._fs.cat_file(self._path(name))
        return data

    def remove(self, name: str) -> None:
        """Have no file of that name."""
        if self.size(name) is not None:
            with self._telling("remove", name):
                self._fs.rm_file(self._path(name))

    def check_room(self, num_bytes: int) -> None:
        """Return: no such store tells its room."""

    def settle(self) -> None:
        """Return: what a store has accepted is its own to keep."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _connect(self) -> tuple[Any, str]:
        scheme = self._place.scheme
        try:
            fsspec = importlib.import_module("fsspec")
            with self._telling("reach", ""):
                # An instance of our own: nobody else's connection, nothing that was cached.
                fs, path = fsspec.core.url_to_fs(self._place.url, skip_instance_cache=True)
        except ImportError as error:
            raise UsageError(
                f"{scheme}:// needs the package {error.name or 'of that protocol'}, which isn't "
                "installed.",
                next_step="Install it: pip install s3fs, say, or paramiko for sftp.",
            ) from None
        self._secrets = secrets_in(getattr(fs, "storage_options", None) or {}, os.environ)
        return fs, path

    @contextlib.contextmanager
    def _telling(self, operation: str, name: str) -> Iterator[None]:
        """Turn whatever the protocol's library raises into one error without credentials."""
        try:
            yield
        except (DistCkptError, ImportError):
            raise
        except Exception as error:  # noqa: BLE001 - every library has exceptions of its own
            # Without the cause: its text and its traceback may hold what mustn't be shown.
            raise self._told(error, operation, name) from None

    def _told(self, error: Exception, operation: str, name: str) -> DistCkptError:
        where = f"{self.label}/{name}" if name else self.label
        text = " ".join(str(error).split()) or "no more is known"
        secrets = self._secrets or secrets_in({}, os.environ)
        why = self._place.scrub(f"{type(error).__name__}: {text}", secrets)
        if isinstance(error, ValueError) and operation == "reach":
            return UsageError(
                f"{self._place.label} isn't a destination that is known here: {why}",
                next_step="Give a directory, or a URL of a protocol that fsspec knows.",
            )
        return StorageError(
            f"Could not {operation} {where}: {why}.",
            next_step=_SIGN_IN if _is_refused(error) else _AGAIN,
            path=where,
            operation=operation,
            errno=error.errno if isinstance(error, OSError) else None,
        )


class _ChangedUnderneathError(Exception):
    """A range came with another length: the file isn't what it was a moment ago."""


def _drop(file: Any) -> None:
    """Have an upload that was begun come to nothing; what can't be taken back is found later."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        # It would be completed, cut off as it is, when the object goes.
        file.closed = True


def _is_refused(error: BaseException) -> bool:
    """Return whether it is about who asks: libraries of clouds each have names of their own."""
    name = type(error).__name__
    return isinstance(error, PermissionError) or "Credential" in name or "Unauthorized" in name
