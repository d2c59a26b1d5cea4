"""A durable list of finished items, for batch work. No torch.

Evaluating, converting, labelling: work without an optimizer needs no resume point, only to know
what is done. One line for each call of `Ledger.append`, synced before it returns::

    {"items": {"page-17": {"loss": 0.25}}, "digest": "9a…"}

A last line that isn't whole is what a crash left of a call that never returned: it is cut. Any
other that isn't whole is damage, and refused.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from dist_ckpt import announce, storage
from dist_ckpt.errors import CorruptFileError, NotFoundError, UsageError
from dist_ckpt.history import strict_loads
from dist_ckpt.storage import AppendFile, RunLock

__all__ = ["Ledger", "read_ledger"]

_LIMIT_BYTES = 1 << 36


class Ledger:
    """Which items are finished; exactly those whose `append` returned, after any crash.

    (One whose append was under way may be there or not, whole in either case.) One process at a
    time: on several ranks give each a file of its own, and read the others' with `read_ledger`.

    Args:
        path: The file, usually ``….jsonl``; made with its directory where it is missing. Beside it
            lies ``….jsonl.lock``.

    Raises:
        LockedError: Another process has it open; the error names it.
        CorruptFileError: A line before the last isn't what was written; ``line`` says which.
        StorageError: The file system refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        storage.make_dir(self.path.parent, 0o777, exist_ok=True, parents=True)
        self._lock = RunLock(self.path.with_name(f"{self.path.name}.lock"))
        self._lock.acquire(
            {
                "pid": os.getpid(),
                "start_time": announce.process_start_time(os.getpid()),
                "host": socket.gethostname(),
            }
        )
        self._file: AppendFile | None = None
        try:
            self._items, end = _parse(_read(self.path) or b"", self.path)
            self._file = AppendFile(self.path)
            if self._file.size > end:
                self._file.truncate(end)
                self._file.sync()
        except BaseException:
            self.close()
            raise

    def append(self, item: str, **facts: Any) -> None:
        """``item`` is finished, durably. Twice does no harm: the first one's facts stay.

        Args:
            item: Its name: text without a line's end, unique in this ledger.
            facts: What else is to be kept, in JSON's types.

        Raises:
            StorageError: The file system refused: the item isn't finished. The ledger is closed
                then; open it again to go on.
            UsageError: No name, facts that JSON can't hold, or a closed ledger.
        """
        self.extend({item: facts})

    def extend(self, items: Mapping[str, Mapping[str, Any]] | Iterable[str]) -> None:
        """All of these items are finished, durably, with one wait for the disk.

        A crash meanwhile leaves all of them or none.

        Raises:
            StorageError, UsageError: As `append`; nothing was written for a UsageError.
        """
        named = items if isinstance(items, Mapping) else {item: {} for item in items}
        new = {item: dict(facts) for item, facts in named.items() if item not in self._items}
        line = _encode(new)
        if self._file is None:
            raise UsageError(
                f"The ledger {self.path} is closed.",
                next_step="Use it inside `with dist_ckpt.Ledger(…) as ledger:`.",
                path=str(self.path),
            )
        if not new:
            return
        try:
            self._file.append(line)
            self._file.sync()
        except BaseException:
            # Nobody knows what of it is on the disk; that is read when it is opened again.
            self.close()
            raise
        self._items |= new

    def __contains__(self, item: object) -> bool:
        """Whether it is finished."""
        return item in self._items

    def __iter__(self) -> Iterator[str]:
        """The finished items, in the order in which they were."""
        return iter(self._items)

    def __len__(self) -> int:
        """How many are finished."""
        return len(self._items)

    def __getitem__(self, item: str) -> dict[str, Any]:
        """The facts of a finished item; KeyError where it isn't finished."""
        return self._items[item]

    def remaining(self, items: Iterable[str]) -> Iterator[str]:
        """Yield those of ``items`` that aren't finished when their turn comes, each once."""
        seen = set()
        for item in items:
            if item not in self._items and item not in seen:
                seen.add(item)
                yield item

    def close(self) -> None:
        """Let go of the file and its lock; twice does no harm."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        """The ledger itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def read_ledger(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Return item → facts of a ledger, in its order; also beside the process that writes it.

    Raises:
        NotFoundError: There is no such file.
        CorruptFileError: A line isn't what was written.
    """
    data = _read(Path(path))
    if data is None:
        raise NotFoundError(
            f"There is no ledger {os.fspath(path)}.",
            next_step="Check the path; it is made when a Ledger is opened.",
            path=os.fspath(path),
        )
    return _parse(data, Path(path))[0]


def _read(path: Path) -> bytes | None:
    try:
        return storage.read_file(path, limit_bytes=_LIMIT_BYTES)
    except NotFoundError:
        return None


def _encode(items: Mapping[str, dict[str, Any]]) -> bytes:
    for item in items:
        if type(item) is not str or not item:
            raise UsageError(
                f"{item!r} isn't the name of an item.",
                next_step="Give non-empty text; `str(number)` for a number.",
                found=repr(item),
            )
    try:
        body = json.dumps(items, allow_nan=False)
        plain = json.loads(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The facts of {', '.join(items)} can't be kept: {error}.",
            next_step="Give numbers, text, lists and dicts; None in place of NaN.",
            found=list(items),
        ) from error
    return f'{{"items": {body}, "digest": "{_digest(plain)}"}}\n'.encode()


def _digest(items: Any) -> str:
    # Of the values and not of the bytes: white space and the order of keys change nothing.
    text = json.dumps(items, allow_nan=False, sort_keys=True)
    return str(xxhash.xxh3_64(text.encode()).hexdigest())


def _parse(data: bytes, path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the items, and where the last whole line ends."""
    items: dict[str, dict[str, Any]] = {}
    end = 0
    damaged: tuple[int, bytes] | None = None
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        found = _items_of(line)
        if found is None:
            damaged = damaged or (number, line)
        elif damaged is not None:
            where, what = damaged
            raise CorruptFileError(
                f"{path}: line {where} isn't what was written.",
                next_step="Take the line out by hand (its items are then done again), or restore "
                "the file.",
                path=str(path),
                line=where,
                found=repr(what[:80]),
            )
        else:
            end += len(line)
            for item, facts in found.items():
                items.setdefault(item, facts)
    return items, end


def _items_of(line: bytes) -> dict[str, dict[str, Any]] | None:
    """Return what a whole line tells, None where it isn't whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        body = strict_loads(line)
        items = body["items"]
        whole = body["digest"] == _digest(items) and all(map(_is_dict, items.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return items if whole else None


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)
