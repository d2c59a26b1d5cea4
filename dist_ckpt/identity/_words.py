"""Words of ``accept`` that name nothing, and what was probably meant. Pure. Part of layer 3."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dist_ckpt.identity._config import matches

__all__ = ["unknown_words"]

#: What a word may begin with, whatever the run is.
_PARTS = (
    "code",
    "config",
    "data",
    "fresh_start",
    "generators",
    "replicas",
    "structure",
    "versions",
)
_KINDS = ("extra", "policy", "scaler", "scheduler")
#: Below these each name is known; below the others any is let through.
_EXACT = ("config", "data", "extra", "versions")
_DATA_KEYS = ("batch_size", "digest", "id", "length")


def unknown_words(
    words: Collection[str], identities: Collection[Mapping[str, Any]], parts: Collection[str] = ()
) -> dict[str, str | None]:
    """Return each word that can accept nothing here → the nearest one that could, None if none is.

    Args:
        words: As given to ``accept``.
        identities: The live run's, and the saved one's where there is one.
        parts: Parts that either of them has ("scheduler", "extra.ema", …).
    """
    known = [*_PARTS, *_KINDS, *parts, *(name for facts in identities for name in _names(facts))]
    unknown = {}
    for word in words:
        head, dot, _ = word.partition(".")
        is_free = bool(dot) and head in (*_PARTS, *_KINDS) and head not in _EXACT
        if not is_free and not any(matches(name, [word]) for name in known):
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            unknown[word] = near[0] if near else None
    return unknown


def _names(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"data.{key}" for key in _DATA_KEYS)
    for part in ("config", "versions"):
        of_part = facts.get(part)
        for key in of_part if isinstance(of_part, Mapping) else ():
            yield f"{part}.{key}"
