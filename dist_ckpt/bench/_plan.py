"""What a benchmark consists of: cases, libraries, sizes, how long each may take. Layer 7.

Imports neither torch nor a library that is measured.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt.errors import SettingError

__all__ = [
    "CASES",
    "FULL_BYTES",
    "LIBRARIES",
    "SMALL_TENSOR_BYTES",
    "Case",
    "Options",
    "installed_libraries",
]

#: Of the state of a real run: 124 million parameters with both moments.
FULL_BYTES = 1_500_000_000
SMALL_TENSOR_BYTES = 4096
_SMALL_BYTES = 100_000 * SMALL_TENSOR_BYTES
#: One rank's share of the memory that is free: its state, its arena, what peers stage, page cache.
_MEMORY_SHARE = 0.18


@dataclass(frozen=True, slots=True)
class Case:
    """One state on so many ranks.

    Attributes:
        name: As ``--only`` names it.
        title: What it is.
        state: ``adamw`` (float32), ``mixed`` (bfloat16 weights, float32 moments), ``small``
            (tensors of 4 KiB), ``flat`` (what must not grow), ``scale`` (plans for many ranks).
        world_size: Number of ranks.
        num_bytes: Weights and moments of one rank.
        secs: What it may take, start and end of its processes aside.
    """

    name: str
    title: str
    state: str
    world_size: int = 1
    num_bytes: int = FULL_BYTES
    secs: float = 60.0

    @property
    def has_savers(self) -> bool:
        """Whether saves and loads are measured in it, ours and those of other libraries."""
        return self.state not in ("flat", "scale")


CASES: tuple[Case, ...] = (
    Case("adamw", "AdamW, float32, 1 rank", "adamw", secs=170),
    Case("mixed", "bfloat16 weights, float32 moments, 1 rank", "mixed", secs=130),
    Case("small", "tensors of 4 KiB, AdamW, 1 rank", "small", num_bytes=_SMALL_BYTES, secs=110),
    Case("ranks-2", "AdamW, float32, 2 ranks", "adamw", world_size=2, secs=130),
    Case("ranks-4", "AdamW, float32, 4 ranks", "adamw", world_size=4, secs=90),
    Case("flat", "costs that stay flat", "flat", secs=30),
    Case("flat-2", "a step without a save, 2 ranks", "flat", world_size=2, secs=10),
    Case("scale", "plans for many ranks", "scale", secs=25),
)

#: How ``--against`` names each way of another library → the module that it needs.
LIBRARIES = {
    "torch.save": "torch",
    "safetensors": "safetensors",
    "DCP save": "torch",
    "DCP async_save": "torch",
    "torchsnapshot take": "torchsnapshot",
    "torchsnapshot async_take": "torchsnapshot",
    "torch_checkpointing": "torch_checkpointing",
}
#: In ``--against``: no other library.
_NONE = "none"


def installed_libraries() -> list[str]:
    """Return the names of those that can take part here."""
    return [name for name, module in LIBRARIES.items() if importlib.util.find_spec(module)]


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes:
        only: Names of cases; empty for all.
        num_bytes: Size of a state; None for each case's own.
        repeats: Rounds that count, at most; a case that takes longer than its time makes fewer.
        against: Names of the other libraries that take part, or ``none``; None for all that are
            installed.
        without: Names of those that take no part after all: they took a case's ranks down.
        directory: Where everything is written, below a fresh directory that goes at the end.
        patience: Each case may take so many times its time.
    """

    only: Sequence[str] = ()
    num_bytes: int | None = None
    repeats: int = 5
    against: Sequence[str] | None = None
    without: Sequence[str] = ()
    directory: Path | None = None
    patience: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what can't be measured."""
        names = [case.name for case in CASES]
        if strange := [name for name in self.only if name not in names]:
            raise SettingError(
                f"There is no case {strange[0]!r}.",
                next_step=f"Give --only one or more of {', '.join(names)}.",
                found=strange[0],
            )
        against = [name for name in self.against or () if name != _NONE]
        if strange := [name for name in against if name not in installed_libraries()]:
            is_absent = strange[0] in LIBRARIES
            raise SettingError(
                f"{strange[0]} isn't installed."
                if is_absent
                else f"There is no library {strange[0]!r} to measure against.",
                next_step="Give --against one or more of "
                f"{', '.join(installed_libraries())}; or {_NONE}.",
                found=strange[0],
            )
        if self.repeats < 1:
            raise SettingError(
                f"{self.repeats} rounds measure nothing.", next_step="Give --repeats 5."
            )
        if not 0.01 <= self.patience <= 100:
            raise SettingError(
                f"A patience of {self.patience} makes no sense.",
                next_step="Give --patience from 0.01 to 100; 2 doubles the time of each case.",
            )
        if self.num_bytes is not None and self.num_bytes < 1 << 16:
            raise SettingError(
                f"A state of {self.num_bytes} bytes measures nothing.",
                next_step="Give --size 8MiB or more.",
            )

    def chosen(self) -> list[Case]:
        """Return the cases that are asked for, as they are by themselves."""
        return [case for case in CASES if not self.only or case.name in self.only]

    def cases(self, free_memory_bytes: int) -> list[Case]:
        """Return the cases at the sizes that memory and options allow."""
        return [
            replace(
                case,
                num_bytes=self._size(case, free_memory_bytes),
                secs=self.patience * case.secs,
            )
            for case in self.chosen()
        ]

    def _size(self, case: Case, free_memory_bytes: int) -> int:
        wanted = case.num_bytes if self.num_bytes is None else self.num_bytes
        return min(wanted, int(free_memory_bytes * _MEMORY_SHARE) // case.world_size)


def encode_order(case: Case, options: Options, folder: Path) -> str:
    """Return what a rank's process is told."""
    facts: dict[str, Any] = {
        "case": asdict(case),
        "repeats": options.repeats,
        "against": None if options.against is None else list(options.against),
        "without": list(options.without),
        "folder": str(folder),
    }
    return json.dumps(facts)


def decode_order(text: str) -> tuple[Case, Options, Path]:
    """Return case, options and folder of what :func:`encode_order` returned."""
    facts = json.loads(text)
    options = Options(
        repeats=facts["repeats"], against=facts["against"], without=tuple(facts["without"])
    )
    return Case(**facts["case"]), options, Path(facts["folder"])
