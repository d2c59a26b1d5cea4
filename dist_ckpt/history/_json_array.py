r"""Finds what is whole in a JSON array that grows at its end. Pure: layer 4, no I/O.

An append replaces the closing bracket by ``,\n<item>]`` in one write, so what a crash can leave
is a good beginning and a bad end: half an item, NUL bytes, a missing bracket. Everything up to
the last whole item is kept, the rest is the tail.

A bad bit in the middle is no torn end: items stand one a line, so reading goes on at the next
line that is whole. Not behind NUL bytes, which are what a power cut leaves of a lost write: of
what was written later nothing is sure then (decision 55).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dist_ckpt.errors import CorruptFileError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

__all__ = [
    "EMPTY_ARRAY",
    "ArrayScan",
    "Mended",
    "encode_append",
    "encode_array",
    "scan_array",
    "strict_loads",
]

EMPTY_ARRAY: Final = b"[]"
_NUM_EARLY_TRIES: Final = 3
_SPACE: Final = " \t\r\n"
_BLANK: Final = b" \t\r\n\0"


@dataclass(frozen=True, slots=True)
class ArrayScan:
    """What `scan_array` found.

    Attributes:
        items: The items, in the order of the file.
        end: Offset in bytes at which the closing bracket lies, or has to be put; of a file that is
            damaged in the middle, where the damage begins.
        whole: Whether a closing bracket and nothing but white space follows from ``end`` on.
        mended: What the file has to be, where damage lies in the middle of it.
    """

    items: list[Any]
    end: int
    whole: bool
    mended: Mended | None = None


@dataclass(frozen=True, slots=True)
class Mended:
    """A file without the damage in its middle.

    Attributes:
        data: The new bytes, up to where the closing bracket has to be put.
        cut: The bytes that aren't kept.
        num_behind: Items behind the first damage, which are kept.
    """

    data: bytes
    cut: bytes
    num_behind: int


def encode_append(item: bytes, *, first: bool) -> bytes:
    """Return what one append writes over the closing bracket."""
    return (b"\n" if first else b",\n") + item + b"]"


def encode_array(items: Sequence[bytes]) -> bytes:
    """Return the bytes of a file to which each item was appended."""
    return b"[" + b",".join(b"\n" + item for item in items) + b"]"


def scan_array(
    data: bytes,
    *,
    accept: Callable[[list[Any]], bool],
    what: str,
    path: str | os.PathLike[str],
) -> ArrayScan:
    """Return the whole items of ``data``, in time linear in its length.

    Those of the longest valid beginning, and, where what follows isn't a torn end, those behind the
    damage. In the place of each item that is damaged stands the one before it once more: that
    changes nothing of what counts, and counts of items in the journal stay true.

    A whole array costs one ``json.loads``, one that a single append left torn a few; only a worse
    one is walked item by item. Bytes that are blank (nothing, NUL bytes, white space: a file made
    just before a power cut) are an empty array that isn't whole.

    Args:
        data: All bytes of the file.
        accept: Tells whether all items of a list are what the file may hold.
        what: What the items are, for messages.
        path: Named in errors; never opened.

    Raises:
        CorruptFileError: The bytes never were such an array: they are valid JSON of no list, or
            with NaN in it; or don't begin with ``[``, or are a list of something else, and no item
            stands on a line of its own as ours do. Neither a torn end nor one bad bit raises.
    """
    items = _load_whole(data, accept)
    if items is not None:
        return ArrayScan(items, len(data.rstrip(b" \t\r\n")) - 1, whole=True)
    if not data.strip(_BLANK):
        return ArrayScan([], 0, whole=False)
    is_array = data.lstrip(b" \t\r\n").startswith(b"[")
    begin = ArrayScan([], 0, whole=False)
    if is_array:
        begin = _close_early(data, accept) or _walk(data, accept)
    scan = _pick_up(data, begin, accept)
    is_ours = bool(scan.items) and data[1:2] == b"\n"
    is_json = _is_lenient_json(data)
    if (is_json and not _is_strict_list(data)) or (not is_ours and (is_json or not is_array)):
        message = f"{path}: this isn't a JSON array of {what}."
        raise CorruptFileError(
            message,
            next_step="Move the file away, or mend it by hand; nothing was changed.",
            path=path,
            expected=f"JSON array of {what}",
            found=repr(data[:40]),
        )
    return scan


def strict_loads(text: str | bytes) -> Any:
    """Return the JSON value in ``text``, UTF-8 and without NaN or Infinity.

    Raises:
        ValueError: It isn't one (also for nesting too deep to read).
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    message = f"{name} isn't JSON"
    raise ValueError(message)


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _load_whole(data: bytes, accept: Callable[[list[Any]], bool]) -> list[Any] | None:
    with contextlib.suppress(ValueError):
        value = strict_loads(data)
        if type(value) is list and accept(value):
            return value
    return None


