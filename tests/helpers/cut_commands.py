"""Commands of a run's life under a power cut: run again, or trained on, as a user would.

A command is recorded once on a trained run. `judge_command` says what is wrong with a state that a
power cut may have left of it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt.errors import DistCkptError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_loss
from dist_ckpt.storage import use_ops
from helpers.judging import Tally
from helpers.lives import NAME, Branch, quiet, train
from helpers.memory import rarely_collected
from helpers.power_cuts import Cut, Disk, Search, each_cut
from helpers.recording import Event, Recorder

LAST = 6
STEPS = (2, 4, 6)


@dataclass(frozen=True)
class Command:
    """What is done to a run, and what must hold.

    Attributes:
        call: Do it; below the directory that is given. Whoever was cut off calls it again.
        keeps: Steps of the run's generations that are never lost.
        done: Raises where it isn't done as a whole; looks, and changes nothing.
        go_on: Trains on in what a cut has left, without calling it again; raises where that isn't
            what it must be.
        prepare: Done before, after a training to `LAST`.
    """

    call: Callable[[Path], object]
    keeps: frozenset[int]
    done: Callable[[Path], None]
    go_on: Callable[[Path, Branch], None]
    prepare: Callable[[Path], object] = lambda _root: None


@dataclass(frozen=True)
class Recorded:
    """A command as it was once carried out; ``events`` end with a mark: it has returned."""

    command: Command
    start: Disk
    branch: Branch
    events: list[Event]


def record_command(command: Command, root: Path) -> Recorded:
    """Return the record of a command on a run that was trained below ``root``, an empty directory.

    States must be laid out at ``root`` again: paths stand in some files.
    """
    branch = Branch()
    with quiet():
        train(root, LAST, branch, keep_last=None)
        command.prepare(root)
        start, recorder = Disk.read(root), Recorder(root)
        with use_ops(recorder):
            command.call(root)
        command.done(root)
    return Recorded(command, start, branch, [*recorder.events, Event("mark", text="it returned")])


def try_command(
    recorded: Recorded, root: Path, search: Search, *, stop_at_first: bool = False
) -> Tally:
    """Return the tally over all instants of a command.

    Args:
        recorded: What was recorded below ``root``.
        root: Laid out anew for each state.
        search: Which states are tried.
        stop_at_first: Return at the first fault.
    """
    tally = Tally()

    def told(event: Event) -> bool:
        return event.op == "mark"

    for cut in rarely_collected(each_cut(recorded.start, recorded.events, search, told)):
        tally.states += 1
        try:
            with quiet():
                judge_command(cut, recorded, root)
        except Exception as error:  # noqa: BLE001 - a finding
            tally.faults.append(f"{cut}: {type(error).__name__}: {error}")
            if stop_at_first or len(tally.faults) > 20:
                break
    return tally


def judge_command(cut: Cut, recorded: Recorded, root: Path) -> None:
    """Raise where this state isn't one that a user can go on from, with nothing lost."""
    command = recorded.command
    shutil.rmtree(root)
    root.mkdir()
    cut.state.lay(root)
    check_nothing_lost(root / NAME, command.keeps)
    if cut.told:
        command.done(root)
    choice = cut.fingerprint[5] % 8
    if choice < 5:
        command.call(root)
        command.done(root)
    if choice > 3:
        command.go_on(root, recorded.branch)
        check_nothing_lost(root / NAME, command.keeps)


def check_nothing_lost(run_dir: Path, keeps: Collection[int]) -> None:
    """Raise where a generation isn't whole or isn't there any more, in its place or in archive/."""
    store = GenerationStore(run_dir)
    for step in store.steps():
        store.verify(store.manifest(step))
    found = {*store.steps(), *(step for _, step in store.archived())}
    assert found >= set(keeps), f"only {sorted(found)} of {sorted(keeps)} are left"


