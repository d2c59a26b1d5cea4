"""Killed, or refused a sync, started again, and then a power cut.

What the first process left behind unsynced is still unsynced while the next one works on top of it:
there to be read, and gone after the power cut. So a start has to make durable what it stands on.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dist_ckpt.errors import DistCkptError
from dist_ckpt.storage import use_ops
from helpers.judging import Tally, try_cuts
from helpers.lives import Branch, Life, quiet, train
from helpers.power_cuts import Disk, Search
from helpers.ranks import RankContext, run_ranks
from helpers.recording import Event, Recorder
from helpers.reliability import record_fault

Record = Callable[[str, object], None]

UNTIL, AFTER = 4, 7
SEED = int(os.environ.get("DIST_CKPT_TEST_SEED", "20261130"))


class Mortal(Recorder):
    """Kills its process right after so many operations; they are in a file then."""

    def __init__(self, root: Path, last: int) -> None:
        super().__init__(root)
        self._last = last

    def _add(self, event: Event) -> None:
        super()._add(event)
        if len(self.events) == self._last:
            _keep(self.events, Path(self._root))
            os.kill(os.getpid(), 9)


class Refusing(Recorder):
    """Fails one sync of a directory, the one with this number (from 0), and counts them."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self._number = number
        self.num_syncs = 0

    def fsync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(path) and path.startswith(self._root):
            self.num_syncs += 1
            if self.num_syncs - 1 == self._number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


def _kept(root: Path) -> Path:
    return root.with_name(f"{root.name}.events")


def _keep(events: Sequence[Event], root: Path) -> None:
    _kept(root).write_bytes(pickle.dumps(events))


def body_mortal(ctx: RankContext, root: str, last: int) -> None:
    """Train until the recorder kills this process."""
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    with use_ops(Mortal(Path(root), last)), quiet():
        train(Path(root), UNTIL)


def _killed(root: Path, last: int) -> list[Event]:
    """Return what an attempt did until it was killed after its ``last`` operation."""
    (result,) = run_ranks(1, body_mortal, str(root), last, init=False)
    assert result.returncode == -9, result
    events: list[Event] = pickle.loads(_kept(root).read_bytes())  # noqa: S301 - our own
    assert len(events) == last
    return events


def _refused(root: Path, number: int) -> list[Event]:
    """Return what an attempt did whose n-th sync of a directory failed; it may have told so."""
    recorder = Refusing(root, number)
    try:
        with use_ops(recorder), quiet():
            train(root, UNTIL, deadline_secs=1.0)
    except DistCkptError:
        pass  # the start, or the last save, says so
    assert recorder.num_syncs > number
    return recorder.events


def _course(memory: Path) -> Branch:
    """Return what is true at each step of a run that nothing happens to."""
    branch, folder = Branch(), memory / "course"
    folder.mkdir()
    with quiet():
        train(folder, AFTER, branch)
    return branch


def _calm(root: Path) -> list[Event]:
    root.mkdir()
    recorder = Recorder(root)
    with use_ops(recorder), quiet():
        train(root, UNTIL)
    return recorder.events


def _after(memory: Path, branch: Branch, first: Callable[[Path], list[Event]]) -> tuple[Life, int]:
    """Return the life of ``first`` and the attempt after it, and where that one begins."""
    root = memory / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    life = Life(Disk.read(root), branches=[branch])
    life.events = first(root)
    begin = len(life.events)
    recorder = Recorder(root)
    with use_ops(recorder), quiet():
        train(root, AFTER)
    life.events += recorder.events
    return life, begin


def _try(memory: Path, life: Life, begin: int, sample: int, *, first: bool = False) -> Tally:
    """Cut the power where the later attempt takes away, or writes on, what the first has left."""
    scratch = memory / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    points = [n for n in range(begin, len(life.events)) if _stands_on_more(life.events[n])]
    return try_cuts(life, scratch, Search(SEED, 60, sample, points), stop_at_first=first)


def _try_each(
    memory: Path, branch: Branch, firsts: Mapping[str, Callable[[Path], list[Event]]]
) -> int:
    """Try the cuts after each of these first attempts; return how many states there were."""
    states = 0
    for what, first in firsts.items():
        life, begin = _after(memory, branch, first)
        tally = _try(memory, life, begin, 80)
        assert not tally.faults, f"{what}:\n" + "\n\n".join(tally.faults[:3])
        states += tally.states
    return states


def _stands_on_more(event: Event) -> bool:
    is_retired = event.op == "rename" and "/.tmp-trash-" in event.text
    return is_retired or (
        event.op == "write" and event.text.endswith((".loss.json", ".samples.json"))
    )


def _ends(events: Sequence[Event], op: str, name: str) -> int:
    """Return how many operations there are up to the first such one."""
    return 1 + next(n for n, e in enumerate(events) if e.op == op and e.text.endswith(name))


def _conclude(what: str, states: int, note: Record) -> None:
    """Tell of what was tried, all of it recovered from."""
    note("power_cuts", [states, 0, SEED, what])
    record_fault("Power cut", what, states, "recovered")


MOMENTS = {
    "a generation has its name": ("rename", "/step_000004"),
    "the losses have their bracket": ("write", ".loss.json"),
    "the samples have their bracket": ("write", ".samples.json"),
}


def _without_syncs_of_the_start(life: Life, begin: int) -> Life:
    """Return the same life where the later attempt begins to work without a sync."""
    started = next(
        number
        for number, event in enumerate(life.events)
        if number > begin and b'"attempt_started"' in event.data
    )
    events = [
        event
        for number, event in enumerate(life.events)
        if not (begin <= number < started and event.op == "sync")
    ]
    return replace(life, events=events)


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_attempt_left_is_made_durable_by_the_next(
    moment: str, memory: Path, record_property: Record
) -> None:
    branch = _course(memory)
    last = _ends(_calm(memory / "calm"), *MOMENTS[moment])
    life, begin = _after(memory, branch, partial(_killed, last=last))
    tally = _try(memory, life, begin, 40)
    assert not tally.faults, "\n\n".join(tally.faults[:3])
    worse = _try(memory, _without_syncs_of_the_start(life, begin), begin, 40, first=True)
    assert worse.faults, "the states tried don't need what a start syncs"
    _conclude(f"while the attempt after a SIGKILL works; {moment}", tally.states, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_after_each_operation_then_a_power_cut(
    memory: Path, record_property: Record
) -> None:
    branch = _course(memory)
    lasts = range(1, len(_calm(memory / "calm")) - 3)  # the very last wait for nothing
    firsts = {f"killed after {last}": partial(_killed, last=last) for last in lasts}
    states = _try_each(memory, branch, firsts)
    what = "while the attempt after a SIGKILL at any operation works"
    _conclude(what, states, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_directory_that_could_not_be_synced_then_a_power_cut(
    memory: Path, record_property: Record
) -> None:
    branch = _course(memory)
    (memory / "calm").mkdir()
    recorder = Refusing(memory / "calm", -1)
    with use_ops(recorder), quiet():
        train(memory / "calm", UNTIL)
    numbers = range(recorder.num_syncs)
    firsts = {f"sync {number}": partial(_refused, number=number) for number in numbers}
    states = _try_each(memory, branch, firsts)
    what = "while the attempt after a failed sync of any directory works"
    _conclude(what, states, record_property)
