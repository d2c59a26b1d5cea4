"""Any mixture of training, crashes, rewinds, forks, pins, pruning and undeletes, against a model.

The model knows nothing of files: a run is its generations, its losses and its archive. Every loss
is another number, so that two branches never look alike, and each generation's weight is the loss
of its step.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import dist_ckpt
from dist_ckpt.cli._keep import pin, prune, unpin
from dist_ckpt.cli._life import fork, rewind, undelete
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.lifecycle import hold_open
from dist_ckpt.storage import use_ops
from helpers.crashing import UnsyncedOps, crash

KEEP_LAST = 2
EVERY = 2


@dataclass(frozen=True)
class Point:
    """A generation: its step, its weight, which others its training went through, its losses."""

    step: int
    weight: float
    past: tuple[float, ...]
    losses: tuple[tuple[int, float], ...]


@dataclass
class Model:
    """A run as it should be."""

    points: dict[int, Point] = field(default_factory=dict)
    losses: tuple[tuple[int, float], ...] = ()
    archive: list[Point] = field(default_factory=list)
    pinned: set[float] = field(default_factory=set)

    @property
    def newest(self) -> Point:
        return self.points[max(self.points)]

    def retain(self, newest: int, keep_last: int = KEEP_LAST) -> None:
        counted = [step for step in sorted(self.points) if step <= newest]
        for step in counted[:-keep_last]:
            if self.points[step].weight not in self.pinned:
                del self.points[step]

    def rewind(self, step: int) -> None:
        self.archive += [self.points.pop(later) for later in sorted(self.points) if later > step]
        self.losses = tuple(entry for entry in self.losses if entry[0] <= step)

    def fits(self, point: Point) -> bool:
        if point.step in self.points:
            return False
        later = [step for step in self.points if step > point.step]
        if later:
            return point.weight in self.points[min(later)].past
        return self.newest.weight in point.past

    def undelete(self, point: Point) -> None:
        is_newest = point.step > self.newest.step
        self.archive.remove(point)
        self.points[point.step] = point
        if is_newest and self.losses[: len(point.losses)] != point.losses:
            self.losses = point.losses


class Life(RuleBasedStateMachine):
    """Runs of one family, in a folder of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="life-"))
        self.models: dict[str, Model] = {}
        self.numbers = itertools.count(1)
        self.ops = use_ops(UnsyncedOps())
        self.ops.__enter__()

    def teardown(self) -> None:
        self.ops.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    # What happens

    @initialize()
    def first_training(self) -> None:
        self.models["a"] = Model()
        self.train("a", 5, crash_at=None)

    @rule(data=st.data(), steps=st.integers(1, 5))
    def goes_on(self, data: st.DataObject, steps: int) -> None:
        self.train(self._any_run(data), steps, crash_at=None)

    @rule(data=st.data(), steps=st.integers(1, 5))
    def goes_on_and_crashes(self, data: st.DataObject, steps: int) -> None:
        self.train(self._any_run(data), steps + 1, crash_at=steps)

    @rule(data=st.data(), crash_at=st.none() | st.integers(0, 60))
    def is_rewound(self, data: st.DataObject, crash_at: int | None) -> None:
        name = self._any_run(data)
        model, run = self.models[name], self.folder / name
        step = data.draw(st.sampled_from(sorted(model.points)), "step")
        if crash_at is None:
            rewind(f"{run}@{step}")
        else:
            crash(crash_at, lambda: rewind(f"{run}@{step}"))
            self._settle(run)
            words = [e["event"] for e in read_journal(run) if e["event"].startswith("rew")]
            if words.count("rewound") == getattr(self, "_rewound", {}).get(name, 0):
                return  # it hadn't begun
        self._count_rewinds(name)
        model.rewind(step)

    @rule(data=st.data(), crash_at=st.integers(0, 60))
    def is_forked(self, data: st.DataObject, crash_at: int) -> None:
        if len(self.models) > 3:
            return
        name, new = self._any_run(data), f"b{len(self.models)}"
        model = self.models[name]
        points = [*model.points.values(), *model.archive]
        point = data.draw(st.sampled_from(points), "point")
        address = self._path_of(name, point)
        crash(crash_at, lambda: fork(address, str(self.folder / new)))
        fork(address, str(self.folder / new))
        begun = replace(point, past=())
        self.models[new] = Model({point.step: begun}, point.losses)

    @precondition(lambda self: any(model.archive for model in self.models.values()))
    @rule(data=st.data(), crash_at=st.integers(0, 60))
    def is_brought_back(self, data: st.DataObject, crash_at: int) -> None:
        names = [name for name, model in self.models.items() if model.archive]
        name = data.draw(st.sampled_from(names), "run")
        model, run = self.models[name], self.folder / name
        point = data.draw(st.sampled_from(model.archive), "point")
        what = Path(self._path_of(name, point))
        if not model.fits(point):
            with pytest.raises(UsageError):
                undelete(str(run), str(what))
            return
        crash(crash_at, lambda: undelete(str(run), str(what)))
        if what.exists():
            undelete(str(run), str(what))
        model.undelete(point)

    @rule(data=st.data(), keep_last=st.integers(1, 2), crash_at=st.integers(0, 30))
    def is_pruned(self, data: st.DataObject, keep_last: int, crash_at: int) -> None:
        name = self._any_run(data)
        run = str(self.folder / name)
        crash(crash_at, lambda: prune(run, keep_last=str(keep_last)))
        prune(run, keep_last=str(keep_last))
        self.models[name].retain(self.models[name].newest.step, keep_last)

    @rule(data=st.data(), on=st.booleans())
    def is_pinned(self, data: st.DataObject, on: bool) -> None:
        name = self._any_run(data)
        model = self.models[name]
        point = model.points[data.draw(st.sampled_from(sorted(model.points)), "step")]
        if on:
            pin(f"{self.folder / name}@{point.step}", reason=str(point.weight))
            model.pinned.add(point.weight)
        else:
            unpin(f"{self.folder / name}@{point.step}")
            model.pinned.discard(point.weight)

    # What must hold

    @invariant()
    def each_run_is_as_the_model_says(self) -> None:
        for name, model in self.models.items():
            run = self.folder / name
            store = GenerationStore(run)
            assert store.steps() == sorted(model.points)
            assert tuple(read_loss(run)) == model.losses
            for step, point in model.points.items():
                assert _weight(run, step) == point.weight
            archived = sorted(_weight_of(store.archive / home, step) for home, step in _all(store))
            assert archived == sorted(point.weight for point in model.archive)
            pins = {step for step, point in model.points.items() if point.weight in model.pinned}
            assert set(store.pins()) == pins
            assert [path.name for path in store.directory.iterdir() if ".tmp" in path.name] == []

    # How

    def train(self, name: str, steps: int, *, crash_at: int | None) -> None:
        model, run = self.models[name], self.folder / name
        start = model.newest if model.points else None
        first = start.step if start else 0
        if start:
            model.retain(start.step)
        new: dict[int, float] = {}
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        with (
            contextlib.suppress(ZeroDivisionError),
            dist_ckpt.Checkpointer(
                run, model=net, optimizer=optimizer, every=EVERY, keep_last=KEEP_LAST
            ) as ckpt,
        ):
            assert ckpt.step == first
            assert start is None or float(net.weight.detach()) == start.weight
            for step in ckpt.steps(first + steps):
                if crash_at is not None and step == first + crash_at:
                    raise ZeroDivisionError
                net.weight.grad = torch.ones(1, 1)
                optimizer.step()
                number = float(next(self.numbers))
                net.weight.data.fill_(number)
                ckpt.record(loss=number)
                new[step] = number
        past = (*start.past, start.weight) if start else ()
        # From the first new loss on, what was logged before and lost doesn't count any more.
        losses = model.losses
        for step, number in new.items():
            losses = (*(entry for entry in losses if entry[0] < step), (step, number))
            model.losses = losses
            is_last = crash_at is None and step == first + steps
            if step % EVERY == 0 or is_last:
                model.points[step] = Point(step, number, past, losses)
                past = (*past, number)
                model.retain(step)

    def _any_run(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.models)), "run")

    def _settle(self, run: Path) -> None:
        """Do what the next start would do first."""
        with hold_open(run, "test"):
            pass

    def _count_rewinds(self, name: str) -> None:
        counts: dict[str, int] = getattr(self, "_rewound", {})
        events = read_journal(self.folder / name)
        counts[name] = sum(event["event"] == "rewound" for event in events)
        self._rewound = counts

    def _path_of(self, name: str, point: Point) -> str:
        store = GenerationStore(self.folder / name)
        if self.models[name].points.get(point.step) is point:
            return str(store.path(point.step))
        for home, step in store.archived():
            path = store.archive / home / f"step_{step:06d}"
            if step == point.step and _weight_of(path.parent, step) == point.weight:
                return str(path)
        raise AssertionError(f"{point} was lost")


def _all(store: GenerationStore) -> list[tuple[str, int]]:
    return store.archived()


def _weight(run: Path, step: int) -> float:
    return float(dist_ckpt.read_bin(run / f"step_{step:06d}.bin").weights[0])


def _weight_of(home: Path, step: int) -> float:
    shard = home / f"step_{step:06d}" / "rank_00000.shard"
    return float(dist_ckpt.read_bin(shard).weights[0])


def _play(max_examples: int, steps: int) -> None:
    options: dict[str, Any] = {
        "max_examples": max_examples,
        "stateful_step_count": steps,
        "deadline": None,
        "suppress_health_check": list(HealthCheck),
        "database": None,
    }
    run_state_machine_as_test(Life, settings=settings(**options))


def test_runs_stay_as_a_model_says_whatever_happens_to_them() -> None:
    """Case 52, and its kind: rewinds by few and by many steps, chained, across forks."""
    _play(8, 12)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_runs_stay_as_a_model_says_for_long(part: int) -> None:
    """Case 52: the same, for longer."""
    _play(20, 20)
