"""What a comparison found, for people and for programs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dist_ckpt.errors import SettingError
from dist_ckpt.wording import counted

__all__ = ["Comparison", "Difference", "Finding", "Kind", "Tolerance", "shown"]

#: So many findings are in the text; all of them are in the JSON.
_SHOWN = 20
#: So many of the largest differences are named.
NUM_LARGEST = 10
_TEXT_CHARS = 80


class Kind(StrEnum):
    """What sort of difference a finding is; all but the last two are differences of structure."""

    MISSING = "missing"  # only A has it
    EXTRA = "extra"  # only B has it
    TYPE = "type"
    SHAPE = "shape"
    DTYPE = "dtype"
    LENGTH = "length"
    NON_FINITE = "non-finite"  # NaN or an infinity, on either side or on both
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Floating values agree where ``|a - b| <= atol + rtol * max(|a|, |b|)``.

    All else must be equal. With both zero a floating value must be equal bit by bit, the sign of
    a zero included.

    Raises:
        SettingError: A number that is negative or not finite.
    """

    atol: float
    rtol: float

    def __post_init__(self) -> None:
        """Refuse what would accept everything or nothing."""
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingError(
                    f"{name}={value!r} isn't a finite number from 0 up.",
                    next_step=f"Give {name} a number from 0 up; 0 asks for equal bits.",
                    setting=name,
                    found=value,
                )

    @property
    def is_exact(self) -> bool:
        """Whether bits are compared."""
        return self.atol == 0 and self.rtol == 0

    def __str__(self) -> str:
        return f"absolute tolerance {self.atol:g}, relative {self.rtol:g}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, with its path in the tree.

    Attributes:
        path: ``model/fc1.weight``, ``history/3/loss``; a key that isn't text stands in brackets.
        kind: What sort of difference.
        detail: A sentence for people, without the path.
        a: The value in A where it can be shown: a number, or short text.
        b: The value in B.
        max_abs: Largest absolute difference of the numbers at this path, if there are any.
        index: Where in the tensor or list the shown values lie.
        num_values: How many values at this path are concerned.
    """

    path: str
    kind: Kind
    detail: str
    a: Any = None
    b: Any = None
    max_abs: float | None = None
    index: tuple[int, ...] | None = None
    num_values: int = 1

    def __str__(self) -> str:
        return f"{self.path or 'value'}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as an object that strict JSON can hold."""
        return {
            "path": self.path,
            "kind": str(self.kind),
            "detail": self.detail,
            "a": shown(self.a),
            "b": shown(self.b),
            "max_abs": shown(self.max_abs),
            "index": None if self.index is None else list(self.index),
            "num_values": self.num_values,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference at one path, whether or not the tolerance accepts it."""

    path: str
    index: tuple[int, ...] | None
    a: Any
    b: Any
    max_abs: float

    def __str__(self) -> str:
        at = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        return (
            f"{self.path or 'value'}{at}: {self.max_abs:.6g} ({shown(self.a)} and {shown(self.b)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the difference as an object that strict JSON can hold."""
        return {
            "path": self.path,
            "index": None if self.index is None else list(self.index),
            "a": shown(self.a),
            "b": shown(self.b),
            "max_abs": shown(self.max_abs),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of :func:`dist_ckpt.compare`.

    Attributes:
        a: What A is called.
        b: What B is called.
        tolerance: What was accepted.
        findings: Every difference that isn't accepted, in the order of the tree.
        largest: The largest differences of floating values, accepted ones too; ten at most.
        max_abs: The largest absolute difference of finite floating values; 0 where all are equal.
        num_values: How many values were compared.
        notes: What was not compared, or differs without counting, and why.
    """

    a: str
    b: str
    tolerance: Tolerance
    findings: tuple[Finding, ...]
    largest: tuple[Difference, ...]
    max_abs: float
    num_values: int
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether there is nothing that the tolerance doesn't accept."""
        return not self.findings

    @property
    def atol(self) -> float:
        """The absolute tolerance."""
        return self.tolerance.atol

    @property
    def rtol(self) -> float:
        """The relative tolerance."""
        return self.tolerance.rtol

    def to_json(self) -> dict[str, Any]:
        """Return everything as an object that strict JSON can hold."""
        return {
            "a": self.a,
            "b": self.b,
            "agrees": self.agrees,
            "atol": self.atol,
            "rtol": self.rtol,
            "max_abs": shown(self.max_abs),
            "num_values": self.num_values,
            "num_findings": len(self.findings),
            "findings": [finding.to_json() for finding in self.findings],
            "largest": [difference.to_json() for difference in self.largest],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        how = f"{self.num_values} values compared, {self.tolerance}"
        if self.agrees:
            text = f"{self.a} and {self.b} agree: {how}, largest difference {self.max_abs:.6g}."
        else:
            many = counted(len(self.findings), "finding")
            text = f"{self.a} and {self.b} differ: {many}; {how}."
        lines = [text, *(f"  {finding}" for finding in self.findings[:_SHOWN])]
        if len(self.findings) > _SHOWN:
            lines.append(f"  … and {len(self.findings) - _SHOWN} more")
        if self.largest:
            lines += ["Largest differences:", *(f"  {one}" for one in self.largest)]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def shown(value: Any) -> Any:
    """Return ``value`` as strict JSON can hold it: exact where it is a number, else short text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT_CHARS else f"{text[: _TEXT_CHARS - 1]}…"
