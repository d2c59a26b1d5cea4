"""A pivot from outside, of a live run or a stopped one. Layer 6; no torch.

What is wanted is written to ``request.json`` first. A live run is then signalled: it stops at its
next boundary, after the checkpoint. Below our launcher its workers are started again and carry the
pivot out themselves, before they resume; otherwise it is carried out here, under the run's lock.
Each look starts from what lies in the run directory, so that a call that was cut off is repeated.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt import announce
from dist_ckpt.errors import (
    JobError,
    LockedError,
    NotRunningError,
    RankTimeoutError,
)
from dist_ckpt.lifecycle import (
    Pivot,
    PivotRequest,
    carry_out_pivot,
    hold_run,
    new_request,
    pivots_of,
    read_request,
    remove_request,
    settle,
    write_request,
)
from dist_ckpt.runs._ask import handles, sender_to
from dist_ckpt.runs._liveness import Liveness, look_alive
from dist_ckpt.runs._pivot_plan import (
    agent_lives,
    check_pivot,
    nothing_to_go_on_from,
    require_here,
)
from dist_ckpt.runs._run import Run

__all__ = ["Pivoted", "pivot_run"]

_POLL_SECS = 0.05
_DEAF_SECS = 10.0  # between the start of a process and its handlers, or before its end


@dataclass(frozen=True, slots=True)
class Pivoted:
    """A pivot that is done.

    Attributes:
        pivot: What was done.
        restarted: The launcher has started the run again, and it has resumed.
        command: How rank 0's process was started last, for a shell; None where it isn't known.
        secs: How long it took.
    """

    pivot: Pivot
    restarted: bool
    command: str | None
    secs: float


def pivot_run(
    run: Run, settings: Mapping[str, Any] | None, *, timeout_secs: float = 3600.0
) -> Pivoted:
    """The run goes on, or will when it is started, from a checkpoint with a fresh policy.

    Weights, moments and losses are what they were; samples and the policy's state are in
    ``archive/pivot_N/``. Interrupted at any instant it can be called again.

    Args:
        run: The run; live on this host, or stopped.
        settings: The policy's settings from then on; None leaves those that there are.
        timeout_secs: How long to wait for a live run's boundary and restart.

    Raises:
        NotFoundError: A stopped run without a generation.
        NotRunningError: It runs on another host, doesn't handle SIGUSR1, or was killed before the
            boundary; nothing is asked for any more then.
        JobError: It ended by an error before the boundary (likewise), or at the restart; or another
            pivot was asked for meanwhile, which took this one's place.
        RankTimeoutError: Not done in time. The request stands: the run still follows it.
    """
    check_pivot(run, settings)
    work = _Pivoting(run, settings, timeout_secs)
    return work.run_to_its_end()


class _Pivoting:
    """One call of `pivot_run`: looks at the run again and again, and does what it needs next."""

    def __init__(self, run: Run, settings: Mapping[str, Any] | None, timeout_secs: float) -> None:
        self._run = run
        self._run_dir = run.store.run_dir
        self._settings = settings
        self._timeout_secs = timeout_secs
        self._began = time.monotonic()
        self._deaf_since: float | None = None
        self._asked: int | None = None  # the attempt that has the signal

    def run_to_its_end(self) -> Pivoted:
        liveness = self._look()
        require_here(self._run, liveness)
        facts = liveness.facts
        earlier = self._earlier()
        if earlier is not None:
            return self._follow(earlier, facts)
        request = self._request(facts)
        while True:
            liveness = self._look()
            standing = read_request(self._run_dir)  # before the journal: it goes after its pivot
            journal = self._run.journal()
            done = [pivot for pivot in pivots_of(journal) if pivot.id == request.id]
            if standing is None or standing.id != request.id:
                if not done:
                    raise _displaced(self._run, standing)
                return self._follow(done[0], facts)
            request = standing  # it tells whether it was begun by now
            if done and liveness.is_locked:
                pass  # whoever has the lock is about to remove the request
            elif liveness.is_locked:
                facts = liveness.facts
                self._ask(request, liveness, journal)
            elif not agent_lives(facts):
                self._require_boundary(request, journal)
                pivot = self._carry_out(request, facts)
                if pivot is not None:
                    return self._answer(pivot, facts, restarted=False)
            self._wait("The run has not come to its boundary")

    def _earlier(self) -> Pivot | None:
        """Return the pivot of an earlier call that was cut off behind it: nothing came since."""
        journal = self._run.journal()
        pivots = pivots_of(journal)
        if not pivots or read_request(self._run_dir) is not None:
            return None
        last = pivots[-1]
        since = journal[_place_of(last, journal) + 1 :]
        is_same = self._settings is None or self._settings == last.policy
        is_asked = any(event.get("event") in {"saved", "pivot_asked"} for event in since)
        return last if is_same and not is_asked and last.archive is not None else None

    def _request(self, facts: Mapping[str, Any]) -> PivotRequest:
        """Have the request, that of an earlier call where it wanted the same."""
        while (found := read_request(self._run_dir)) is not None:
            if found.wants(self._settings):
                return found
            if found.begun is None:
                break
            # The earlier one is half done, and what it set aside has to be in the journal.
            if self._carry_out(found, facts) is None:
                self._wait("Another pivot is half done, and has not come to its end")
        request = new_request(self._settings)
        write_request(self._run_dir, request)
        return request

    def _ask(
        self, request: PivotRequest, liveness: Liveness, journal: Sequence[Mapping[str, Any]]
    ) -> None:
        """Have the live attempt told, once."""
        facts = liveness.facts
        attempt, pid = facts.get("attempt"), facts.get("pid")
        if self._asked == attempt or _has_noticed(journal, request, attempt):
            self._asked = attempt
            return
        process = next((found for found in liveness.evidence if found.what == "process"), None)
        if type(pid) is not int or process is None or not process.alive:
            return  # somebody else holds the lock for a moment
        start_time = announce.process_start_time(pid)
        if start_time is None or not handles(pid, signal.SIGUSR1):
            self._bear_deafness(pid)
            return
        self._deaf_since = None
        with sender_to(pid, start_time, self._run) as send:
            send(signal.SIGUSR1)
        self._asked = attempt

    def _bear_deafness(self, pid: int) -> None:
        now = time.monotonic()
        self._deaf_since = self._deaf_since or now
        if now - self._deaf_since > _DEAF_SECS:
            remove_request(self._run_dir)
            raise NotRunningError(
                f"Process {pid} doesn't handle SIGUSR1: it would die of it.",
                next_step="Stop the run and pivot then, or give its Checkpointer that signal.",
                path=str(self._run.path),
                pid=pid,
            )

    def _require_boundary(
        self, request: PivotRequest, journal: Sequence[Mapping[str, Any]]
    ) -> None:
        """Return if an attempt that was asked came to a checkpoint before it ended."""
        if self._asked is None or request.begun is not None:
            return
        events = [event for event in journal if event.get("attempt") == self._asked]
        words = [str(event.get("event")) for event in events]
        reasons = [word for event in events for word in event.get("reasons") or ()]
        if "pivot" in reasons or {"attempt_stopped", "attempt_ended"} & set(words):
            return
        remove_request(self._run_dir)
        latest = self._run.latest()
        kept = "no checkpoint" if latest is None else f"step {latest.step}"
        error = next((e.get("error") for e in events if e.get("event") == "attempt_failed"), None)
        kind = JobError if error else NotRunningError
        raise kind(
            f"The run ended before its boundary ({error or 'killed, without a word'}); "
            f"{kept} is what there is. Nothing was changed.",
            next_step="Start it again, or pivot once more to go on from there.",
            path=str(self._run.path),
        )

    def _carry_out(self, request: PivotRequest, facts: Mapping[str, Any]) -> Pivot | None:
        """Return the pivot, None where somebody else has the lock for now."""
        if self._run.latest() is None and request.begun is None:
            remove_request(self._run_dir)
            raise nothing_to_go_on_from(self._run)
        attempt = facts.get("attempt")
        number = attempt if type(attempt) is int else 0
        try:
            with hold_run(self._run_dir, "pivot"):
                return carry_out_pivot(self._run_dir, self._run.name, number, request)
        except LockedError:
            return None

    def _follow(self, pivot: Pivot, facts: Mapping[str, Any]) -> Pivoted:
        """Wait for the restart where a launcher makes one."""
        while True:
            journal = self._run.journal()
            for event in journal[_place_of(pivot, journal) + 1 :]:
                if event.get("event") == "resumed":
                    return self._answer(pivot, self._look().facts, restarted=True)
                if event.get("event") == "attempt_failed":
                    raise JobError(
                        f"The pivot at step {pivot.step} is done, but the run didn't start "
                        f"again: {event.get('error')}.",
                        next_step="Mend that and start it; the policy then begins fresh.",
                        step=pivot.step,
                    )
            if not agent_lives(facts) and not self._look().is_locked:
                return self._answer(pivot, facts, restarted=False)
            self._wait(f"The pivot at step {pivot.step} is done; the run has not resumed")

    def _answer(self, pivot: Pivot, facts: Mapping[str, Any], *, restarted: bool) -> Pivoted:
        settle(self._run_dir)  # it may have been done by another, who was killed before it was
        secs = time.monotonic() - self._began
        return Pivoted(pivot, restarted, _command(facts), secs)

    def _look(self) -> Liveness:
        return look_alive(self._run_dir, self._run.journal())

    def _wait(self, what: str) -> None:
        if time.monotonic() - self._began > self._timeout_secs:
            raise RankTimeoutError(
                f"{what} within {self._timeout_secs:g} s; the request stands.",
                next_step="Call it again to go on waiting; `dist-ckpt status` tells the speed.",
                phase="pivot",
                missing=[0],
                timeout_secs=self._timeout_secs,
            )
        time.sleep(_POLL_SECS)


def _displaced(run: Run, standing: PivotRequest | None) -> JobError:
    what = "was withdrawn, or another was done instead" if standing is None else "was replaced"
    return JobError(
        f"The request for this pivot {what} by another call.",
        next_step="`dist-ckpt show` tells the last pivot; pivot again if yours is to follow it.",
        path=str(run.path),
    )


def _place_of(pivot: Pivot, journal: Sequence[Mapping[str, Any]]) -> int:
    return next(
        number
        for number, event in enumerate(journal)
        if event.get("event") == "pivot" and event.get("id") == pivot.id
    )


def _has_noticed(
    journal: Sequence[Mapping[str, Any]], request: PivotRequest, attempt: object
) -> bool:
    return any(
        event.get("event") == "pivot_asked"
        and event.get("id") == request.id
        and event.get("attempt") == attempt
        for event in journal
    )


def _command(facts: Mapping[str, Any]) -> str | None:
    words, directory = facts.get("command"), facts.get("directory")
    if not isinstance(words, list) or not words:
        return None
    command = shlex.join(map(str, words))
    return f"cd {shlex.quote(str(directory))} && {command}" if directory else command