def _is_strict_list(data: bytes) -> bool:
    with contextlib.suppress(ValueError):
        return type(strict_loads(data)) is list
    return False


def _is_lenient_json(data: bytes) -> bool:
    # Whole but not ours, NaN tokens included: nobody tore it, so nobody may cut it.
    if not data.rstrip(b" \t\r\n").endswith((b"]", b"}")):
        return False
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(data.decode())
        return True
    return False


def _close_early(data: bytes, accept: Callable[[list[Any]], bool]) -> ArrayScan | None:
    # What one torn append leaves ends a few brackets before the end, and reading 200,000 entries
    # at once is ten times as fast as walking them. From the end down, so the first is the longest.
    end = len(data)
    for _ in range(_NUM_EARLY_TRIES):
        end = max(data.rfind(b"]", 0, end), data.rfind(b"}", 0, end))
        if end < 0:
            return None
        items = _load_whole(data[: end + 1] + b"]", accept)
        if items:
            return ArrayScan(items, end + 1, whole=False)
    return None


def _walk(data: bytes, accept: Callable[[list[Any]], bool]) -> ArrayScan:
    # latin-1 gives one character a byte, so positions are offsets whatever the tail holds;
    # structure is ASCII in any case, and each item is decoded again from its own bytes.
    text = data.decode("latin-1")
    again = not data.isascii()
    items: list[Any] = []
    end = position = _skip_space(text, 0) + 1
    while True:
        position = _skip_space(text, position)
        if items:
            if text[position : position + 1] != ",":
                break
            position = _skip_space(text, position + 1)
        try:
            item, stop = _DECODER.raw_decode(text, position)
            if again:
                item = strict_loads(data[position:stop])
        except (ValueError, RecursionError):
            break
        if not accept([item]):
            break
        items.append(item)
        end = position = stop
    return ArrayScan(items, end, whole=False)


def _pick_up(data: bytes, begin: ArrayScan, accept: Callable[[list[Any]], bool]) -> ArrayScan:
    """Return ``begin`` with the items that stand whole on lines behind damage."""
    items = list(begin.items)
    parts = [b",\n"] * bool(items)
    cut: list[bytes] = []
    room = len(data)  # for what is repeated: no file grows without end
    num_behind = 0
    end = position = begin.end
    while position := data.find(b"\n", position) + 1:
        line_end = data.find(b"\n", position)
        found = _item_of_line(data[position : None if line_end < 0 else line_end], accept)
        if found is None:
            continue
        item, raw, stop = found
        damage = data[end:position]
        if b"\0" in damage and not _is_one_bad_space(damage, accept):
            break
        if damage.strip(b" \t\r\n") != (b"," if items else b""):
            cut.append(damage)
            again = items[-1] if items else item
            again_raw = json.dumps(again).encode()
            num_lost = min(_num_lost(damage), room // len(again_raw))
            room -= num_lost * len(again_raw)
            items += [again] * num_lost
            parts += [again_raw, b",\n"] * num_lost
        parts += (raw, b",\n")
        items.append(item)
        num_behind += 1
        end = position = position + stop
    if not num_behind:
        return begin
    tail = data[end:]
    cut += [tail] * (tail.strip(_BLANK) not in (b"]", b""))
    mended = (data[: begin.end] or b"[") + b"\n" * (not begin.items) + b"".join(parts[:-1])
    return ArrayScan(items, begin.end, False, Mended(mended, b"\n".join(cut), num_behind))


def _item_of_line(
    line: bytes, accept: Callable[[list[Any]], bool]
) -> tuple[Any, bytes, int] | None:
    """Return the item that a line begins with, its bytes, and where in the line it ends."""
    text = line.decode("latin-1")
    first = _skip_space(text, 0)
    with contextlib.suppress(ValueError, RecursionError):
        _, stop = _DECODER.raw_decode(text, first)
        raw = line[first:stop]
        item = strict_loads(raw)
        if accept([item]):
            return item, raw, stop
    return None


def _is_one_bad_space(damage: bytes, accept: Callable[[list[Any]], bool]) -> bool:
    # One bit makes a NUL byte of a space, and of nothing else that is ours. No lost write is a byte
    # in the middle of an item.
    line = damage.strip(b",\n")
    if line.count(b"\0") != 1 or line.startswith(b"\0") or b"\n" in line:
        return False
    found = _item_of_line(line.replace(b"\0", b" "), accept)
    return found is not None and found[2] == len(line)


def _num_lost(damage: bytes) -> int:
    """Return how many items, one a line, lay in these bytes between two whole ones.

    A byte in the place of a comma or of the first bracket is no item.
    """
    return max(damage.count(b"\n") - 1, int(len(damage.strip(b",[]{} \t\r\n")) > 1))


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in _SPACE:
        position += 1
    return position