def resume(
    root: Path, branch: Branch, steps: Collection[int], name: str = NAME, **settings: Any
) -> int:
    """Start a run and return where it resumed: at one of ``steps``, with state and losses as then.

    0: it began anew.
    """
    ckpt = train(root, 0, name=name, **{"keep_last": None, **settings})
    step = ckpt.resumed.step if ckpt.resumed else 0
    assert step in steps, f"{name} resumed from {step} and not one of {sorted(steps)}"
    assert ckpt.final == branch.states[step], f"{name} has another state at {step}"  # type: ignore[attr-defined]
    told = dict(read_loss(root / name))
    for at, loss in branch.losses.items():
        assert at > step or told.get(at) == loss, f"{name} has lost the loss of step {at}: {told}"
    assert told.items() <= branch.losses.items(), f"{name} has losses that never were: {told}"
    return step


def check_run(run_dir: Path, steps: Collection[int], losses: int) -> None:
    """Raise where a run has other generations, not whole ones, or another number of losses."""
    store = GenerationStore(run_dir)
    assert store.steps() == sorted(steps), f"{run_dir.name} has {store.steps()}"
    for step in store.steps():
        store.verify(store.manifest(step))
    found = [step for step, _ in read_loss(run_dir)]
    assert found == list(range(1, losses + 1)), f"{run_dir.name} has losses of {found}"


def is_refused(root: Path, name: str) -> bool:
    """Return whether a training in this directory is refused before it changes anything."""
    before = sorted((root / name).rglob("*"))
    try:
        train(root, 0, name=name, keep_last=None)
    except DistCkptError as error:
        return bool(error.next_step) and before == sorted((root / name).rglob("*"))
    raise AssertionError(f"it trains in {name}, where there was only {before}")


def confirmation(folder: Path) -> dict[str, Any] | None:
    """Return what a shipment confirms, None where it doesn't."""
    path = folder / "confirmation.json"
    return json.loads(path.read_bytes()) if path.exists() else None


# Killed, called again, and then the power goes ----------------------------------------------------


class Killed(Recorder):
    """A recorder whose process is killed right after so many operations; they are told before."""

    def __init__(self, root: Path, told: Path, after: int) -> None:
        super().__init__(root)
        self._told = told
        self._after = after

    def _add(self, event: Event) -> None:
        super()._add(event)
        if len(self.events) == self._after:
            self._told.write_bytes(pickle.dumps(self.events))
            os.kill(os.getpid(), signal.SIGKILL)


class Killing:
    """A command on a trained run that is killed somewhere, given again, and recorded as a whole.

    Args:
        command: Which.
        root: An empty directory in memory.

    Attributes:
        before: The disk before the command.
        events: Of a call that nobody kills.
    """

    def __init__(self, command: Command, root: Path) -> None:
        self._command = command
        self._root = root
        self._branch = Branch()
        with quiet():
            train(root, LAST, self._branch, keep_last=None)
            command.prepare(root)
        self.before = Disk.read(root)
        recorder = Recorder(root)
        with use_ops(recorder), quiet():
            command.call(root)
        self.events = recorder.events

    def record(self, after: int, then: Callable[[Path], object] | None = None) -> Recorded | None:
        """Return both calls as one, the first killed after an operation; None if it ended before.

        ``then`` is called in the place of the second; it needn't find anything to do. What the
        first left pending is still pending: its process is gone, the kernel isn't.
        """
        shutil.rmtree(self._root)
        self._root.mkdir()
        self.before.lay(self._root)
        start, told = Disk.read(self._root), self._root.with_name("events")
        told.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                with use_ops(Killed(self._root, told, after)), quiet():
                    self._command.call(self._root)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            assert not told.exists()
            return None
        first: list[Event] = pickle.loads(told.read_bytes())  # noqa: S301 - our own
        assert len(first) == after
        recorder = Recorder(self._root)
        with use_ops(recorder), quiet():
            (then or self._command.call)(self._root)
        events = [*first, *recorder.events]
        if then is None or self._is_done():
            self._command.done(self._root)
            events.append(Event("mark", text="it returned"))
        return Recorded(self._command, start, self._branch, events)

    def _is_done(self) -> bool:
        try:
            self._command.done(self._root)
        except AssertionError:
            return False
        return True
