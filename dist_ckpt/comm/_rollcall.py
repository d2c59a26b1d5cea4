"""From a failed collective to an error that names ranks. Layer 2, network I/O.

gloo says that a connection closed or timed out, not whose. So the ranks that come out of a failed
collective answer a roll call in the store; who doesn't answer, or whose process has ended, is
named. The first to know writes the verdict, and all raise the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_ckpt.comm._peers import Peer, Place, gone_text
from dist_ckpt.comm._store import StoreClient, StoreLostError, View
from dist_ckpt.errors import JobError, RankFailedError, RankTimeoutError

__all__ = [
    "ROLL_CALL_SECS",
    "Trouble",
    "call_roll",
    "explain_lost_store",
    "failed_error",
    "leave_note",
    "names",
    "timeout_error",
]

ROLL_CALL_SECS = 2.0
"""How long a roll call waits for answers, at most."""

DYING_SECS = 0.5

START_AGAIN = "Start the job again on all ranks; it resumes from its last generation."


@dataclass(frozen=True)
class Trouble:
    """What one rank saw: "timeout", "closed" or "left"; after how long; in words."""

    how: str
    waited_secs: float
    text: str


def names(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def failed_error(
    phase: str, failures: Mapping[int, str], kinds: Mapping[int, str] | None = None
) -> RankFailedError:
    """Return the error that says which ranks failed in a phase, and how."""
    ranks = sorted(failures)
    told = "; ".join(f"rank {rank}: {failures[rank]}" for rank in ranks)
    return RankFailedError(
        f"{names(ranks).capitalize()} failed in {phase} ({told}).",
        next_step="See that rank's own output for the cause.",
        phase=phase,
        failures=dict(failures),
        kinds=dict(kinds or {}),
    )


def timeout_error(phase: str, missing: Sequence[int], timeout_secs: float) -> RankTimeoutError:
    """Return the error that says which ranks didn't answer in a phase."""
    return RankTimeoutError(
        f"{names(missing).capitalize()} didn't answer in {phase} within {timeout_secs:g} s.",
        next_step="See what held it up (disk, debugger, a stopped process), or raise timeout_secs.",
        phase=phase,
        missing=list(missing),
        timeout_secs=timeout_secs,
    )


def leave_note(client: StoreClient, prefix: str, rank: int, text: str) -> None:
    """The others' roll call finds why this rank leaves; doesn't matter when the store is lost."""
    note = json.dumps(asdict(Trouble("left", 0.0, text))).encode()
    try:
        client.call(lambda store: store.put(f"{prefix}/{rank}", note))
    except StoreLostError:
        return


def call_roll(
    client: StoreClient,
    prefix: str,
    phase: str,
    trouble: Trouble,
    place: Place,
) -> JobError:
    """Return the error that names who is lost; takes `ROLL_CALL_SECS` and a little more at most.

    Args:
        client: A connection to the store that nothing else is using.
        prefix: Of the keys; one for each group, since a group fails only once.
        phase: What failed, for the message.
        trouble: What this rank saw.
        place: This rank among all.
    """
    try:
        verdict = client.call(lambda store: _hold_roll_call(store, prefix, trouble, place))
    except StoreLostError as lost:
        return explain_lost_store(lost, phase, place)
    failures = {int(number): text for number, text in verdict["failures"].items()}
    if failures:
        return failed_error(phase, failures)
    if verdict["missing"]:
        return timeout_error(phase, verdict["missing"], place.timeout_secs)
    return JobError(
        f"The connection between the ranks was lost in {phase}, though every rank still answers "
        f"({trouble.text}).",
        next_step=START_AGAIN,
        phase=phase,
    )


def explain_lost_store(lost: StoreLostError, phase: str, place: Place) -> JobError:
    """Return the error for a lost store: it names the ranks known to be lost with it."""
    # A process that is killed closes its connections a moment before it counts as ended.
    deadline = time.monotonic() + DYING_SECS
    while True:
        states = {peer.rank: peer.state() for peer in place.others}
        if "gone" in states.values() or time.monotonic() > deadline:
            break
        time.sleep(DYING_SECS / 20)
    gone = [number for number, state in states.items() if state == "gone"]
    if gone:
        return failed_error(
            phase, {r: f"{gone_text(place.peers[r])}, and the job's store is lost" for r in gone}
        )
    stopped = [number for number, state in states.items() if state == "stopped"]
    if stopped:
        return timeout_error(phase, stopped, place.timeout_secs)
    return JobError(f"In {phase}: {lost.message}", next_step=lost.next_step, phase=phase)


def _hold_roll_call(store: View, prefix: str, trouble: Trouble, place: Place) -> dict[str, Any]:
    """Answer, wait for the others, and return the verdict that all ranks share."""
    store.put(f"{prefix}/{place.rank}", json.dumps(asdict(trouble)).encode())
    others = place.others
    dead: list[Peer] = []

    def settled() -> bool:
        dead.extend(peer for peer in others if peer.state() == "gone")
        return bool(dead) or store.has([f"{prefix}/{peer.rank}" for peer in others])

    if not store.has([f"{prefix}/verdict"]):
        store.poll(settled, min(ROLL_CALL_SECS, place.timeout_secs))
    if dead:
        verdict = {"failures": {str(p.rank): gone_text(p) for p in dead}, "missing": []}
    else:
        verdict = _judge(_answers(store, prefix, place.peers), len(place.peers))
    found = store.first(f"{prefix}/verdict", json.dumps(verdict).encode())
    return dict(json.loads(found))


def _answers(store: View, prefix: str, peers: Sequence[Peer]) -> dict[int, Trouble]:
    keys = {peer.rank: f"{prefix}/{peer.rank}" for peer in peers}
    return {r: Trouble(**json.loads(store.take(k))) for r, k in keys.items() if store.has([k])}


def _judge(answers: Mapping[int, Trouble], num_ranks: int) -> dict[str, Any]:
    """Say who failed and who is missing, from the answers of those who answered. Pure."""
    missing = [number for number in range(num_ranks) if number not in answers]
    left = {str(r): t.text for r, t in answers.items() if t.how == "left"}
    if left:
        return {"failures": left, "missing": []}
    if not any(t.how == "timeout" for t in answers.values()):
        silent = "its connection closed, and it doesn't answer any more"
        return {"failures": {str(r): silent for r in missing}, "missing": []}
    if not missing:
        # All answer, so the one the others had waited for came late: it waited the shortest itself.
        longest = max(t.waited_secs for t in answers.values())
        missing = [r for r, t in answers.items() if t.waited_secs < longest / 2]
    return {"failures": {}, "missing": missing}
