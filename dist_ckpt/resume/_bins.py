"""A .bin to begin from where no generation is left. Layer 5, reads only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import parse_step_name
from dist_ckpt.errors import DistCkptError
from dist_ckpt.export import check_sum, read_header
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.wording import dist_ckpt_command

__all__ = ["advise_import", "find_bin"]


def find_bin(store: StoredGenerations) -> Path | None:
    """Return the .bin of the highest step in a run directory that is whole, None without one.

    Whole by its header and length, and by its sum where there is one. Reads all of the file then.
    """
    names = storage.list_names(store.run_dir) if storage.exists(store.run_dir) else []
    steps = {parse_step_name(name): name for name in names if name.endswith(".bin")}
    for step in sorted((step for step in steps if step is not None), reverse=True):
        path = store.run_dir / steps[step]
        with suppress(DistCkptError):
            read_header(path)
            check_sum(path)
            return path
    return None


def advise_import(store: StoredGenerations) -> str | None:
    """Return what to do with the newest whole .bin of a run directory, None without one."""
    found = find_bin(store)
    if found is None:
        return None
    return (
        f"{found} is whole: `{dist_ckpt_command('import', found, 'NEW_RUN', '--', 'COMMAND')}` "
        "starts a new run from its weights and moments."
    )
