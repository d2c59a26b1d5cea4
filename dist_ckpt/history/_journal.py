"""``NAME.journal.jsonl``: the run's append-only list of events, one a line. Layer 4, I/O.

Each line: ``{"time": seconds since the epoch, "attempt": n, "event": "…", "step": n | null, …}``.
The order of the file is the order of events; time is for people, nobody may order by it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from dist_ckpt.errors import UsageError
from dist_ckpt.history._array_file import read_or_none
from dist_ckpt.history._lines_file import LinesFile, encode_line, parse_lines, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["UNREADABLE", "Journal", "NullJournal", "encode_event", "parse_journal"]

UNREADABLE: Final = "unreadable"
_MAX_COUNT: Final = 2**63 - 1
_OWN_KEYS: Final = frozenset({"time", "attempt"})


def parse_journal(
    data: bytes, *, naming: Collection[str] = (), first_line: int = 1
) -> list[dict[str, Any]]:
    """Return the events in the order of the file.

    With ``naming`` only those in whose lines one of these words stands, as the event's name or
    elsewhere: a long journal is searched much quicker than it is parsed.

    A torn last line is left out. A damaged line elsewhere, or one that is no event, is reported in
    its place as an event ``"unreadable"`` with ``line`` and ``num_bytes``, so that the rest stays
    readable. Each event has ``time``, ``attempt``, ``event`` and ``step``, of these types.
    ``first_line`` is the number of the first line here.
    """
    return [
        {"time": None, "attempt": None, "step": None, **value}
        if value is not None and _is_event(value)
        else {
            "time": None,
            "attempt": None,
            "event": UNREADABLE,
            "step": None,
            "line": number - 1 + first_line,
            "num_bytes": len(line),
        }
        for number, line, value in parse_lines(data, naming=naming)
    ]


def _is_event(value: dict[str, Any]) -> bool:
    counts = (value.get("attempt"), value.get("step"))
    return (
        type(value.get("event")) is str
        and all(count is None or _is_count(count) for count in counts)
        and (value.get("time") is None or _is_finite(value["time"]))
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_COUNT


def encode_event(
    event: str, step: int | None, fields: Mapping[str, Any], *, when: float, attempt: int
) -> bytes:
    """Return the line of one event; what JSON can't hold is kept as text.

    Raises:
        UsageError: A field is called as one that every line has.
    """
    if taken := _OWN_KEYS & fields.keys():
        message = f"A journal line has its own {', '.join(sorted(taken))!r}."
        raise UsageError(message, next_step="Call the field otherwise.", found=sorted(taken))
    line = {"time": when, "attempt": attempt, "event": event, "step": step}
    return encode_line(line | to_json(dict(fields)))


class Journal:
    """The journal of a run that is under way. Use `open`. Any thread may append."""

    def __init__(self, file: LinesFile, attempt: int) -> None:
        self._file = file
        self.attempt = attempt
        self.repaired = file.repaired

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        attempt: int,
        *,
        data: bytes | None = None,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> Journal:
        """Return the journal, open at its end, a torn last line repaired.

        Args:
            path: The file; made where it is missing.
            attempt: Goes into each line.
            data: Its bytes where the caller has just read them.
            keep_cut: Given the bytes that a repair is about to cut, before anything changes.

        Raises:
            StorageError: The file system refused.
        """
        if data is None:
            data = read_or_none(path)
        return cls(LinesFile(path, data, keep_cut=keep_cut), attempt)

    def append(
        self, event: str, *, step: int | None = None, sync: bool = True, **fields: Any
    ) -> None:
        """Add one event by one write; durable on return with ``sync``. Any thread.

        Args:
            event: What happened, in snake case.
            step: The step that it is about.
            sync: Whether to wait for the disk.
            fields: More facts; what JSON can't hold is kept as text.

        Raises:
            UsageError: A field is called as one that every line has.
            StorageError: The file system refused.
        """
        line = encode_event(event, step, fields, when=time.time(), attempt=self.attempt)
        self._file.append(line)
        if sync:
            self._file.sync()

    @property
    def file(self) -> LinesFile:
        """The file itself."""
        return self._file

    def sync(self) -> None:
        """Make all events appended before this call durable. Any thread."""
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()


class NullJournal:
    """A journal that keeps nothing: what ranks other than 0 have."""

    def append(
        self, event: str, *, step: int | None = None, sync: bool = True, **fields: Any
    ) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
