"""What a command answers: one document, told in JSON or in words. Layer 8."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

__all__ = ["Answer", "JsonOption", "dump"]

#: Each command has it; it is looked up before the words are parsed, so that their errors heed it.
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a command that could be carried out.

    Attributes:
        document: For programs; what JSON can hold.
        text: Returns the same for people, whole lines.
        status: 0, or 1 where a fault was found.
    """

    document: dict[str, Any]
    text: Callable[[], str]
    status: int = 0


def dump(document: dict[str, Any]) -> str:
    """Return one JSON document, a whole line; ASCII, so that any terminal and file name will do.

    A number that isn't finite, which JSON has no word for, is spelled as text.
    """
    try:
        return json.dumps(document, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
