"""Text that is on every machine: Python's documentation and library, as named sources of bytes.

It changes with the version of Python, so `data_id` belongs in the resume point: a run doesn't go on
with other text without being told to.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from andrea.model import START

Sources = Mapping[str, NDArray[np.uint16]]
"""Name of a source → its tokens; texts begin with `START`."""

WEIGHTS = {"docs": 2.0, "docstrings": 1.0, "code": 1.0}
"""How often a window comes from each source, relative to the others."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
"""Folders in there that differ from machine to machine."""

_QUOTED = re.compile(rb'"""(.{40,}?)"""', re.DOTALL)


def load_sources(limit_bytes: int = 2_000_000) -> dict[str, NDArray[np.uint16]]:
    """Return the tokens of each source, `limit_bytes` of it at most.

    - ``docs``: the language reference that ``help()`` shows
    - ``docstrings``: the triple-quoted texts of the standard library
    - ``code``: the standard library's own modules
    """
    modules = _library(limit_bytes)
    return {
        "docs": _tokens([topics[name].encode() for name in sorted(topics)], limit_bytes),
        "docstrings": _tokens(
            [text for module in modules for text in _QUOTED.findall(module)], limit_bytes
        ),
        "code": _tokens(modules, limit_bytes),
    }


def _library(limit_bytes: int) -> list[bytes]:
    """Return modules of the standard library, those at the top first, up to the limit."""
    modules: list[bytes] = []
    size = 0
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for folder in folders:  # grows as it goes
        entries = sorted(folder.iterdir())
        for path in entries:
            if path.suffix == ".py" and size < limit_bytes:
                modules.append(path.read_bytes())
                size += len(modules[-1])
        if size >= limit_bytes:
            break
        folders += [path for path in entries if path.is_dir() and path.name not in _NOT_LIBRARY]
    return modules


def _tokens(texts: list[bytes], limit_bytes: int) -> NDArray[np.uint16]:
    start = np.array([START], dtype=np.uint16)
    parts = [start]
    for text in texts:
        parts += [np.frombuffer(text, dtype=np.uint8).astype(np.uint16), start]
    return np.concatenate(parts[:-1])[:limit_bytes]


def data_id(sources: Sources) -> str:
    """Return what tells this text from any other: a digest of all names and tokens."""
    digest = hashlib.sha256()
    for name, tokens in sources.items():
        digest.update(f"{name} {tokens.size}\n".encode())
        digest.update(tokens.astype("<u2").tobytes())
    return f"sha256:{digest.hexdigest()}"


class TextWindows(Dataset[Tensor]):
    """A map-style data set of windows over several sources, mixed by fixed weights.

    Sample ``i`` belongs to one source and one stretch of it; where in the stretch its window begins
    is drawn from torch's generator, which `dist_ckpt.ResumableLoader` seeds for each sample. So no
    two epochs are the same, and a resumed one is. A policy that learns its weights has one such
    data set, and one loader, for each source: see `mixture`.

    Args:
        sources: Name → tokens.
        context: Length of a window; a sample has one token more, the last one's target.
        weights: Name → share of the samples; all equal unless given. Each source needs one.
    """

    def __init__(
        self, sources: Sources, context: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self.length = context + 1
        weights = weights or dict.fromkeys(sources, 1.0)
        if weights.keys() != sources.keys():
            msg = f"weights name {sorted(weights)}, the sources are {sorted(sources)}"
            raise ValueError(msg)
        self.names = list(sources)
        self._tokens = [sources[name] for name in self.names]
        num_windows = sum(tokens.size // self.length for tokens in self._tokens)
        total = sum(weights.values())
        self.counts = [max(1, round(num_windows * weights[name] / total)) for name in self.names]
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def source_of(self, index: int) -> str:
        """Return the name of the source that sample `index` is from."""
        return self.names[int(np.searchsorted(self._ends, index, side="right"))]

    def __getitem__(self, index: int) -> Tensor:
        """Return a window of sample `index`: (context + 1,) int64."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = int(np.searchsorted(self._ends, index, side="right"))
        tokens, count = self._tokens[which], self.counts[which]
        stretch = index - (int(self._ends[which]) - count)
        last_start = tokens.size - self.length
        low = last_start * stretch // count
        high = last_start * (stretch + 1) // count
        start = int(torch.randint(low, max(high, low + 1), ()))
        return torch.from_numpy(tokens[start : start + self.length].astype(np.int64))
