"""What a killed process left pending, made durable before anybody goes on from it. Layer 5, I/O.

A process that is killed between a change and its sync leaves one that everybody sees and that a
power cut takes back. Whoever finds the change done, does not do it again and builds on it has to
sync it first: else the first step may be lost, and what followed from it kept.
"""

from __future__ import annotations

from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.generations import StoredGenerations

__all__ = ["settle"]


def settle(run_dir: Path) -> None:
    """The names of a run are durable as they are found: generations, the archive, small files.

    Files have theirs only once their bytes are durable; those that grow are synced when opened.

    Raises:
        NotFoundError: No such directory.
        StorageError: The system refused.
    """
    store = StoredGenerations(run_dir)
    # The archive first: while something is moved there, its old name must not go before.
    for home in _homes(store.archive):
        storage.sync_dir(home, pass_over_others=True)
    for directory in (store.archive, store.directory, run_dir):
        if storage.is_dir(directory):
            storage.sync_dir(directory)
    storage.sync_names(run_dir)


def _homes(archive: Path) -> list[Path]:
    names = storage.list_names(archive) if storage.is_dir(archive) else []
    return [archive / name for name in names if storage.is_dir(archive / name)]
