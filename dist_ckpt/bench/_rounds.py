"""One case on all of its ranks: everybody in turn, round by round. Layer 7.

First rounds of saves, one after the other as in training, which doesn't load in between; then
rounds of loads of what each one saved last. The first round of saves doesn't count. In it the live
state is changed the moment a save lets go, and what comes back is compared with what was there
before: a copy that is torn shows. After it is known what a turn costs, and time is divided.

What was measured so far is told before every turn, so that a turn without an end costs no other's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dist_ckpt.bench._attempts import LIMITS
from dist_ckpt.bench._contender import drop_cache, files_below, sync_tree, warm_cache
from dist_ckpt.bench._entrant import (
    Entrant,
    FailedError,
    compare,
    first_line,
    largest,
    meet,
    together,
)
from dist_ckpt.bench._limits import Limits, SmallCopies, pinned_copy_secs
from dist_ckpt.bench._ours import DistCkpt
from dist_ckpt.bench._peers import PEERS
from dist_ckpt.bench._plan import Case, Options
from dist_ckpt.bench._state import TrainingState, build_state
from dist_ckpt.bench._time import choose_peers, too_slow

__all__ = ["Tell", "measure_case"]


#: Of a case's time; what is left is for loads.
_SAVES_SHARE = 0.6

_Figures = dict[str, Callable[[], float]]


class Tell(Protocol):
    """Told, on rank 0 alone, who is on turn and what was measured so far."""

    def __call__(self, on_turn: str, found: dict[str, Any], *, is_all: bool) -> None:
        """Keep it where this process can't lose it."""


def measure_case(case: Case, options: Options, folder: Path, tell: Tell) -> dict[str, Any]:
    """Return what was measured, the same on every rank; collective."""
    return _Measuring(case, options, folder, tell).run()


