"""What lies at a path: a run, one generation, or something else. Layer 6, reads names only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from dist_ckpt import storage
from dist_ckpt.canonical import HEADER_BYTES, parse_header
from dist_ckpt.errors import DistCkptError, ForeignFileError, NotFoundError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.history import history_path, run_name
from dist_ckpt.resume_point import RESUME_POINT_NAME

__all__ = [
    "EXPORT_KEY",
    "LOCK_FILE",
    "RUN_FILE",
    "holds_format",
    "is_bin",
    "is_generation",
    "is_run",
    "journal_path",
    "read_run_file",
    "refuse_export",
    "require_directory",
    "require_no_file",
    "runs_below",
]

RUN_FILE: Final = "run.json"
LOCK_FILE: Final = "run.lock"
#: Key of a safetensors file's metadata with which an export says what it is.
EXPORT_KEY: Final = "dist_ckpt"

_RANK_FILE: Final = re.compile(r"rank_\d{5,10}\.(shard|state)")
_HEADER_LIMIT_BYTES: Final = 1 << 26
_RUN_FILE_LIMIT_BYTES: Final = 1 << 20


def holds_format(directory: Path) -> bool:
    """Return whether a directory holds a file that only a generation has.

    ``.snapshot_metadata`` alone doesn't count: torchsnapshot's own snapshots have it, too.
    """
    return any(
        name == RESUME_POINT_NAME or _RANK_FILE.fullmatch(name)
        for name in storage.list_names(directory)
    )


def is_generation(path: Path) -> bool:
    """Return whether ``path`` leads to a directory with files of a generation, whole or not."""
    return storage.is_dir(path) and holds_format(path)


def is_run(path: Path) -> bool:
    """Return whether a directory is a run's: it has its files, or a generation in checkpoints/."""
    names = storage.list_names(path)
    if RUN_FILE in names or any(name.endswith((".journal.jsonl", ".loss.json")) for name in names):
        return True
    store = StoredGenerations(path)
    return any(is_generation(store.path(step)) for step in store.steps())


def runs_below(directory: Path) -> list[Path]:
    """Return the runs right below a directory, in the order of their names."""
    try:
        children = [directory / name for name in sorted(storage.list_names(directory))]
        return [child for child in children if storage.is_dir(child) and is_run(child)]
    except DistCkptError:
        return []


def require_directory(path: Path) -> None:
    """Return if ``path`` leads to a directory.

    Raises:
        NotFoundError: Nothing is there.
        ForeignFileError: A file; where it is an export, the message says what it is good for.
    """
    if storage.is_dir(path):
        return
    if not storage.exists(path):
        raise NotFoundError(
            f"There is no {path}.",
            next_step="Give the path of a run directory, the one that Checkpointer was given.",
            path=str(path),
        )
    raise ForeignFileError(
        f"{path} is {_kind_of_file(path)}, not a run directory.",
        next_step="Training goes on from a run directory; name that.",
        path=str(path),
    )


def is_bin(path: Path) -> bool:
    """Return whether a path leads to a .bin: by its name, else by its header and size."""
    if not storage.exists(path) or storage.is_dir(path):
        return False
    if path.name.endswith(".bin"):
        return True
    try:
        size = storage.file_size(path)
        parse_header(_read_range(path, 0, HEADER_BYTES), file_size=size, path=path)
    except (DistCkptError, OSError):
        return False
    return True


def require_no_file(path: Path) -> None:
    """Return unless ``path`` leads to a file, where a .bin was possible too.

    Raises:
        ForeignFileError: It does; the message says what would be taken.
    """
    if storage.exists(path) and not storage.is_dir(path):
        raise ForeignFileError(
            f"{path} is {_kind_of_file(path)}, neither a run directory nor a .bin.",
            next_step="Name a run directory, a generation, or a .bin: its size is 8 + 12 times the "
            "parameters that its header says.",
            path=str(path),
        )


def refuse_export(path: Path) -> None:
    """Return unless ``path`` leads to a safetensors file.

    Raises:
        ForeignFileError: It does; the message says what it is good for.
    """
    if path.name.endswith(".safetensors") and storage.exists(path):
        raise ForeignFileError(
            f"{path} is {_kind_of_safetensors(path)}, not a .bin.",
            next_step="Import a step_N.bin, or train on from the run directory.",
            path=str(path),
        )


def _kind_of_file(path: Path) -> str:
    if path.name.endswith(".safetensors"):
        return _kind_of_safetensors(path)
    return "a single file of weights and moments" if is_bin(path) else "a file"


def _kind_of_safetensors(path: Path) -> str:
    """Case 20: an export for inference is refused by what it says of itself."""
    plain = "a safetensors file (no resume point: optimizer, data and random state aren't in it)"
    try:
        metadata = _safetensors_metadata(path)
    except (DistCkptError, OSError, ValueError):
        return plain
    if not isinstance(metadata, dict) or EXPORT_KEY not in metadata:
        return plain
    return (
        f"an export of step {metadata.get('step')} of {metadata.get('run')} "
        f"({metadata[EXPORT_KEY]})"
    )


def _safetensors_metadata(path: Path) -> Any:
    size = storage.file_size(path)
    length = int.from_bytes(_read_range(path, 0, 8), "little")
    if length > min(size - 8, _HEADER_LIMIT_BYTES):
        return None
    header = json.loads(_read_range(path, 8, length))
    return header.get("__metadata__") if isinstance(header, dict) else None


def _read_range(path: Path, start: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    segment = storage.Segment(start, memoryview(buffer), num_bytes)
    storage.read_segments(path, [segment], None, threads=1)
    return bytes(buffer)


def read_run_file(run_dir: Path) -> dict[str, Any] | None:
    """Return what ``run.json`` says of the newest attempt; None where it says nothing."""
    try:
        data = storage.read_file(run_dir / RUN_FILE, limit_bytes=_RUN_FILE_LIMIT_BYTES)
        facts = json.loads(data)
    except (DistCkptError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def journal_path(run_dir: Path) -> Path:
    """Return where the run's journal lies or would lie."""
    return Path(history_path(run_dir, run_name(run_dir), "journal"))
