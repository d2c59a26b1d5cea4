"""A run directory as a scenario finds it: a copy of what another left. I/O through ``storage``."""

from __future__ import annotations

from pathlib import Path

from dist_ckpt import storage

__all__ = ["copy_run"]

_LIMIT_BYTES = 1 << 40
_NOT_COPIED = ("run.lock", "archive", "request.json")


def copy_run(source: Path, target: Path) -> None:
    """``target`` is a run directory like ``source``; generations share their bytes by links.

    Files of a generation never change, so that a link is as good as a copy; what is appended to is
    copied.

    Raises:
        StorageError: ``target`` exists, or the system refused.
    """
    storage.make_dir(target)
    for name in storage.list_names(source):
        if name in _NOT_COPIED or name.startswith(".tmp"):
            continue
        here, there = source / name, target / name
        if storage.is_dir(here):
            _link_tree(here, there)
        elif name.endswith(".bin"):
            storage.link_or_copy(here, there)
        else:
            data = storage.read_file(here, limit_bytes=_LIMIT_BYTES)
            storage.write_durable(there, data, mode=0o600)


def _link_tree(source: Path, target: Path) -> None:
    storage.make_dir(target)
    for name in storage.list_names(source):
        if name.startswith(".tmp"):
            continue
        here, there = source / name, target / name
        if storage.is_dir(here):
            _link_tree(here, there)
        else:
            storage.link_or_copy(here, there)
