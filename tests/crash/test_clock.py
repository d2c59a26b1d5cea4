"""The wall clock stepped back and forth: it orders nothing and limits nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from helpers import sweeping
from helpers.reliability import record_fault
from helpers.run_dirs import call
from helpers.sweeping import attempt

DAY = 86_400.0


class SteppedClock:
    """A wall clock that somebody sets at each third look, by up to years, also to before 1970."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._true = time.time
        self._offset = 0.0
        self._looks = 0
        self.steps = 0

    def __call__(self) -> float:
        self._looks += 1
        if self._looks % 3 == 0:
            self.steps += 1
            self._offset = self._dice.choice(
                (0.0, -1.0, DAY, -400 * DAY, 4000 * DAY, -self._true())
            )
        return self._true() + self._offset


def test_a_clock_that_is_set_back_and_forth_orders_nothing_and_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 7: points are chosen and retired by their steps, waits end by another clock."""
    whole = attempt(tmp_path / "whole/run", until=30, keep_last=2)
    run = tmp_path / "stepped/run"
    clock = SteppedClock(7)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", clock)
        for until in (6, 13, 20, 27, 30):
            result = attempt(run, until=until, keep_last=2)
            assert result.error is None
            store = GenerationStore(run)
            newest = [until - 1, until] if until % 2 else [until - 2, until]
            assert store.steps() == newest
            assert all(store.verified_at(step) is not None for step in newest)
            for command in ("ls", "status", "show", "verify", "loss"):
                called = call(command, run)
                assert called.status == 0, (command, called.err)
    assert clock.steps > 30
    times = [event["time"] for event in read_journal(run)]
    assert times != sorted(times), "the clock wasn't stepped"
    assert result.weights == whole.weights
    assert [step for step, _ in read_loss(run)] == list(range(1, 31))
    resumed = [event["step"] for event in read_journal(run) if event["event"] == "resumed"]
    assert resumed == [6, 13, 20, 27]
    assert sweeping.attempt(run, until=30).steps == []
    record_fault("Clock", "set back and forth by up to years", clock.steps, "changes no decision")
