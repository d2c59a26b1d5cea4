"""Scenarios: a run directory, a fresh process, what the library saw in it. I/O, main thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.canonical import step_name
from dist_ckpt.errors import IncompleteError
from dist_ckpt.proof._command import with_run_dir
from dist_ckpt.proof._copy import copy_run
from dist_ckpt.proof._launch import Launch, Order, last_lines
from dist_ckpt.proof._tracks import Track, read_tracks
from dist_ckpt.service import (
    OMIT_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_AT_VARIABLE,
    WITNESS_VARIABLE,
)
from dist_ckpt.wording import counted

__all__ = ["Runner", "Scenario"]


@dataclass(frozen=True)
class Scenario:
    """A scenario that has ended.

    Attributes:
        name: Of its run directory, its log and its witness.
        run_dir: What it left.
        opened_at: The step that it had to resume from, 0 for a fresh start.
        stop_at: Where it ended.
        omitted: The part whose restore was left out.
        tracks: What the library saw, by rank.
        secs: How long it took.
    """

    name: str
    run_dir: Path
    opened_at: int
    stop_at: int
    omitted: str | None
    tracks: list[Track]
    secs: float

    @property
    def generation(self) -> Path:
        """Where its last generation lies."""
        return self.run_dir / "checkpoints" / step_name(self.stop_at)

    def to_json(self) -> dict[str, Any]:
        """Return what it was, as JSON can hold it."""
        return {
            "name": self.name,
            "from": self.opened_at,
            "to": self.stop_at,
            "left_out": self.omitted,
            "world_size": self.tracks[0].world_size,
            "secs": round(self.secs, 3),
        }


class Runner:
    """Runs scenarios one after the other below one directory.

    Args:
        output: The proof's directory; it exists.
        command: The user's words.
        run_arg: Option that names the run directory in them, if it is to be rewritten.
        ranks: How many ranks there must be; None: whatever the command starts.
        wrap: Makes of the words what starts them.
        launch: Runs an order.
        timeout_secs: For each.
        tell: Told the name of each that begins.
    """

    def __init__(
        self,
        output: Path,
        command: Sequence[str],
        run_arg: str | None,
        *,
        ranks: int | None,
        wrap: Callable[[list[str]], list[str]],
        launch: Launch,
        timeout_secs: float,
        tell: Callable[[str], None],
    ) -> None:
        self._output = output
        self._command = list(command)
        self._run_arg = run_arg
        self._ranks = ranks
        self._wrap = wrap
        self._launch = launch
        self._timeout_secs = timeout_secs
        self._tell = tell
        self.scenarios: list[Scenario] = []
        for name in ("logs", "witness"):
            storage.make_dir(output / name)

    def run(
        self,
        name: str,
        stop_at: int,
        *,
        after: Scenario | None = None,
        omit: str | None = None,
        may_end_before: bool = False,
    ) -> Scenario:
        """Return a scenario that has run to its end.

        Args:
            name: For its files.
            stop_at: Its last step.
            after: The scenario that left what this one resumes from; None: a fresh start.
            omit: The part whose restore is left out.
            may_end_before: The script may have an earlier end of its own.

        Raises:
            IncompleteError: It failed, took too long, or didn't do what a scenario has to.
        """
        self._tell(name)
        run_dir, witness = self._output / name, self._output / "witness" / name
        storage.make_dir(witness)
        if after is not None:
            copy_run(after.run_dir, run_dir)
        log = self._output / "logs" / f"{name}.log"
        order = Order(
            command=tuple(self._wrap(with_run_dir(self._command, self._run_arg, run_dir))),
            environ={
                RUN_DIR_VARIABLE: str(run_dir),
                STOP_AT_VARIABLE: str(stop_at),
                WITNESS_VARIABLE: str(witness),
                OMIT_VARIABLE: omit,
            },
            log=log,
            timeout_secs=self._timeout_secs,
        )
        began = time.monotonic()
        status = self._launch(order)
        secs = time.monotonic() - began
        try:
            tracks = self._check(witness, status, stop_at, may_end_before=may_end_before)
        except IncompleteError as error:
            raise _with_log(error, name, log) from error
        last = min(stop_at, tracks[0].last_step)
        opened_at = 0 if after is None else after.stop_at
        scenario = Scenario(name, run_dir, opened_at, last, omit, tracks, secs)
        self.scenarios.append(scenario)
        return scenario

    def _check(
        self, witness: Path, status: int | None, stop_at: int, *, may_end_before: bool
    ) -> list[Track]:
        if status is None:
            raise IncompleteError(
                f"It took longer than {self._timeout_secs:g} s.",
                next_step="Give more time with --timeout, or fewer steps with --until.",
            )
        tracks = read_tracks(witness)
        if status != 0:
            how = f"status {status}" if status > 0 else f"signal {-status}"
            raise IncompleteError(f"It ended with {how}.", next_step="Mend that first.")
        if not tracks:
            raise IncompleteError(
                "The command ended well, but never entered a dist_ckpt.Checkpointer.",
                next_step="Only a script that uses one can be proven.",
            )
        _check_ranks(tracks, self._ranks)
        if self.scenarios and len(tracks) != len(self.scenarios[0].tracks):
            raise IncompleteError(
                f"It ran on {counted(len(tracks), 'rank')}, the first scenario on "
                f"{len(self.scenarios[0].tracks)}.",
                next_step="The number of ranks must not depend on the attempt.",
            )
        for track in tracks:
            if track.end is None:
                raise IncompleteError(
                    f"Its loop was left after step {track.last_step} without an end.",
                    next_step="Let `for step in ckpt.steps(…)` come to its end: no break.",
                )
            if track.last_step < stop_at and not may_end_before:
                raise IncompleteError(
                    f"It ended by itself after step {track.last_step}, not at step {stop_at}.",
                    next_step="The loop's until must not depend on the attempt.",
                )
        return tracks


def _check_ranks(tracks: Sequence[Track], ranks: int | None) -> None:
    if ranks is not None and tracks[0].world_size != ranks:
        raise IncompleteError(
            f"{ranks} ranks were started, but the script trains on {tracks[0].world_size}.",
            next_step="Call torch.distributed.init_process_group before the Checkpointer.",
        )


def _with_log(error: IncompleteError, name: str, log: Path) -> IncompleteError:
    lines = last_lines(log)
    return IncompleteError(
        f"The scenario {name!r} couldn't be completed. {error.message}",
        next_step=f"{error.next_step} All that it printed: {log}",
        scenario=name,
        log=str(log),
        last_lines=lines,
    )
