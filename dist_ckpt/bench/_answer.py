"""What the ranks of a case have measured so far, in a file that is whole at any time. Layer 7."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BenchAnswer", "read_answer", "write_answer"]


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """As the ranks told it last.

    Attributes:
        on_turn: Who had begun a turn, empty where nobody had.
        found: What was measured before.
        is_all: Whether nothing is measured after it.
    """

    on_turn: str
    found: dict[str, Any]
    is_all: bool


def write_answer(path: Path, on_turn: str, found: dict[str, Any], *, is_all: bool) -> None:
    """The file holds this, or what it held before."""
    new = path.with_suffix(".new")
    text = json.dumps({"on_turn": on_turn, "found": found, "is_all": is_all})
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read_answer(path: Path) -> BenchAnswer | None:
    """Return what was told last, None where nothing was."""
    try:
        return BenchAnswer(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
