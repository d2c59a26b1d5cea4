"""What a power cut may leave of what storage did, state by state.

``Recorder`` goes into the seam of storage and remembers each operation that changes something,
with its bytes. ``Disk`` replays such a record up to an instant: what is durable by then and what
is still pending. ``cuts`` makes the states that a power cut at that instant may leave, under a rule
that holds on every file system of note:

- a name (made, linked, removed) is lost or kept, each by itself, until its directory is synced; a
  rename is lost or kept as a whole;
- a write that wasn't synced is lost, kept, kept by half, or its range is zeros (the size came
  before the data); setting a size is lost or kept.

Nothing here knows what the files mean.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dist_ckpt.storage import Ops

EXHAUSTIVE = 8  # with so many pending operations, each combination; above, the telling ones
_CLONE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Event:
    """One operation that changed something, or a mark.

    Attributes:
        op: What was done.
        inode: The file or directory that it is about: the one that got or lost a name, or was
            changed or synced.
        places: The names it is about, ``(directory, name)``: the new one first.
        offset: Of a write; the size of a truncation or reservation.
        data: What was written.
        text: Of a mark, and for people: the path.
        is_dir: Whether ``inode`` is a directory.
        time: On the clock that all processes share.
    """

    op: str
    inode: int = -1
    places: tuple[tuple[int, str], ...] = ()
    offset: int = 0
    data: bytes = b""
    text: str = ""
    is_dir: bool = False
    time: float = 0.0


class Recorder(Ops):
    """Does everything as it is, below one directory remembering it in ``events``.

    Files are told apart by their inode's number, the same for all processes. So the directory must
    lie in memory (tmpfs): other file systems give a number again as soon as a file is removed.

    Args:
        root: An existing directory; what happens elsewhere isn't remembered.
    """

    def __init__(self, root: Path) -> None:
        self.events: list[Event] = []
        self._root = os.path.realpath(root)
        self._guard = threading.RLock()

    # What changes names

    def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
        with self._guard:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            fd = super().open(path, flags, mode)
            if is_new:
                self._named("create", os.fstat(fd), path)
            return fd

    def mkdir(self, path: Any, mode: int) -> None:
        with self._guard:
            super().mkdir(path, mode)
            self._named("mkdir", os.lstat(path), path)

    def rename(self, src: Any, dst: Any) -> None:
        with self._guard:
            super().rename(src, dst)
            self._named("rename", os.lstat(dst), dst, src)

    def link(self, src: Any, dst: Any) -> None:
        with self._guard:
            super().link(src, dst)
            self._named("link", os.lstat(dst), dst)

    def unlink(self, path: Any) -> None:
        with self._guard:
            status = os.lstat(path)
            super().unlink(path)
            self._named("unlink", status, path)

    def rmdir(self, path: Any) -> None:
        with self._guard:
            status = os.lstat(path)
            super().rmdir(path)
            self._named("unlink", status, path)

    # What changes bytes

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        with self._guard:
            taken = super().pwrite(fd, data, offset)
            self._about(fd, "write", offset, bytes(memoryview(data).cast("B")[:taken]))
            return taken

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            super().ftruncate(fd, size_bytes)
            self._about(fd, "truncate", size_bytes)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            super().fallocate(fd, size_bytes)
            self._about(fd, "reserve", size_bytes)

    def clone(self, src_fd: int, dst_fd: int) -> None:
        with self._guard:
            super().clone(src_fd, dst_fd)
            self._about(dst_fd, "write", 0, os.pread(src_fd, _CLONE_LIMIT, 0))

    # What makes durable

    def fsync(self, fd: int) -> None:
        with self._guard:
            super().fsync(fd)
            self._about(fd, "sync")

    def fdatasync(self, fd: int) -> None:
        with self._guard:
            super().fdatasync(fd)
            self._about(fd, "sync")

    def _named(self, op: str, status: os.stat_result, *paths: Any) -> None:
        places = []
        for path in paths:
            parent, name = os.path.split(os.path.abspath(path))
            places.append((os.stat(parent).st_ino, name))
        text = os.path.abspath(paths[0])
        is_dir = stat.S_ISDIR(status.st_mode)
        self._add(Event(op, status.st_ino, tuple(places), text=text, is_dir=is_dir))

    def _about(self, fd: int, op: str, offset: int = 0, data: bytes = b"") -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._add(Event(op, os.fstat(fd).st_ino, offset=offset, data=data, text=path))

    def _add(self, event: Event) -> None:
        if event.text == self._root or event.text.startswith(self._root + "/"):
            self.events.append(replace(event, time=time.monotonic()))


def merge(*records: Sequence[Event]) -> list[Event]:
    """Return the events of several processes that worked side by side, in the order of time."""
    return sorted(itertools.chain(*records), key=lambda event: event.time)


# The disk ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """An operation that isn't sure yet: a name is once all ``unsynced`` directories are synced."""

    event: Event
    unsynced: frozenset[int]


