"""The runs that a server shows, by name, and what was read of them last. Layer 7, reads only.

A name in an address is looked up among these runs; it never becomes part of a path.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, ForeignFileError, NotFoundError
from dist_ckpt.history import FollowedHistory, FollowedLosses, history_path
from dist_ckpt.report._gather import later_of, now_of, story_of
from dist_ckpt.report._page import json_text
from dist_ckpt.runs import Run, Status, label_runs, open_run, read_status

__all__ = ["Catalog", "Watched"]

#: However many browsers ask, a run is read once in so long.
_FRESH_SECS = 1.0
#: A run that nobody trains is read again only when one of its files has changed; or after so long,
#: for what no stamp tells: the room on the disk, a file that is missing from a generation.
_STILL_SECS = 300.0


@dataclass(frozen=True, slots=True)
class View:
    """What a run looked like at one moment.

    Attributes:
        now: How it is.
        story: What happened.
        token: Names this story: the same as long as nothing else happened.
        file: Names the loss file; another once it was replaced.
        losses: The loss file.
        is_still: Nobody trains it: until a file changes, it only becomes older.
    """

    now: dict[str, Any]
    story: dict[str, Any]
    token: str
    file: str
    losses: FollowedLosses
    is_still: bool


class Watched:
    """One run that is watched; any thread."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self._lock = threading.Lock()
        self._view: View | None = None
        self._read_at = 0.0
        self._stamps: tuple[object, ...] = ()
        self._state: object = None
        self._all_read_at = 0.0
        self._history: FollowedHistory | None = None
        self._history_from = 0.0

    def view(self) -> View:
        """Return what the run looks like, at most a second ago.

        Raises:
            DistCkptError: It can't be read (any more).
        """
        with self._lock:
            if self._view is None or time.monotonic() - self._read_at >= _FRESH_SECS:
                self._view = self._look(self._view)
                self._read_at = time.monotonic()
            return self._view

    def _look(self, before: View | None) -> View:
        run = self.run
        # Before anything is read: what is appended meanwhile has another stamp at the next look.
        # Listing thousands of generations takes half a second; each change of one is journalled.
        began = time.monotonic()
        loss = self._stamp("loss")
        stamps = (self._stamp("journal"), self._stamp("samples"), self._others(), loss)
        is_new = began - self._all_read_at < _STILL_SECS
        if before is not None and before.is_still and stamps == self._stamps and is_new:
            return replace(before, now=later_of(before.now))
        if self._history is None or began - self._history_from >= _STILL_SECS:
            # What was changed in the middle of a file, too, is seen then.
            self._history, self._history_from = FollowedHistory(run.store.run_dir), began
        history = self._history
        status = read_status(run, history)
        journal = history.journal()
        now = now_of(status, journal)
        state = now["state"]
        if before is None or stamps[:-1] != self._stamps[:-1] or state != self._state:
            story = story_of(run, status, journal)
            token = hashlib.sha256(json_text(story).encode()).hexdigest()[:16]
        else:
            story, token = before.story, before.token
        view = View(
            now=now,
            story=story,
            token=token,
            file=loss[0],
            losses=history.losses(),
            is_still=_is_still(status),
        )
        # Last: where a file couldn't be read, the next look tells all of it.
        self._stamps, self._state, self._all_read_at = stamps, state, began
        if view.is_still:
            self._history = None  # it may be looked at for weeks
        return view

    def _stamp(self, what: str) -> tuple[str, int, int]:
        return _stamp(Path(history_path(self.run.store.run_dir, self.run.name, what)))

    def _others(self) -> tuple[object, ...]:
        directory = self.run.store.run_dir
        sidecars = [f"{self.run.name}.{what}.json" for what in ("state", "policy")]
        names = ("checkpoints", "archive", "pins.json", "run.json", "run.lock", *sidecars)
        return tuple(_stamp(directory / name) for name in names)


class Catalog:
    """The runs below some directories; new ones show up by themselves.

    Args:
        places: Run directories, and directories of run directories.

    Raises:
        NotFoundError: A place isn't there.
        ForeignFileError: A place is a file, or one generation.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = list(places)
        self._watched: dict[Path, Watched] = {}
        self._lock = threading.Lock()
        for place in self._places:
            _check(place)

    def runs(self) -> dict[str, Watched]:
        """Return label → run: its name, or its directory's where several have that name."""
        with self._lock:
            places = [child for place in self._places for child in _directories(place)]
            opened = [(directory, run) for directory in places if (run := _open(directory))]
            found: dict[str, Watched] = {}
            for (directory, run), name in zip(
                opened, label_runs([run for _, run in opened]), strict=True
            ):
                known = self._watched.get(directory)
                if known is None or known.name != name:
                    known = self._watched[directory] = Watched(name, run)
                found[name] = known
            # What is gone takes what was read of it along.
            self._watched = {directory: self._watched[directory] for directory, _ in opened}
            return found

    def get(self, name: str) -> Watched:
        """Return the run of a name.

        Raises:
            NotFoundError: There is none.
        """
        runs = self.runs()
        if name not in runs:
            raise NotFoundError(f"There is no run {name!r}.", next_step="/ lists them.", name=name)
        return runs[name]


def _directories(place: Path) -> list[Path]:
    """Return a run directory itself, or those right below a directory; no link leads out of it."""
    if _open(place) is not None:
        return [place]
    try:
        children = [place / name for name in sorted(storage.list_names(place))]
        return [child for child in children if _is_own_directory(child)]
    except DistCkptError:
        return []


def _is_own_directory(path: Path) -> bool:
    return storage.is_dir(path) and not path.is_symlink()


def _open(directory: Path) -> Run | None:
    try:
        run = open_run(directory)
    except DistCkptError:
        return None
    return None if run.is_single else run


def _check(place: Path) -> None:
    if not storage.exists(place):
        raise NotFoundError(
            f"There is no {place}.",
            next_step="Give run directories, or a directory that holds some.",
            path=str(place),
        )
    if not storage.is_dir(place) or _is_single(place):
        raise ForeignFileError(
            f"{place} is no run directory and no directory of them.",
            next_step="Give the directory that Checkpointer was given, or its parent.",
            path=str(place),
        )


def _is_single(place: Path) -> bool:
    """Return whether a place is one generation, which has no history of its own."""
    try:
        return open_run(place).is_single
    except DistCkptError:
        return False


def _is_still(status: Status) -> bool:
    """Return whether nobody trains the run, and nobody holds its lock for another reason."""
    free = any(one.what == "lock" and one.alive is False for one in status.liveness.evidence)
    return free and not status.is_alive


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = storage.lstat(path)
    except DistCkptError:
        return "none", 0, 0
    return f"{status.st_ino:x}", status.st_size, status.st_mtime_ns
