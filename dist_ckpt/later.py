"""Names of a package that are imported when they are first used. Layer 0.

Looking at a run must not cost the import of torch or numpy, which take longer than looking.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["imported_later"]


def imported_later(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: Its name.
        homes: Name → module within the package that has it.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
