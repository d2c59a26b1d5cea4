"""This project among the contenders, by its public interface. Layer 7."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_ckpt.bench._contender import Wait
from dist_ckpt.bench._state import TrainingState
from dist_ckpt.errors import IncompleteError
from dist_ckpt.runs import open_run
from dist_ckpt.service import Checkpointer

__all__ = ["DistCkpt"]

_POLL_SECS = 0.001
_LIMIT_SECS = 300.0
_ENDS = ("exported", "export_failed")


class DistCkpt:
    """A training loop that saves at every boundary and is held between two bodies."""

    name = "dist_ckpt"
    aliases = False

    def __init__(self, state: TrainingState, folder: Path) -> None:
        self._state = state
        self._run = folder / "ours"
        self._journal = _JournalTail(self._run)
        self._ckpt = Checkpointer(
            self._run,
            model=state.model,
            optimizer=state.optimizer,
            every=1,
            keep_last=1,
            signals=(),
            timeout_secs=_LIMIT_SECS,
        )
        self._ckpt.__enter__()
        self._steps = self._ckpt.steps(until=1 << 30)
        self._step = next(self._steps)

    def save(self, number: int) -> Wait:
        """The boundary of a step is passed: its state is copied."""
        del number
        step, self._step = self._step, next(self._steps)
        self._saved_step = step

        def wait() -> None:
            self._wait("saved")

        return wait

    def load(self) -> None:
        """Every byte is read into the live tensors and compared with its digest."""
        generation = open_run(self._run).generation(self._saved_step)
        generation.load_into(model=self._state.model, optimizer=self._state.optimizer)

    def verify(self) -> None:
        """Every byte is read back past the page cache and compared."""
        open_run(self._run).generation(self._saved_step).verify()

    def saved(self) -> Path:
        """Return the directory of the generation."""
        return self._run / "checkpoints" / f"step_{self._saved_step:06d}"

    def settle(self) -> dict[str, float]:
        """Return what reading back and the export took, which no training waits for."""
        events = self._wait(*_ENDS)
        times = {e["event"]: e["time"] for e in events if e["step"] == self._saved_step}
        return {
            "verified": times["verified"] - times["saved"],
            "exported": times.get("exported", times["verified"]) - times["verified"],
        }

    def close(self) -> None:
        """Leave the loop as by ``break``: no further checkpoint."""
        self._steps.close()  # type: ignore[attr-defined]
        self._ckpt.__exit__(None, None, None)

    def _wait(self, *events: str) -> list[Mapping[str, Any]]:
        """Return the journal, once it has one of ``events`` for the last step."""
        ends = time.monotonic() + _LIMIT_SECS
        while time.monotonic() < ends:
            found = self._journal.read()
            for event in reversed(found):
                if event["step"] != self._saved_step:
                    continue
                if event["event"] in events:
                    return found
                if event["event"] in ("save_failed", "faulty"):
                    raise IncompleteError(f"A save failed: {event}.", next_step="See its reason.")
            time.sleep(_POLL_SECS)
        raise IncompleteError(
            f"No {events[0]!r} of step {self._saved_step} within {_LIMIT_SECS:.0f} s.",
            next_step="Is the disk stuck?",
        )


class _JournalTail:
    """The journal of a run, read again only where it has grown."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._path = run / f"{run.name}.journal.jsonl"
        self._size = -1
        self._events: list[Mapping[str, Any]] = []

    def read(self) -> list[Mapping[str, Any]]:
        size = self._path.stat().st_size
        if size != self._size:
            self._size = size
            self._events = [*open_run(self._run).journal()]
        return self._events
