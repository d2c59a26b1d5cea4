"""``NAME.metrics.jsonl``: what else ``record()`` was given, one step a line. Layer 4, I/O.

Each line: ``{"step": n, "<metric>": value, …}``. A number that isn't finite is null, and named in
``"nonfinite": {"<metric>": "nan" | "inf" | "-inf"}``. Read like the loss file: a line for step s
voids earlier ones of a step >= s. A line ``{"step": n, "cut": true}`` is a rewind to n: it voids
later steps and adds nothing.
"""

from __future__ import annotations

import numbers
import os
from typing import TYPE_CHECKING, Any, Final

from dist_ckpt.errors import UsageError
from dist_ckpt.history._array_file import read_or_none
from dist_ckpt.history._lines_file import LinesFile, encode_line, parse_lines, to_json
from dist_ckpt.history._loss_format import loss_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Metrics", "check_metric_names", "encode_metrics", "parse_metrics"]

_OWN_KEYS: Final = frozenset({"step", "nonfinite", "cut"})


def check_metric_names(metrics: Mapping[str, Any]) -> None:
    """Return if each name is free.

    Raises:
        UsageError: A metric is called ``step``, ``nonfinite`` or ``cut``.
    """
    if taken := sorted(_OWN_KEYS & metrics.keys()):
        message = f"A metric can't be called {taken[0]!r}: each line of the file has its own."
        raise UsageError(message, next_step="Give it another name.", found=taken)


def encode_metrics(step: int, metrics: Mapping[str, Any]) -> bytes:
    """Return the line of one step.

    Raises:
        UsageError: A metric is called ``step``, ``nonfinite`` or ``cut``.
    """
    check_metric_names(metrics)
    values: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if isinstance(value, numbers.Real) and (kind := loss_kind(float(value))):
            values[name], nonfinite[name] = None, kind
        else:
            values[name] = to_json(value)
    line = {"step": step, **values}
    return encode_line(line | {"nonfinite": nonfinite} if nonfinite else line)


def parse_metrics(data: bytes) -> list[dict[str, Any]]:
    """Return the lines that count, rising in step; damaged ones are passed over."""
    kept: list[dict[str, Any]] = []
    for _, _, line in parse_lines(data):
        if line is None or type(line.get("step")) is not int:
            continue
        # A rewind keeps the step that it goes to, a line replaces that of its own step.
        first_void = line["step"] + (1 if line.get("cut") is True else 0)
        while kept and kept[-1]["step"] >= first_void:
            kept.pop()
        if line.get("cut") is not True:
            kept.append(line)
    return kept


class Metrics:
    """The metrics file of a run that is under way. Use `open`.

    One thread appends; `sync` may run on another meanwhile.
    """

    def __init__(self, file: LinesFile) -> None:
        self._file = file
        self.repaired = file.repaired

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> Metrics:
        """Return the file, open at its end, a torn last line repaired; made where missing.

        Args:
            path: The file.
            keep_cut: Given the bytes that a repair is about to cut, before anything changes.

        Raises:
            StorageError: The file system refused.
        """
        return cls(LinesFile(path, read_or_none(path), keep_cut=keep_cut))

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._file.path

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, void lines included."""
        return self._file.num_bytes

    def repeat(self, line: dict[str, Any]) -> None:
        """Add a line that `parse_metrics` returned once more. Not durable before `sync`."""
        self._file.append(encode_line(line))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the line of ``step``. Not durable before `sync`.

        Raises:
            UsageError: A metric has a name that each line needs for itself.
            StorageError: The file system refused.
        """
        self._file.append(encode_metrics(step, metrics))

    def cut(self, step: int) -> None:
        """Void all lines of a step > ``step``."""
        self._file.append(encode_line({"step": step, "cut": True}))

    def steps_after(self, step: int) -> set[int]:
        """Return the steps > ``step`` that the file has a line of. Reads it: for resume only."""
        lines = parse_metrics(read_or_none(self._file.path) or b"")
        return {line["step"] for line in lines if line["step"] > step}

    @property
    def file(self) -> LinesFile:
        """The file itself."""
        return self._file

    def sync(self) -> None:
        """Make all lines appended before this call durable. Any thread."""
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()
