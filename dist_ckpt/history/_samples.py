"""``NAME.samples.json``: audit samples, a JSON array of ``{"step", "loss", "text"}``. Layer 4, I/O.

Valid JSON after every append, repaired on opening, as the loss file. A step may have several
samples. Reading: a sample of step s voids earlier ones of a step > s, and one that repeats an
earlier one of the same step counts once (a replayed step samples again).
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import CorruptFileError, UsageError
from dist_ckpt.history._array_file import ArrayFile, read_or_none
from dist_ckpt.history._json_array import scan_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Samples", "canonical_samples", "parse_samples"]

_WHAT = '{"step", "loss", "text"}'


def parse_samples(
    data: bytes, *, path: str | os.PathLike[str], torn_ok: bool = False
) -> list[dict[str, Any]]:
    """Return all samples in the order of the file.

    Args:
        data: All bytes of the file.
        path: Named in errors; never opened.
        torn_ok: Whether a torn end is passed over: for readers beside a running job.

    Raises:
        CorruptFileError: Not an array of samples; torn, without ``torn_ok``.
    """
    scan = scan_array(data, accept=_are_samples, what=_WHAT, path=path)
    if not scan.whole and not torn_ok:
        message = f"{path}: the samples are whole up to byte {scan.end} of {len(data)} only."
        raise CorruptFileError(
            message,
            next_step="Read it again if the job runs; it is repaired when the run resumes.",
            path=path,
            expected="]",
            found=repr(data[scan.end : scan.end + 40]),
        )
    return scan.items


def canonical_samples(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples that count, in the order of steps. Linear but for samples of one step."""
    kept: list[dict[str, Any]] = []
    for sample in samples:
        while kept and kept[-1]["step"] > sample["step"]:
            kept.pop()
        first = len(kept)
        while first and kept[first - 1]["step"] == sample["step"]:
            first -= 1
        if sample not in kept[first:]:
            kept.append(sample)
    return kept


class Samples:
    """The samples file of a run that is under way. Use `open`.

    One thread appends; `sync` may run on another meanwhile.
    """

    def __init__(self, file: ArrayFile, void_items: int) -> None:
        self._file = file
        self._void_items = void_items
        self._replay: list[dict[str, Any]] = []
        self.repaired = file.repaired

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        void_items: int = 0,
        keep_cut: Callable[[bytes], None] | None = None,
    ) -> Samples:
        """Return the file, open at its end, whole and valid, made where it is missing.

        Args:
            path: The file.
            void_items: How many samples from the beginning of the file don't count.
            keep_cut: Given the bytes that a repair is about to cut, before anything changes.

        Raises:
            CorruptFileError: The file never was an array of samples; it isn't touched.
            StorageError: The file system refused.
        """
        data = read_or_none(path)
        scan = scan_array(data or b"", accept=_are_samples, what=_WHAT, path=path)
        file = ArrayFile(
            path,
            data,
            num_items=len(scan.items),
            end=scan.end,
            whole=scan.whole,
            mended=scan.mended,
            keep_cut=keep_cut,
        )
        return cls(file, void_items)

    @property
    def num_items(self) -> int:
        """Samples in the file, void ones included."""
        return self._file.num_items

    @property
    def num_after_void(self) -> int:
        """Samples behind those that the journal calls void."""
        return max(0, self.num_items - self._void_items)

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._file.path

    def items(self) -> list[dict[str, Any]]:
        """Return the samples that count, in the order of steps."""
        return self._read()

    def repeat(self, sample: dict[str, Any]) -> None:
        """Add a sample that the file has already once more. Not durable before `sync`."""
        self._write(sample)

    def begin(self, step: int) -> None:
        """Don't write samples of later steps again where they come out the same."""
        self._replay = [sample for sample in self._read() if sample["step"] > step]

    def append(self, step: int, text: str, loss: float | None) -> None:
        """Add one sample; a loss that isn't finite is null. Not durable before `sync`.

        Raises:
            UsageError: ``step`` is negative.
            StorageError: The file system refused.
        """
        if step < 0:
            message = f"Step {step} can't be sampled, steps begin at 0."
            raise UsageError(message, expected="step >= 0", found=step)
        if loss is not None and not math.isfinite(loss):
            loss = None
        sample = {"step": step, "loss": None if loss is None else float(loss), "text": text}
        if sample in self._replay:
            return
        self._replay.clear()  # what is written now voids the later ones
        self._write(sample)

    def cut(self, step: int) -> int:
        """Void all samples of a step > ``step``.

        Returns:
            How many from the beginning of the file the journal has to call void, since there is
            none left whose repetition would say so; 0 mostly.
        """
        self._replay.clear()
        samples = self._read()
        if not samples or samples[-1]["step"] <= step:
            return 0
        kept = [sample for sample in samples if sample["step"] <= step]
        if kept:
            self._write(kept[-1])
            return 0
        self._void_items = self.num_items
        return self._void_items

    @property
    def file(self) -> ArrayFile:
        """The file itself."""
        return self._file

    def sync(self) -> None:
        """Make all samples appended before this call durable. Any thread."""
        self._file.sync()

    def close(self) -> None:
        """Give the descriptor back; nothing is synced."""
        self._file.close()

    def _write(self, sample: dict[str, Any]) -> None:
        self._file.append(json.dumps(sample, allow_nan=False).encode())

    def _read(self) -> list[dict[str, Any]]:
        path = self._file.path
        samples = parse_samples(read_or_none(path) or b"[]", path=path)
        return canonical_samples(samples[self._void_items :])


def _are_samples(items: list[Any]) -> bool:
    # Others write samples without a loss or a text; a step is what they can't do without.
    return all(
        isinstance(item, dict) and type(item.get("step")) is int and item["step"] >= 0
        for item in items
    )