class _Measuring:
    def __init__(self, case: Case, options: Options, folder: Path, tell: Tell) -> None:
        self._case = case
        self._options = options
        self._folder = folder
        self._tell = tell
        self._began = time.monotonic()
        self._state: TrainingState = build_state(case.state, case.num_bytes)
        share = self._state.num_bytes // dist.get_world_size()
        self._bounds = Limits(share, folder / f"limit_{dist.get_rank()}")
        self._threads = self._bounds.choose_threads()
        self._copies = None
        if case.state == "small":
            self._copies = SmallCopies([t for _, t in self._state.tensors() if t.dim()])
        self._limits: dict[str, list[float]] = {}
        self._limits_secs = 0.0
        self._notes: list[str] = []
        self._entrants: list[Entrant] = []

    def run(self) -> dict[str, Any]:
        self._enter()
        bounds, ends = self._bounds, self._began + self._case.secs
        saving: _Figures = {"memcpy": bounds.memcpy, "write": bounds.write}
        loading: _Figures = {"read warm": bounds.read_warm, "read cold": bounds.read_cold}
        halfway = self._began + _SAVES_SHARE * self._case.secs
        self._rounds(range(self._options.repeats + 1), halfway, saving, self._save)
        self._rounds(range(1, self._options.repeats + 1), ends, loading, self._load)
        self._leave()
        self._bounds.close()
        if (pinned := pinned_copy_secs(self._state.num_bytes)) is not None:
            self._limits["cuda pinned"] = [pinned]
        return self._found()

    def _found(self) -> dict[str, Any]:
        return {
            "bytes": self._state.num_bytes,
            "num_tensors": sum(1 for _, tensor in self._state.tensors() if tensor.dim()),
            "write_threads": self._threads,
            "torch_threads": torch.get_num_threads(),
            "notes": self._notes,
            "limits": self._limits,
            "contenders": {e.contender.name: e.to_json() for e in self._entrants},
        }

    def _enter(self) -> None:
        against, without = self._options.against, self._options.without
        peers = {n: make for n, make in PEERS.items() if against is None or n in against}
        for name, make in {DistCkpt.name: DistCkpt, **peers}.items():
            if name in without:
                continue
            self._say(name)
            try:
                self._entrants.append(Entrant(make(self._state, self._folder)))
            except Exception as error:  # noqa: BLE001 - a library that can't run here is told
                self._note(name, "can't be measured", error)

    def _rounds(
        self,
        numbers: range,
        ends: float,
        limits: _Figures,
        turn: Callable[[Entrant, int], None],
    ) -> None:
        for number in numbers:
            names = self._who(number, ends)
            if names is None:
                break
            self._measure_limits(limits, counts=number > 0)
            for entrant in self._entrants:
                if entrant.contender.name in names:
                    self._turn(entrant, number, turn)

    def _who(self, number: int, ends: float) -> set[str] | None:
        """Return who makes a turn in this round, the same on every rank; None at the end."""
        alive = [e for e in self._entrants if e.takes_part]
        if number <= 1:
            return {e.contender.name for e in alive}
        left = -largest(time.monotonic() - ends)
        costs = {e.contender.name: e.turn_secs for e in alive}
        own = self._limits_secs + costs.pop(DistCkpt.name, 0.0)
        rounds = self._options.repeats - number + 1
        chosen = choose_peers(number, rounds, left, own, costs)
        return None if chosen is None else chosen | {DistCkpt.name}

    def _measure_limits(self, figures: _Figures, *, counts: bool) -> None:
        self._say(LIMITS)
        began = time.monotonic()
        for name, measure in figures.items():
            self._limit(name, measure(), counts=counts)
        copies = self._copies if "memcpy" in figures else None
        for name, secs in (copies.measure() if copies else {}).items():
            self._limit(f"small {name}", secs, counts=counts)
        self._limits_secs = largest(time.monotonic() - began)

    def _limit(self, name: str, secs: float, *, counts: bool) -> None:
        secs = largest(secs)  # all ranks wait here: the next limit begins on all at once
        if counts:
            self._limits.setdefault(name, []).append(secs)

    def _turn(self, entrant: Entrant, number: int, turn: Callable[[Entrant, int], None]) -> None:
        self._say(entrant.contender.name)

        def work(entrant: Entrant) -> None:
            try:
                turn(entrant, number)
            except FailedError:  # on all ranks
                self._state.rebuild()
                raise

        entrant.turn(work)
        if number == 0 and entrant.contender.name != DistCkpt.name:
            entrant.left_out = too_slow(entrant.turn_secs, self._case.secs)

    def _save(self, entrant: Entrant, number: int) -> None:
        contender, state = entrant.contender, self._state
        state.nudge(number)
        expected = state.digests() if number == 0 else {}
        gc.collect()
        meet()
        start = time.perf_counter()
        wait, blocked = together(lambda: (contender.save(number), time.perf_counter() - start))
        if number == 0:
            state.scramble()
        together(wait)
        if contender.name != DistCkpt.name and dist.get_rank() == 0:
            sync_tree(contender.saved())
        meet()
        durable = time.perf_counter() - start
        if number:
            entrant.add("blocked", largest(blocked))
            entrant.add("durable", largest(durable))
        for name, secs in together(contender.settle).items():
            if number:
                entrant.add(name, secs)
        if number == 0:
            together(contender.load)
            entrant.correct = compare(expected, state.digests())
            state.rebuild()
        entrant.stored_bytes = sum(p.stat().st_size for p in files_below(contender.saved()))

    def _load(self, entrant: Entrant, _number: int) -> None:
        contender = entrant.contender
        for figure, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            if dist.get_rank() == 0:
                prepare(contender.saved())
            meet()
            start = time.perf_counter()
            together(contender.load)
            entrant.add(figure, largest(time.perf_counter() - start))
        if isinstance(contender, DistCkpt):
            meet()
            start = time.perf_counter()
            together(contender.verify)
            entrant.add("verify", largest(time.perf_counter() - start))
        if contender.aliases:
            self._state.rebuild()

    def _leave(self) -> None:
        for entrant in self._entrants:
            self._say(entrant.contender.name, is_all=True)
            try:
                entrant.contender.close()
            except Exception as error:  # noqa: BLE001 - what was measured stays measured
                self._note(entrant.contender.name, "didn't end well", error)

    def _say(self, name: str, *, is_all: bool = False) -> None:
        if dist.get_rank() == 0:
            self._tell(name, self._found(), is_all=is_all)

    def _note(self, name: str, what: str, error: Exception) -> None:
        self._notes.append(f"{name} {what}: {first_line(error)}")
