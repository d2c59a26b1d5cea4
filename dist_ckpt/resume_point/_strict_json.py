"""JSON as our files must have it, and nothing looser. Layer 1, pure, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from dist_ckpt.errors import CorruptFileError

__all__ = ["load_strict_json"]

#: A user's state may be nested 100 values deep, each of them three levels of JSON, in a few more.
_MAX_DEPTH = 320
#: What JSON nests, as it is parsed.
_NESTED = (dict, list)


def load_strict_json(data: bytes, *, path: object) -> dict[str, Any]:
    """Return the JSON object in ``data``; UTF-8 only, no duplicate keys, finite, bounded depth.

    Numbers that only an infinity can stand for (``1e999``) are refused as NaN is. Whoever walks
    what was returned needs ``_MAX_DEPTH`` calls at most.

    Raises:
        CorruptFileError: Anything else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    try:
        body = _decode(data, unique, refuse, finite)
        _require_depth(body)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} isn't readable JSON: {error}.",
            next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
            path=str(path),
        ) from error
    if not isinstance(body, dict):
        raise CorruptFileError(
            f"{path} holds a JSON {type(body).__name__} where an object is expected.",
            next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
            path=str(path),
        )
    return body


def _decode(
    data: bytes,
    unique: Callable[[list[tuple[str, Any]]], dict[str, Any]],
    refuse: Callable[[str], float],
    finite: Callable[[str], float],
) -> Any:
    return json.loads(
        data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite
    )


def _require_depth(body: Any) -> None:
    """Return if nothing is nested deeper than whoever reads it can follow."""
    level = [body] if type(body) in _NESTED else []
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if type(node) is dict else node)
            if type(item) in _NESTED
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
