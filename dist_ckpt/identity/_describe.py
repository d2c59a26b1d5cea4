"""Describing the live run as plain JSON.

Part of layer 3. Reads the main script, asks git, fetches samples of the data.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from dist_ckpt.errors import SettingError
from dist_ckpt.identity._code import describe_code
from dist_ckpt.identity._config import as_patterns, flatten_config

__all__ = ["Described", "HasJson", "describe"]


class HasJson(Protocol):
    """Has a form of plain JSON."""

    def to_json(self) -> Mapping[str, Any]:
        """Return it."""
        ...


@dataclass(frozen=True, slots=True)
class Described:
    """A run's identity.

    Attributes:
        facts: ``{"structure": {"digest", "parameters", "buffers", "ties"},
            "config": {dotted.key: value} | None, "config_ignore": [pattern],
            "data": {"id", "length", "digest", "samples", "batch_size" of our loader} | None,
            "code": {"main", "path", "git", "dirty"}, "versions": {…}}``, plain JSON.
        notes: What couldn't be told, each a sentence for the user.
    """

    facts: dict[str, Any]
    notes: tuple[str, ...]


def describe(
    *,
    structure: HasJson,
    config: Any = None,
    config_ignore: Collection[str] | str = (),
    data: Any = None,
    data_id: str | None = None,
    data_limit_secs: float = 1.0,
) -> Described:
    """Return the live run's identity.

    Not collective: rank 0 calls it, and tells the others. Leaves all global generators and the
    loader as they are.

    Args:
        structure: What ``capture`` says of the model; ``to_json()`` gives
            ``{"parameters": [[name, dtype, shape]], "buffers": likewise,
            "aliases": [[other name, kept name]]}``.
        config: A mapping, dataclass, namespace or pydantic model, or None.
        config_ignore: Patterns (as of a shell) of dotted keys that may differ freely; a key's
            parent names it too.
        data: What the batches come from: a ResumableLoader, a DataLoader, anything with
            ``.dataset``.
        data_id: The user's own name for the data; nothing is fetched then.
        data_limit_secs: Longest time for fetching samples.

    Raises:
        SettingError: The configuration holds what has no stable value, or two values under one
            key; or ``data_id`` is empty.
    """
    notes: list[str] = []
    patterns = as_patterns(config_ignore)
    facts: dict[str, Any] = {
        "structure": describe_structure(structure.to_json()),
        "config": None if config is None else flatten_config(config, patterns),
        "config_ignore": list(patterns),
        "data": _describe_data(data, data_id, data_limit_secs, notes),
        "code": describe_code(),
        "versions": describe_versions(),
    }
    return Described(facts, tuple(notes))


def describe_structure(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Return names, shapes, dtypes and ties; the order of declaration leaves no trace in it.

    Which of several tied names is *the* name depends on that order, so each is listed alike.
    """
    aliases = [(str(other), str(kept)) for other, kept in structure["aliases"]]
    kinds: dict[str, dict[str, str]] = {}
    for kind in ("parameters", "buffers"):
        tensors = {
            str(name): f"{dtype}[{', '.join(str(size) for size in shape)}]"
            for name, dtype, shape in structure[kind]
        }
        tensors |= {other: tensors[kept] for other, kept in aliases if kept in tensors}
        kinds[kind] = dict(sorted(tensors.items()))
    groups: dict[str, set[str]] = {}
    for other, kept in aliases:
        groups.setdefault(kept, {kept}).add(other)
    told = {**kinds, "ties": sorted(sorted(group) for group in groups.values())}
    text = json.dumps(told, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return {"digest": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}", **told}


def describe_versions() -> dict[str, Any]:
    """Return the versions of what computes; ``device`` is the kind of device that torch uses."""
    import numpy as np  # noqa: PLC0415 - comparing saved identities must not import torch or NumPy
    import torch  # noqa: PLC0415 - as above

    # Asking an unused CUDA for its name would initialise it: 500 MB of memory on the device.
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "dist_ckpt": _own_version(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else f"cpu {platform.machine()}",
    }


@functools.cache
def _own_version() -> str | None:
    """Return what is installed as ``dist-ckpt``; its description is parsed once in a process."""
    try:
        return metadata.version("dist-ckpt")
    except metadata.PackageNotFoundError:
        return None


def _describe_data(
    data: Any, data_id: str | None, limit_secs: float, notes: list[str]
) -> dict[str, Any] | None:
    if data_id is not None:
        if not data_id:
            raise SettingError(
                "data_id is empty; it must be a text that names the data.",
                next_step="Give a name or a digest that changes when the data does.",
            )
        named = {"id": data_id, "length": None, "digest": None, "samples": 0}
        return named | _batch_size(data)
    if data is None:
        return None
    from dist_ckpt.identity._data import describe_data  # noqa: PLC0415 - it imports torch

    described = describe_data(data, limit_secs, notes)
    return None if described is None else described | _batch_size(data)


def _batch_size(data: Any) -> dict[str, int]:
    """Return the global batch size where the loader knows it, as ours does.

    A DataLoader's is one rank's, which rightly changes with the world size.
    """
    size = getattr(data, "batch_size", None)
    return {"batch_size": size} if type(size) is int and hasattr(data, "last_indices") else {}
