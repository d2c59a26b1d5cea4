"""JSON as our files must have it, and nothing looser. Layer 1, pure, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dist_ckpt.errors import CorruptFileError

__all__ = ["load_strict_json"]


def load_strict_json(data: bytes, *, path: object) -> dict[str, Any]:
    """Return the JSON object in ``data``; UTF-8 only, no duplicate keys, no NaN, bounded depth.

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

    try:
        body = _decode(data, unique, refuse)
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
) -> Any:
    return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
