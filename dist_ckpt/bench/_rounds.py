"""One case on all of its ranks: everybody in turn, round by round. Layer 7.

The first round doesn't count. In it the live state is changed the moment a save lets go, and what
comes back is compared with what was there before: a copy that is torn shows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dist_ckpt.bench._contender import (
    Contender,
    drop_cache,
    files_below,
    sync_tree,
    warm_cache,
)
from dist_ckpt.bench._limits import Limits, SmallCopies, pinned_copy_secs
from dist_ckpt.bench._ours import DistCkpt
from dist_ckpt.bench._peers import PEERS
from dist_ckpt.bench._plan import Case, Options
from dist_ckpt.bench._state import TrainingState, build_state

__all__ = ["measure_case"]

_T = TypeVar("_T")

#: One contender's share of a case's time; who needs more makes fewer rounds.
_SHARE = 0.3
#: The saves' share of a case's time; the loads have the rest.
_SAVES_SHARE = 0.6
#: So much of a case's time may pass before the slow ones lose even their one round that counts.
_PATIENCE = 1.5


@dataclass
class _Entrant:
    """A contender and what was measured of it, in seconds."""

    contender: Contender
    correct: str = ""
    error: str | None = None
    stored_bytes: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)
    took: float = 0.0

    def add(self, figure: str, secs: float) -> None:
        self.samples.setdefault(figure, []).append(secs)

    def to_json(self) -> dict[str, Any]:
        return {
            "correct": self.correct,
            "error": self.error,
            "stored_bytes": self.stored_bytes,
            "samples": self.samples,
        }


def measure_case(case: Case, options: Options, folder: Path) -> dict[str, Any]:
    """Return what was measured, the same on every rank; collective."""
    return _Measuring(case, options, folder).run()


class _Measuring:
    def __init__(self, case: Case, options: Options, folder: Path) -> None:
        self._case = case
        self._options = options
        self._repeats = options.repeats
        self._folder = folder
        self._state: TrainingState = build_state(case.state, case.num_bytes)
        self._limits: dict[str, list[float]] = {}
        self._notes: list[str] = []
        self._entrants: list[_Entrant] = []
        self._ends = time.monotonic() + case.secs

    def run(self) -> dict[str, Any]:
        share = self._state.num_bytes // dist.get_world_size()
        limits = Limits(share, self._folder / f"limit_{dist.get_rank()}")
        threads = limits.choose_threads()
        self._enter()
        self._save_rounds(limits)
        self._load_rounds(limits)
        self._leave()
        limits.close()
        if (pinned := pinned_copy_secs(share)) is not None:
            self._limits["cuda pinned"] = [pinned]
        return {
            "bytes": self._state.num_bytes,
            "num_tensors": sum(1 for _, tensor in self._state.tensors() if tensor.dim()),
            "write_threads": threads,
            "torch_threads": torch.get_num_threads(),
            "notes": self._notes,
            "limits": self._limits,
            "contenders": {e.contender.name: e.to_json() for e in self._entrants},
        }

    def _save_rounds(self, limits: Limits) -> None:
        copies = None
        if self._case.state == "small":
            copies = SmallCopies([t for _, t in self._state.tensors() if t.dim()])
        for number in range(self._repeats + 1):
            if number > 1 and self._is_over(_SAVES_SHARE):
                break
            self._limit("memcpy", limits.memcpy(), counts=number > 0)
            self._limit("write", limits.write(), counts=number > 0)
            for name, secs in (copies.measure() if copies else {}).items():
                self._limit(f"small {name}", secs, counts=number > 0)
            for entrant in self._entrants:
                self._turn(entrant, self._save_round, number)

    def _load_rounds(self, limits: Limits) -> None:
        for number in range(self._repeats + 1):
            if number > 1 and self._is_over(1.0):
                break
            self._limit("read warm", limits.read_warm(), counts=number > 0)
            self._limit("read cold", limits.read_cold(), counts=number > 0)
            for entrant in self._entrants:
                self._turn(entrant, self._load_round, number)

    def _enter(self) -> None:
        against = self._options.against
        peers = [make for name, make in PEERS.items() if against is None or name in against]
        for make in (DistCkpt, *peers):
            try:
                self._entrants.append(_Entrant(make(self._state, self._folder)))
            except Exception as error:  # noqa: BLE001 - a library that can't run here is told
                self._note(getattr(make, "name", "?"), "can't be measured", error)

    def _is_over(self, share: float) -> bool:
        left = self._ends - time.monotonic() - (1.0 - share) * self._case.secs
        return _largest(float(left < 0)) > 0

    def _limit(self, name: str, secs: float, *, counts: bool) -> None:
        secs = _largest(secs)  # all ranks wait here: the next limit begins on all at once
        if counts:
            self._limits.setdefault(name, []).append(secs)

    def _turn(self, entrant: _Entrant, work: Callable[[_Entrant, int], None], number: int) -> None:
        """Let one contender make its round, unless it failed or has had its time."""
        if entrant.error is not None:
            return
        is_slow = _largest(entrant.took) > _SHARE * self._case.secs
        if is_slow and (number > 1 or self._is_over(_PATIENCE)):
            return
        began = time.monotonic()
        try:
            work(entrant, number)
        except _FailedError as error:
            entrant.error = str(error)
            self._state.rebuild()
        entrant.took += time.monotonic() - began

    def _save_round(self, entrant: _Entrant, number: int) -> None:
        contender, state = entrant.contender, self._state
        state.nudge(number)
        expected = state.digests() if number == 0 else {}
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        wait, blocked = _together(lambda: (contender.save(number), time.perf_counter() - start))
        if number == 0:
            state.scramble()
        _together(wait)
        if contender.name != DistCkpt.name and dist.get_rank() == 0:
            sync_tree(contender.saved())
        dist.barrier()
        durable = time.perf_counter() - start
        if number:
            entrant.add("blocked", _largest(blocked))
            entrant.add("durable", _largest(durable))
        for name, secs in _together(contender.settle).items():
            if number:
                entrant.add(name, secs)
        if number == 0:
            _together(contender.load)
            entrant.correct = _compare(expected, state.digests())
            state.rebuild()
        entrant.stored_bytes = sum(p.stat().st_size for p in files_below(contender.saved()))

    def _load_round(self, entrant: _Entrant, number: int) -> None:
        contender = entrant.contender
        for figure, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            if dist.get_rank() == 0:
                prepare(contender.saved())
            dist.barrier()
            start = time.perf_counter()
            _together(contender.load)
            secs = _largest(time.perf_counter() - start)
            if number:
                entrant.add(figure, secs)
            if contender.aliases:
                self._state.rebuild()
        if isinstance(contender, DistCkpt):
            start = time.perf_counter()
            _together(contender.verify)
            if number:
                entrant.add("verify", _largest(time.perf_counter() - start))

    def _leave(self) -> None:
        for entrant in self._entrants:
            try:
                entrant.contender.close()
            except Exception as error:  # noqa: BLE001 - what was measured stays measured
                self._note(entrant.contender.name, "didn't end well", error)

    def _note(self, name: str, what: str, error: Exception) -> None:
        self._notes.append(f"{name} {what}: {_first_line(error)}")


class _FailedError(Exception):
    """A contender failed on some rank; all ranks know."""


def _together(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns, once it has on every rank; collective.

    Raises:
        _FailedError: It failed somewhere; on every rank.
    """
    fault, result = "", None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - told in the table
        fault = _first_line(error)
    if _largest(float(bool(fault))):
        raise _FailedError(fault or "it failed on another rank")
    return cast("_T", result)


def _compare(expected: dict[str, str], found: dict[str, str]) -> str:
    """Return ``yes``, or what differs."""
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    if not wrong:
        return "yes"
    kinds = {
        f"{expected[n].split()[0]} became {found[n].split()[0]}"
        for n in wrong
        if expected[n].split()[0] != found[n].split()[0]
    }
    cast = f" ({', '.join(sorted(kinds)).replace('torch.', '')})" if kinds else ""
    return f"no: {len(wrong):,} of {len(expected):,} tensors differ{cast}"


def _largest(number: float) -> float:
    """Return the largest of all ranks' numbers; collective."""
    box = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
