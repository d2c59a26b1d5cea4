r"""Finds what is whole in a JSON array that grows at its end. Pure: layer 4, no I/O.

An append replaces the closing bracket by ``,\n<item>]`` in one write, so what a crash can leave
is a good beginning and a bad end: half an item, NUL bytes, a missing bracket. Everything up to
the last whole item is kept, the rest is the tail.
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
        end: Offset in bytes at which the closing bracket lies, or has to be put.
        whole: Whether a closing bracket and nothing but white space follows from ``end`` on.
    """

    items: list[Any]
    end: int
    whole: bool


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
    """Return the items of the longest valid beginning of ``data``, in time linear in its length.

    A whole array costs one ``json.loads``, one that a single append left torn a few; only a worse
    one is walked item by item. Bytes that are blank (nothing, NUL bytes, white space: a file made
    just before a power cut) are an empty array that isn't whole.

    Args:
        data: All bytes of the file.
        accept: Tells whether all items of a list are what the file may hold.
        what: What the items are, for messages.
        path: Named in errors; never opened.

    Raises:
        CorruptFileError: The bytes never were such an array: they don't begin with ``[``, or are
            valid JSON of something else. A torn end alone never raises.
    """
    items = _load_whole(data, accept)
    if items is not None:
        return ArrayScan(items, len(data.rstrip(b" \t\r\n")) - 1, whole=True)
    if not data.strip(_BLANK):
        return ArrayScan([], 0, whole=False)
    if not data.lstrip(b" \t\r\n").startswith(b"[") or _is_lenient_json(data):
        message = f"{path}: this isn't a JSON array of {what}."
        raise CorruptFileError(
            message,
            next_step="Move the file away, or mend it by hand; nothing was changed.",
            path=path,
            expected=f"JSON array of {what}",
            found=repr(data[:40]),
        )
    return _close_early(data, accept) or _walk(data, accept)


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


def _is_lenient_json(data: bytes) -> bool:
    # Whole but not ours, NaN tokens included: nobody tore it, so nobody may cut it.
    if not data.rstrip(b" \t\r\n").endswith(b"]"):
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


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in _SPACE:
        position += 1
    return position
