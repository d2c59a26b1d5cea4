"""What a power cut may leave of what storage did, state by state.

``Disk`` replays a record (`helpers.recording`) up to an instant: what is durable by then and what
is still pending. ``cuts`` makes the states that a power cut at that instant may leave, under a rule
that holds on every file system of note:

- a name (made, linked, removed) is lost or kept, each by itself, until its directory is synced; a
  rename is lost or kept as a whole;
- a write that wasn't synced is lost, kept, kept by half, torn (that half, and zeros behind it), or
  its range is zeros (the size came before the data); setting a size is lost or kept.

Which combinations of these are tried is `helpers.cut_plans`'. Nothing here knows what the files
mean.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.cut_plans import Coverage, Plan, Plans
from helpers.recording import Event

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
        """Have this operation done, as ``how`` says: kept, half, torn or zeros."""
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
                digest.update(_digest(self.files[inode]))


@functools.lru_cache(maxsize=1 << 14)
def _digest(content: bytes) -> bytes:
    """Return a digest; most files of a state are the very objects of the state before."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _changed(content: bytes, event: Event, how: str) -> bytes:
    if event.op == "truncate":
        return content[: event.offset].ljust(event.offset, b"\0")
    if event.op == "reserve":
        return content.ljust(event.offset, b"\0")
    data = event.data
    if how == "half":
        data = data[: len(data) // 2]
    elif how == "torn":
        data = data[: len(data) // 2].ljust(len(data), b"\0")
    elif how == "zeros":
        data = bytes(len(data))
    content = content.ljust(event.offset, b"\0")
    return content[: event.offset] + data + content[event.offset + len(data) :]


# The states --------------------------------------------------------------------------------------


def cuts(disk: Disk, generator: random.Random, *, at_most: int) -> Iterator[Disk]:
    """Yield what a power cut may leave now, ``at_most`` states and the two plain ones.

    Which ones, and in which order: `helpers.cut_plans.Plans`.
    """
    for plan in _plans(disk.pending, generator, at_most):
        yield _state(disk, disk.pending, plan)


def _plans(pending: Iterable[Pending], generator: random.Random, at_most: int) -> Plans:
    return Plans([_ways(one.event) for one in pending], generator, at_most)


@dataclass(frozen=True)
class Cut:
    """A state that a power cut may leave.

    Attributes:
        number: Of the last operation before it.
        event: That operation.
        state: What is there then.
        fingerprint: The same for the same files.
        told: What had been promised by then.
    """

    number: int
    event: Event
    state: Disk
    fingerprint: bytes
    told: Any

    def __str__(self) -> str:
        return f"cut after operation {self.number}, {self.event.op} {self.event.text}"


@dataclass(frozen=True)
class Search:
    """Which states are looked for.

    Attributes:
        seed: For the samples.
        at_most: States an instant, and the two plain ones.
        sample: So many in all, where there are more: of each instant one in turn; None: all.
        points: Instants to cut at, numbers of events; None: all.
    """

    seed: int
    at_most: int
    sample: int | None = None
    points: Container[int] | None = None


def each_cut(
    start: Disk,
    events: Sequence[Event],
    search: Search,
    told: Callable[[Event], Hashable] = lambda _event: None,
    *,
    coverage: Coverage | None = None,
) -> Iterator[Cut]:
    """Yield each state that a power cut during these operations may leave, once.

    Args:
        start: The disk before.
        events: What was done.
        search: Which of them.
        told: Given each event; returns what had been promised by then. The same files are another
            state where more had been promised.
        coverage: Is told at the end how much of each instant was among them.
    """
    seen = set[tuple[bytes, Hashable]]()
    instants = _instants(start, events, search, told)
    if search.sample is None:
        for instant in instants:
            yield from instant.cuts(seen)
            if coverage is not None:
                instant.plans.count_in(coverage)
        return
    waiting = list(instants)
    every, left = tuple(waiting), search.sample
    random.Random(f"{search.seed} order").shuffle(waiting)
    in_turn = [(instant, instant.cuts(seen)) for instant in waiting]
    while in_turn and left:
        going = []
        for instant, found in in_turn:
            if left and (cut := next(found, None)) is not None:
                left -= 1
                going.append((instant, found))
                yield cut
        in_turn = going
    if coverage is not None:
        for instant in every:
            instant.plans.count_in(coverage)


@dataclass(frozen=True)
class _Instant:
    """After one operation: what is durable, what is pending, and the plans for it."""

    number: int
    event: Event
    told: Hashable
    durable: Disk
    pending: tuple[Pending, ...]
    plans: Plans

    def cuts(self, seen: set[tuple[bytes, Hashable]]) -> Iterator[Cut]:
        """Yield the states that nobody has ``seen`` yet."""
        for plan in self.plans:
            state = _state(self.durable, self.pending, plan)
            fingerprint = state.fingerprint()
            if (fingerprint, self.told) not in seen:
                seen.add((fingerprint, self.told))
                yield Cut(self.number, self.event, state, fingerprint, self.told)


def _instants(
    start: Disk, events: Sequence[Event], search: Search, told: Callable[[Event], Hashable]
) -> Iterator[_Instant]:
    disk = start.copy()
    for number, event in enumerate(events):
        disk.do(event)
        promised = told(event)
        if search.points is None or number in search.points:
            plans = _plans(disk.pending, random.Random(f"{search.seed} {number}"), search.at_most)
            yield _Instant(number, event, promised, disk.copy(), tuple(disk.pending), plans)


def _ways(event: Event) -> Sequence[str]:
    if event.op != "write":
        return ("lost", "kept")
    return ("lost", "kept", "half", "torn", "zeros")


def _state(durable: Disk, pending: Sequence[Pending], plan: Plan) -> Disk:
    state = durable.copy()
    for one, how in zip(pending, plan, strict=True):
        if how != "lost":
            state.apply(one.event, how)
    return state
