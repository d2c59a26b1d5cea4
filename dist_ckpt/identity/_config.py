"""A user's configuration as a flat dictionary of dotted keys and plain JSON values. Pure, no I/O.

Part of layer 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import math
import os
import types
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from dist_ckpt.errors import SettingError

__all__ = ["as_patterns", "flatten_config", "matches"]

_MAX_DEPTH = 50


def as_patterns(patterns: Collection[str] | str) -> tuple[str, ...]:
    """Return the patterns in order, each once; a bare text is one pattern, not its letters."""
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    return tuple(dict.fromkeys(listed))


def matches(key: str, patterns: Collection[str]) -> bool:
    """Return whether a pattern is, or matches as in a shell, ``key`` or a parent of it."""
    parts = key.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(
        name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names
    )


def flatten_config(config: Any, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Return ``{dotted.key: plain JSON value}``, sorted by key, without what ``ignore`` names.

    Mappings, dataclasses, namespaces and pydantic models are followed; so are lists that hold such
    ones, by position (``layers.0.size``). Lists and tuples of plain values are one value, and the
    same one; sets are sorted. Paths and dtypes are texts, enums their name, classes and named
    functions their qualified name, arrays and tensors a digest, NaN and infinities ``{"$float":
    …}``. Anything else counts by its type and repr.

    Raises:
        SettingError: A value's repr holds its address (a lambda, an object without a repr): it
            would differ in every process. Or two values have one dotted key, or the nesting has no
            end.
    """
    fields = _fields(config)
    if fields is None:
        raise SettingError(
            f"config= is of type {type(config).__name__}; it must be a mapping, a dataclass or a "
            "namespace.",
            next_step="Give a dictionary of the settings that the run depends on.",
        )
    flat: dict[str, Any] = {}
    _add(flat, "", fields, tuple(ignore))
    return dict(sorted(flat.items()))


def _add(
    flat: dict[str, Any], prefix: str, fields: Mapping[Any, Any], ignore: tuple[str, ...]
) -> None:
    if prefix.count(".") > _MAX_DEPTH:
        raise SettingError(
            f"config is nested deeper than {_MAX_DEPTH} levels at {prefix[:60]!r}…",
            next_step="Leave out what refers back to itself, with config_ignore=.",
        )
    for name, value in fields.items():
        key = f"{prefix}{name if isinstance(name, str) else repr(name)}"
        if matches(key, ignore):
            continue
        inner = _fields(value)
        if inner:
            _add(flat, f"{key}.", inner, ignore)
            continue
        if key in flat:
            raise SettingError(
                f"Two values of config have the key {key!r} once nesting is written with dots.",
                next_step="Rename one of them.",
            )
        flat[key] = {} if inner is not None else _plain(value, key)


def _fields(value: Any) -> Mapping[Any, Any] | None:  # noqa: PLR0911 - one branch a type
    """Return what a value that has named parts holds, None for a leaf."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: Mapping[Any, Any] = value._asdict()
        return named
    if not isinstance(value, type) and callable(getattr(value, "model_dump", None)):  # pydantic
        dumped: Mapping[Any, Any] = value.model_dump()
        return dumped
    if isinstance(value, list | tuple) and any(_fields(item) is not None for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _plain(value: Any, key: str) -> Any:  # noqa: PLR0911 - one line a type reads best
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, os.PathLike):
        return os.fsdecode(os.fspath(value))
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, key) for item in value), key=repr)
    if isinstance(value, bytes | bytearray):
        return f"bytes[{len(value)}] sha256:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and (
        "<" not in value.__qualname__  # '<lambda>', '<locals>'
    ):
        return f"{value.__module__}.{value.__qualname__}"
    return _foreign(value, key)


def _foreign(value: Any, key: str) -> Any:
    if hasattr(value, "detach"):  # a tensor; torch isn't imported for the sake of a configuration
        value = value.detach().cpu().numpy()
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        if value.ndim == 0 and value.dtype.kind in "biuf":  # also NumPy's own numbers
            return _plain(value.item(), key)
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{value.dtype}{list(value.shape)} sha256:{digest}"
    text = repr(value)
    if " at 0x" in text:
        raise SettingError(
            f"config holds {text[:80]} under {key!r}, which has no value outside this process.",
            next_step="Give its name or its numbers instead, or leave it out: "
            f"config_ignore=({key!r},).",
            path=key,
        )
    module = type(value).__module__
    if module in ("builtins", "torch"):  # torch.float16, torch.device: their repr says it all
        return text
    return f"{module}.{type(value).__qualname__}: {text}"