@dataclass
class Disk:
    """Names and bytes as they are durable, and the operations that are still pending.

    ``tree`` has the names in each directory, by its inode; ``files`` the bytes of each file.
    """

    root: int
    tree: dict[int, dict[str, int]]
    files: dict[int, bytes]
    pending: list[Pending] = field(default_factory=list)

    @classmethod
    def read(cls, root: Path) -> Disk:
        """Return a disk that durably holds what lies below ``root`` now."""
        disk = cls(root.stat().st_ino, {root.stat().st_ino: {}}, {})
        for folder, folders, files in os.walk(root):
            here = disk.tree[os.stat(folder).st_ino]
            for name in [*folders, *files]:
                path = Path(folder, name)
                inode = here[name] = path.lstat().st_ino
                if name in folders:
                    disk.tree[inode] = {}
                else:
                    disk.files[inode] = path.read_bytes()
        return disk

    def copy(self) -> Disk:
        """Return one that can be changed by itself; nothing is pending in it."""
        tree = {inode: dict(names) for inode, names in self.tree.items()}
        return Disk(self.root, tree, dict(self.files))

    def do(self, event: Event) -> None:
        """Take one more operation in."""
        if event.op == "sync":
            waiting, self.pending = self.pending, []
            for one in waiting:
                unsynced = one.unsynced - {event.inode}
                if unsynced:
                    self.pending.append(Pending(one.event, unsynced))
                else:
                    self.apply(one.event)
        elif event.op != "mark":
            # A rename across directories is sure once both are synced.
            directories = frozenset(directory for directory, _ in event.places)
            self.pending.append(Pending(event, directories or frozenset((event.inode,))))

    def apply(self, event: Event, how: str = "kept") -> None:
        """Have this operation done, as ``how`` says: kept, half or zeros."""
        if event.is_dir:
            self.tree.setdefault(event.inode, {})
        if event.op == "unlink":
            for directory, name in event.places:
                if self.tree.get(directory, {}).get(name) == event.inode:
                    del self.tree[directory][name]
        elif event.places:
            (directory, name), *old = event.places
            for place in old:
                if self.tree.get(place[0], {}).get(place[1]) == event.inode:
                    del self.tree[place[0]][place[1]]
            self.tree.setdefault(directory, {})[name] = event.inode
            if not event.is_dir:
                self.files.setdefault(event.inode, b"")
        else:
            self.files[event.inode] = _changed(self.files.get(event.inode, b""), event, how)

    def lay(self, root: Path) -> None:
        """Have these names and bytes below ``root``, an empty directory."""
        seen: dict[int, Path] = {}
        self._lay(self.root, root, seen)

    def _lay(self, directory: int, path: Path, seen: dict[int, Path]) -> None:
        for name, inode in sorted(self.tree[directory].items()):
            here = path / name
            if inode in self.tree:
                here.mkdir(mode=0o700)
                self._lay(inode, here, seen)
            elif inode in seen:
                os.link(seen[inode], here)
            else:
                here.write_bytes(self.files[inode])
                seen[inode] = here

    def fingerprint(self) -> bytes:
        """Return what two disks share if what can be reached is the same, links included."""
        digest = hashlib.blake2b(digest_size=16)
        self._feed(self.root, digest, {})
        return digest.digest()

    def _feed(self, directory: int, digest: Any, seen: dict[int, int]) -> None:
        for name, inode in sorted(self.tree[directory].items()):
            is_dir = inode in self.tree
            digest.update(f"{name}\0{is_dir}\0{seen.get(inode, -1)}\0".encode())
            if is_dir:
                self._feed(inode, digest, seen)
                digest.update(b"..")
            elif inode not in seen:
                seen[inode] = len(seen)
                digest.update(len(self.files[inode]).to_bytes(8, "little"))
                digest.update(self.files[inode])


def _changed(content: bytes, event: Event, how: str) -> bytes:
    if event.op == "truncate":
        return content[: event.offset].ljust(event.offset, b"\0")
    if event.op == "reserve":
        return content.ljust(event.offset, b"\0")
    data = event.data
    if how == "half":
        data = data[: len(data) // 2]
    elif how == "zeros":
        data = bytes(len(data))
    content = content.ljust(event.offset, b"\0")
    return content[: event.offset] + data + content[event.offset + len(data) :]


# The states --------------------------------------------------------------------------------------


def cuts(disk: Disk, generator: random.Random, *, at_most: int) -> Iterator[Disk]:
    """Yield what a power cut may leave now, ``at_most`` states and the two plain ones.

    Up to ``EXHAUSTIVE`` pending operations: every combination, or a sample of it where it has more
    than ``at_most``. Above: each beginning, all but one, only one, and a sample.
    """
    yield _state(disk, ["lost"] * len(disk.pending))
    yield _state(disk, ["kept"] * len(disk.pending))
    for choice in itertools.islice(_choices(disk.pending, generator, at_most), at_most):
        yield _state(disk, choice)


def _choices(
    pending: Sequence[Pending], generator: random.Random, at_most: int
) -> Iterator[Sequence[str]]:
    ways = [_ways(one.event) for one in pending]
    count = len(ways)
    total = 1
    for way in ways:
        total *= len(way)
    if count <= EXHAUSTIVE and total <= at_most:
        yield from itertools.product(*ways)
        return
    if count > EXHAUSTIVE:
        yield from _telling(ways, generator)
    while True:
        yield [generator.choice(way) for way in ways]


def _telling(ways: Sequence[Sequence[str]], generator: random.Random) -> Iterator[list[str]]:
    count = len(ways)
    plans = []
    for number in range(count):
        plans.append(["kept"] * number + ["lost"] * (count - number))
        for rest in ("lost", "kept"):
            around = [rest] * number, [rest] * (count - number - 1)
            plans += [[*around[0], way, *around[1]] for way in ways[number] if way != rest]
    generator.shuffle(plans)
    yield from plans


def _ways(event: Event) -> Sequence[str]:
    return ("lost", "kept", "half", "zeros") if event.op == "write" else ("lost", "kept")


def _state(disk: Disk, choice: Iterable[str]) -> Disk:
    state = disk.copy()
    for one, how in zip(disk.pending, choice, strict=True):
        if how != "lost":
            state.apply(one.event, how)
    return state
