"""What everybody who saves looks like to the benchmark. Layer 7."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dist_ckpt.bench._state import TrainingState

__all__ = ["Contender", "Wait", "drop_cache", "files_below", "sync_tree", "warm_cache"]

#: Returns once what was saved no longer depends on this process.
Wait = Callable[[], None]


class Contender(Protocol):
    """One way of saving and loading; all methods are called on all ranks."""

    name: str
    #: Loading leaves memory that is mapped from the file: it has to be made anew before the next.
    aliases: bool

    def save(self, number: int) -> Wait:
        """Return once training may change the state, with what waits for the rest."""

    def load(self) -> None:
        """Have the live state hold what was saved last."""

    def saved(self) -> Path:
        """Return the file or directory that the last save wrote."""

    def settle(self) -> dict[str, float]:
        """Return once nothing of the last save goes on, with further figures; not measured."""

    def close(self) -> None:
        """Let go of everything."""


def files_below(path: Path) -> list[Path]:
    """Return the files of a save."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def sync_tree(path: Path) -> None:
    """Every file below ``path`` is on the device, and its name: the same fsync for everybody."""
    directories = {path.parent, *(p.parent for p in files_below(path))}
    for each in [*files_below(path), *sorted(directories)]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_cache(path: Path) -> None:
    """No byte of the files below ``path`` is in the page cache, as far as the kernel listens."""
    for each in files_below(path):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_cache(path: Path) -> None:
    """Every byte of the files below ``path`` is in the page cache.

    Read twice, as the limit is: the kernel moves pages to its active list at their second read.
    """
    buffer = bytearray(1 << 22)
    for each in (*files_below(path), *files_below(path)):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


class Folder:
    """Fresh places for the saves of one contender; the one before goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.newest = folder

    def fresh(self, number: int) -> Path:
        """Return a path that doesn't exist, in a directory that does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.newest = self._folder / f"save_{number}"
        return self.newest

    def forget_older(self) -> None:
        """Remove every save but the newest."""
        for path in self._folder.iterdir():
            if path != self.newest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def state_of(state: TrainingState) -> dict[str, object]:
    """Return the state as scripts hand it to ``torch.save``."""
    return {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
