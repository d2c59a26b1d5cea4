"""Sizes as people write them. Layer 8, pure."""

from __future__ import annotations

import re

from dist_ckpt.errors import SettingError

__all__ = ["parse_size"]

_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(|[KMGT]i?B|B)")
_DECIMAL_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str, option: str) -> int:
    """Return the bytes of ``256MiB`` or ``1.5GB``.

    Raises:
        SettingError: It isn't a size; ``option`` is named.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise SettingError(
            f"{option} {text!r} isn't a size.", next_step=f"Give {option} 256MiB.", found=text
        )
    number, unit = found.groups()
    is_decimal = unit.endswith("B") and len(unit) == 2
    factor = _DECIMAL_UNITS[unit[0]] if is_decimal else _UNITS[unit[:1]]
    return int(float(number) * factor)
