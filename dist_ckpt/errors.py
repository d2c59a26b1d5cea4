"""Every error that dist_ckpt raises on purpose, in one tree.

    DistCkptError
    ├── UsageError (ValueError)              a call or an option that can't be honoured
    │   ├── UnsupportedValueError            state that no file of ours can keep, with its path
    │   └── SettingError                     a setting that would lose data or make no sense
    ├── NotFoundError (FileNotFoundError)    no such run, generation or file
    ├── ForeignFileError                     a file or directory that isn't ours
    ├── CorruptFileError                     bytes that aren't what they must be
    │   ├── DigestMismatchError              a digest says that bytes changed
    │   ├── FormatVersionError               written by a version that this one can't read
    │   └── SignatureError                   not signed by a key that is trusted
    ├── NoUsableGenerationError              generations exist, none can be used
    ├── MismatchError                        what was saved doesn't fit the live objects
    ├── IdentityError                        another data set, configuration or structure
    ├── IncompleteError                      a check could not be completed, so it says nothing
    ├── LockedError                          somebody else trains in this run directory
    ├── StorageError (OSError)               the file system refused
    │   └── NoSpaceError                     not enough room, found out before writing
    └── JobError                             something between ranks
        ├── RankFailedError                  one or more ranks reported an error
        ├── RankTimeoutError                 a rank didn't answer in time
        ├── NotRunningError                  no live job to ask
        └── SaveFailedError                  a save that was asked for didn't become a generation

Each error carries a stable ``id`` for scripts, its values as attributes, and a ``next_step`` that
tells a person what to do. Errors survive pickling, since ranks of a test or of a worker pool hand
them on.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

__all__ = [
    "CorruptFileError",
    "DigestMismatchError",
    "DistCkptError",
    "ForeignFileError",
    "FormatVersionError",
    "IdentityError",
    "IncompleteError",
    "JobError",
    "LockedError",
    "MismatchError",
    "NoSpaceError",
    "NoUsableGenerationError",
    "NotFoundError",
    "NotRunningError",
    "RankFailedError",
    "RankTimeoutError",
    "SaveFailedError",
    "SettingError",
    "SignatureError",
    "StorageError",
    "UnsupportedValueError",
    "UsageError",
]

#: Where a text that ends with a full stop was put into another; `..` in a path is none.
_DOUBLED_STOP = re.compile(r"(?<=[\w\])%'\"`])\.\.(?=[\s;,)'\"]|$)")


def tidy(text: str) -> str:
    """Return ``text`` with one full stop where texts put into one another have left two."""
    return _DOUBLED_STOP.sub(".", text)


class DistCkptError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, in one sentence, with the numbers.
        next_step: What the reader can do about it, in one sentence.
        values: Facts for programs (``path``, ``expected``, ``found``, …); they become attributes.
    """

    id: ClassVar[str] = "error"

    def __init__(self, message: str, *, next_step: str = "", **values: Any) -> None:
        message = tidy(message)
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.values = values

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails. `values` itself may be absent while unpickling.
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.next_step, self.values)

    def __str__(self) -> str:
        if not self.next_step or self.next_step in self.message:  # another error's was put in
            return self.message
        gap = "" if self.message.endswith("\n") else " "
        stop = "" if self.message.endswith((".", "!", "?", ":", "…", "\n")) else "."
        return f"{self.message}{stop}{gap}{self.next_step}"

    def to_json(self) -> dict[str, Any]:
        """Return ``{"id", "message", "next_step", …values}`` with values that JSON can hold."""
        plain = {
            key: value if isinstance(value, str | int | float | bool | None) else _plain(value)
            for key, value in self.values.items()
        }
        return {**plain, "id": self.id, "message": self.message, "next_step": self.next_step}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _fill_errno(error: OSError) -> None:
    # OSError has a slot of that name, which hides the value from DistCkptError.__getattr__.
    error.errno = error.values.get("errno")  # type: ignore[attr-defined]


def _rebuild(
    cls: type[DistCkptError], message: str, next_step: str, values: dict[str, Any]
) -> DistCkptError:
    return cls(message, next_step=next_step, **values)


class UsageError(DistCkptError, ValueError):
    """A call or an option can't be honoured as given."""

    id = "usage"


class UnsupportedValueError(UsageError):
    """A value can't be kept without executing code at load; ``path`` says where it lies."""

    id = "unsupported-value"


class SettingError(UsageError):
    """A setting would lose data, keep nothing, or contradict another one."""

    id = "setting"


class NotFoundError(DistCkptError, FileNotFoundError):
    """No such run, generation or file; ``path`` says what was looked for."""

    id = "not-found"

    def __init__(self, message: str, *, next_step: str = "", **values: Any) -> None:
        super().__init__(message, next_step=next_step, **values)
        _fill_errno(self)


class ForeignFileError(DistCkptError):
    """A file or directory that dist_ckpt didn't write and won't touch."""

    id = "foreign-file"


class CorruptFileError(DistCkptError):
    """Bytes that aren't what they must be; carries ``path``, often ``expected`` and ``found``."""

    id = "corrupt-file"


class DigestMismatchError(CorruptFileError):
    """A digest says that bytes changed after they were written."""

    id = "digest-mismatch"


class FormatVersionError(CorruptFileError):
    """The file's format version isn't one that this version of dist_ckpt reads."""

    id = "format-version"


class SignatureError(CorruptFileError):
    """A signature is required, and this isn't one by a key that is trusted."""

    id = "signature"


class NoUsableGenerationError(DistCkptError):
    """Generations exist, but none of them can be used; ``skipped`` maps each to its reason."""

    id = "no-usable-generation"


class MismatchError(DistCkptError):
    """What was saved doesn't fit; carries ``missing``, ``unexpected`` and ``different``."""

    id = "mismatch"


class IdentityError(DistCkptError):
    """Data, configuration, structure or (strict) code differ; carries ``differences``."""

    id = "identity"


class IncompleteError(DistCkptError):
    """A check could not be completed, so that it says neither yes nor no; ``log`` may tell more."""

    id = "incomplete"


class LockedError(DistCkptError):
    """Another process trains in this run directory; ``holder`` says which."""

    id = "locked"


class StorageError(DistCkptError, OSError):
    """The file system refused; carries ``path``, ``operation`` and the system's ``errno``."""

    id = "storage"

    def __init__(self, message: str, *, next_step: str = "", **values: Any) -> None:
        super().__init__(message, next_step=next_step, **values)
        _fill_errno(self)


class NoSpaceError(StorageError):
    """Not enough room on the file system; carries ``need_bytes`` and ``free_bytes``."""

    id = "no-space"


class JobError(DistCkptError):
    """Something between the ranks of the job."""

    id = "job"


class RankFailedError(JobError):
    """Ranks failed in a phase; ``phase`` and ``failures`` (rank → message) say which."""

    id = "rank-failed"


class RankTimeoutError(JobError):
    """A rank didn't answer in time; carries ``phase``, ``missing`` ranks and ``timeout_secs``."""

    id = "rank-timeout"


class NotRunningError(JobError):
    """There is no live job in the run directory, on this host, that could be asked for anything."""

    id = "not-running"


class SaveFailedError(JobError):
    """A save didn't become a generation (``step``, ``cause``); earlier ones are untouched."""

    id = "save-failed"
