"""A file of one JSON object a line, appended by one write each. Layer 4.

`parse_lines` is pure; `LinesFile` does I/O through ``storage`` only.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from dist_ckpt.history._json_array import strict_loads
from dist_ckpt.storage import AppendFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["LinesFile", "encode_line", "end_of_step", "load_object", "parse_lines", "to_json"]


_STEP: Final = re.compile(rb'(?:\[|\{"step": )(\d{1,19})[,}]')


def to_json(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: other numbers as int or float, the rest as text.

    Floats that aren't finite become ``"nan"``, ``"inf"``, ``"-inf"``.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if number - number == 0 else str(number)
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    return str(value)


def encode_line(fields: dict[str, Any]) -> bytes:
    """Return one line with its end. Only ASCII, so that no tear falls inside a character."""
    return json.dumps(fields, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def load_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``line``, None where it isn't one."""
    with contextlib.suppress(ValueError):
        value = strict_loads(line)
        if isinstance(value, dict):
            return value
    return None


def parse_lines(
    data: bytes, *, naming: Collection[str] = ()
) -> list[tuple[int, bytes, dict[str, Any] | None]]:
    """Return ``(line number, bytes, object or None)`` of each line that isn't blank.

    A last line without its end that isn't an object is left out: an append is in progress, or
    was torn.

    Args:
        data: The bytes of the file.
        naming: Only lines in which one of these words (of ASCII letters, digits and underscores)
            stands somewhere, the others unread; empty for all.
    """
    lines = data.split(b"\n")
    torn = len(lines) if lines[-1] else None
    wanted = re.compile(b"|".join(re.escape(word.encode()) for word in naming)).search
    parsed = []
    for number, line in enumerate(lines, start=1):
        if not wanted(line) or not line.strip():
            continue
        value = load_object(line)
        if value is None and number == torn:
            continue
        parsed.append((number, line, value))
    return parsed


def end_of_step(data: bytes, step: int, *, at_most: int | None = None) -> int:
    """Return where the first of the lines at the end begins that are all of later steps.

    The length of ``data`` where there are none. Goes back from the end over lines that begin with
    their step, as an entry, a sample or a line of metrics does; any other ends it, as do
    ``at_most`` lines.
    """
    first = end = len(data)
    while end > 0 and at_most != 0:
        start = data.rfind(b"\n", 0, end) + 1
        match = _STEP.match(data, start, end)
        if match is None and data[start:end].strip():
            break
        if match is not None:
            if int(match[1]) <= step:
                break
            first = start
            at_most = None if at_most is None else at_most - 1
        end = start - 1
    return first


class LinesFile:
    """The open end of a file of lines; made, or repaired, when it is built.

    Any thread may append.

    Args:
        path: The file; made where it is missing.
        data: Its bytes as just read, None where it is missing.
        keep_cut: Given the bytes that a repair is about to cut, before anything changes.

    Raises:
        StorageError: The file system refused.

    Attributes:
        repaired: Bytes of a torn last line that were cut on opening.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data: bytes | None,
        *,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        data = data or b""
        keep, ending = _whole_end(data)
        cut = data[keep:]
        if cut and keep_cut is not None:
            keep_cut(cut)
        self.repaired = len(cut)
        self._file = AppendFile(path, mode=0o600)
        try:
            if cut or ending:
                self._file.overwrite_tail(keep, ending)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, all that was appended included."""
        return self._file.size

    def append(self, line: bytes) -> None:
        """Add one line, its end included, by one write. Not durable before `sync`.

        Raises:
            StorageError: The file system refused; half a line is taken back if possible.
        """
        with self._lock:
            self._file.append(line)

    def doubt(self, first: int) -> None:
        """Have the next sync write the lines anew of which the first begins at this offset.

        Raises:
            StorageError: The file system refused.
        """
        with self._lock:
            self._file.doubt(first)

    def has_its_name(self) -> bool:
        """Return whether the path still leads to this file. Any thread."""
        return self._file.has_its_name()

    def revive(self) -> None:
        """Have the path lead to all that was appended again, durable. Any thread."""
        with self._lock:
            self._file.revive()

    def sync(self) -> None:
        """Make all lines appended before this call durable. Any thread."""
        # Not under the lock: an append must not wait for the disk.
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()


def _whole_end(data: bytes) -> tuple[int, bytes]:
    """Return how many bytes to keep, and what has to be added to end the last line."""
    start = data.rfind(b"\n") + 1
    last = data[start:]
    if not last:
        return len(data), b""
    # After a power cut NUL bytes may stand where the rest of the writes should be.
    line = last.rstrip(b"\0")
    if load_object(line) is not None:
        return start + len(line), b"\n"
    return start, b""
