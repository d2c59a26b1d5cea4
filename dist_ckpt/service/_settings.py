"""What a user may set, checked before anything is touched. Layer 6; reads the environment."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dist_ckpt.errors import SettingError
from dist_ckpt.generations import Retention
from dist_ckpt.signals import HANDLED

__all__ = [
    "DEADLINE_VARIABLE",
    "IMPORT_VARIABLE",
    "OMIT_VARIABLE",
    "STATUS_VARIABLE",
    "STOP_AT_VARIABLE",
    "WITNESS_VARIABLE",
    "DiskLow",
    "Export",
    "Reduce",
    "Resume",
    "Settings",
    "SigUsr1",
]

_Path = str | os.PathLike[str]
Export = Literal["always", "signal", "never"]
SigUsr1 = Literal["now", "boundary"]
DiskLow = Literal["stop", "wait"]
Reduce = Literal["rank0", "mean"]
Resume = Literal["auto", "never"] | int

_ACCEPT_VARIABLE = "DIST_CKPT_ACCEPT"
IMPORT_VARIABLE = "DIST_CKPT_IMPORT"
DEADLINE_VARIABLE = "DIST_CKPT_DEADLINE_SECS"
SIGN_VARIABLE = "DIST_CKPT_SIGN_WITH"
REQUIRE_VARIABLE = "DIST_CKPT_REQUIRE_SIGNATURE"
OMIT_VARIABLE = "DIST_CKPT_OMIT_RESTORE"
STATUS_VARIABLE = "DIST_CKPT_STOP_EXIT_CODE"
STOP_AT_VARIABLE = "DIST_CKPT_STOP_AT"
WITNESS_VARIABLE = "DIST_CKPT_WITNESS"
#: 31 years. The longest wait that Python can be told is 292, and some waits here are for twice
#: what was set.
_MOST_SECS = 1e9
_SECS = "a number of seconds above 0, at most 1e9"
#: What can be left out of a restore, by the first word of its name.
_PARTS = ("rng", "data", "optimizer", "scheduler", "scaler", "policy", "extra", "generators")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about a run's saves that isn't state; ``Checkpointer`` tells what each means."""

    every: int = 100
    retention: Retention = field(default_factory=Retention)
    resume: Resume = "auto"
    export: Export = "always"
    export_copy: bool = False
    sigusr1: SigUsr1 = "now"
    timeout_secs: float = 600.0
    deadline_secs: float = 25.0
    reserve_bytes: int = 0
    disk_low: DiskLow | None = None
    signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    stop_exit_code: int = 0
    reduce: Reduce = "rank0"
    accept: Collection[str] = ()
    strict: bool = False
    config: Mapping[str, Any] | None = None
    config_ignore: Collection[str] = ()
    data_id: str | None = None
    omit: Collection[str] = ()
    order: Sequence[str] | None = None
    sign_with: _Path | None = None
    require_signature: bool | _Path | Sequence[_Path] = False

    def __post_init__(self) -> None:
        """Refuse settings that can't be meant, by name."""
        self._whole("every", least=1)
        self._whole("reserve_bytes", least=0)
        self._whole("stop_exit_code", least=0, most=255)
        for name in ("timeout_secs", "deadline_secs"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= _MOST_SECS):
                raise _refuse(name, value, _SECS)
        for name, kind in (("export", Export), ("sigusr1", SigUsr1), ("reduce", Reduce)):
            if getattr(self, name) not in get_args(kind):
                raise _refuse(name, getattr(self, name), f"one of {', '.join(get_args(kind))}")
        if self.disk_low is not None and self.disk_low not in get_args(DiskLow):
            raise _refuse("disk_low", self.disk_low, "None, 'stop' or 'wait'")
        if not _are_handled(self.signals):
            wanted = "some of signal.SIGTERM, signal.SIGINT and signal.SIGUSR1"
            raise _refuse("signals", self.signals, wanted)
        _ = self.required_keys
        is_step = type(self.resume) is int and self.resume >= 0
        if not is_step and self.resume not in ("auto", "never"):
            raise _refuse("resume", self.resume, "'auto', 'never' or a step number")
        for name in ("omitted", "stop_at", "stop_secs", "stop_status"):
            getattr(self, name)  # the environment's are refused here, not in the middle of a start

    def _whole(self, name: str, *, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            upper = "up" if most is None else f"to {most}"
            raise _refuse(name, value, f"a whole number from {least} {upper}")

    @property
    def accepted(self) -> frozenset[str]:
        """Words that accept a difference, from the call and from the environment."""
        return frozenset(self.accept) | _words(_ACCEPT_VARIABLE)

    @property
    def omitted(self) -> frozenset[str]:
        """Parts that a proof's negative control leaves out of the restore.

        Raises:
            SettingError: There is no such part: a control that leaves nothing out proves nothing.
        """
        words = frozenset(self.omit) | _words(OMIT_VARIABLE)
        if strange := sorted(word for word in words if word.split(".", 1)[0] not in _PARTS):
            raise _refuse(OMIT_VARIABLE, strange[0], f"one of {', '.join(_PARTS)}")
        return words

    @property
    def stop_secs(self) -> float:
        """What a stop may take: what stands beside the supervisor's own limit, else the setting.

        Raises:
            SettingError: The environment holds something else than a number of seconds.
        """
        text = os.environ.get(DEADLINE_VARIABLE, "").strip()
        if not text:
            return self.deadline_secs
        try:
            secs = float(text)
        except ValueError:
            secs = math.nan
        if not 0 < secs <= _MOST_SECS:
            raise _refuse(DEADLINE_VARIABLE, text, _SECS)
        return secs

    @property
    def stop_status(self) -> int:
        """The status after a stop by a signal: what the supervisor's file says, else the setting.

        Raises:
            SettingError: The environment holds something else than a status.
        """
        text = os.environ.get(STATUS_VARIABLE, "").strip()
        if not text:
            return self.stop_exit_code
        if not (text.isascii() and text.isdigit() and int(text) <= 255):
            raise _refuse(STATUS_VARIABLE, text, "a whole number from 0 to 255")
        return int(text)

    @property
    def signing_key(self) -> Path | None:
        """The file of the private key that signs this run's resume points, None without."""
        given = os.environ.get(SIGN_VARIABLE) or self.sign_with
        return None if given is None else Path(given)

    @property
    def required_keys(self) -> tuple[Path, ...] | None:
        """Files of the public keys besides the signing one's; None: no signature is required."""
        text = os.environ.get(REQUIRE_VARIABLE, "")
        given = self.require_signature
        if text:
            given = True if text == "1" else text.split(os.pathsep)
        if isinstance(given, bool):
            return () if given else None
        paths = [given] if isinstance(given, str | os.PathLike) else given
        if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
            raise _refuse("require_signature", given, "True, or files of public keys")
        return tuple(Path(path) for path in paths)

    @property
    def stop_at(self) -> int | None:
        """The step at which a proof's scenario ends, whatever ``until`` is.

        Raises:
            SettingError: The environment names something else than a step.
        """
        text = os.environ.get(STOP_AT_VARIABLE, "").strip()
        if text and not (text.isascii() and text.isdigit()):
            raise _refuse(STOP_AT_VARIABLE, text, "a step number")
        return int(text) if text else None

    @property
    def import_path(self) -> Path | None:
        """The .bin that a run without generations begins from."""
        text = os.environ.get(IMPORT_VARIABLE, "")
        return Path(text) if text else None

    @property
    def witness_dir(self) -> Path | None:
        """Where a proof wants to be told what each step saw."""
        text = os.environ.get(WITNESS_VARIABLE, "")
        return Path(text) if text else None


def _are_handled(signals: object) -> bool:
    try:
        return isinstance(signals, Collection) and HANDLED.issuperset(signals)
    except TypeError:  # no signal, since it can't be in a set
        return False


def _words(variable: str) -> frozenset[str]:
    return frozenset(
        word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()
    )


def _refuse(name: str, found: object, wanted: str) -> SettingError:
    return SettingError(
        f"{name}={found!r} isn't {wanted}.",
        next_step=f"Give {name} {wanted}.",
        setting=name,
        found=repr(found),
    )
