"""Reports of all ranks to rank 0 and its decision back, through the store. Layer 2, network I/O.

Under one key for each exchange: ``report/R`` from each rank, then ``open`` and ``deciding`` (rank 0
is there; it has all reports) and ``outcome`` from rank 0, then ``acks``, whose last counter clears
all. A rank that gives up puts GAVE_UP in the place of its report, so that a late rank 0 doesn't
wait for it.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.comm._peers import Peer, Place, gone_text
from dist_ckpt.comm._rollcall import explain_lost_store, failed_error, timeout_error
from dist_ckpt.comm._store import StoreClient, StoreLostError, View
from dist_ckpt.errors import DistCkptError, JobError

__all__ = ["Exchanger", "kind_of", "text_of"]

REPORT = b"r"
GAVE_UP = b"g"
MAX_PHASES = 1024
PEER_CHECK_SECS = 0.25


def kind_of(error: BaseException) -> str:
    """Return the stable id of an error of ours, else the name of its class."""
    return error.id if isinstance(error, DistCkptError) else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return what other ranks are told of an error."""
    text = str(error) or "no message"
    return text if isinstance(error, DistCkptError) else f"{type(error).__name__}: {text}"


@dataclass
class _Reports:
    """What rank 0 has gathered: the reports by rank, or who is missing or gone."""

    reports: dict[int, bytes] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)


class Exchanger:
    """One rank's side of all exchanges; used by one thread at a time.

    Args:
        client: The connection to the store, for this use alone.
        nonce: Tells the keys of this job from those of another one that used the same store.
        place: This rank among all.
    """

    def __init__(
        self,
        client: StoreClient,
        nonce: str,
        place: Place,
    ) -> None:
        self._client = client
        self._nonce = nonce
        self._place = place
        self._peers = place.peers
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._leftovers: list[str] = []

    def exchange(self, phase: str, report: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return the outcome of this exchange on every rank. See `Comm.exchange`."""
        key = self._next_key(phase)
        try:
            if self._place.rank == 0:
                return self._lead(phase, key, report, decide)
            return self._follow(phase, key, report)
        except StoreLostError as lost:
            raise explain_lost_store(lost, phase, self._place) from lost

    def _next_key(self, phase: str) -> str:
        number = self._counts.pop(phase, 0) + 1
        self._counts[phase] = number
        if len(self._counts) > MAX_PHASES:
            self._counts.popitem(last=False)
        return f"{self._nonce}/{phase}/{number}"

    # Rank 0 ---------------------------------------------------------------------------------------

    def _lead(
        self, phase: str, key: str, report: bytes, decide: Callable[[list[bytes]], bytes]
    ) -> bytes:
        gathered = self._client.call(lambda store: self._gather(store, key))
        if gathered.gone or gathered.missing:
            self._leftovers.append(key)
            self._tell(key, {"gone": gathered.gone, "missing": gathered.missing})
            raise self._incomplete(phase, gathered.gone, gathered.missing)
        try:
            reports = [gathered.reports.get(number, report) for number in range(len(self._peers))]
            outcome = decide(reports)
        except BaseException as error:
            self._tell(key, {"failure": text_of(error), "kind": kind_of(error)})
            raise
        self._tell(key, {}, outcome)
        return outcome

    def _gather(self, store: View, key: str) -> _Reports:
        """Wait until all reports are there, a rank is known to be gone, or the time is up."""
        store.put(f"{key}/open", b"")
        others = self._place.others
        keys = {peer.rank: f"{key}/report/{peer.rank}" for peer in others}
        result = _Reports()
        watch = _Watch(others)

        def settled() -> bool:
            # Whoever has reported may be gone by now: it has done its part.
            return store.has(list(keys.values())) or any(
                not store.has([keys[peer.rank]]) for peer in watch.gone()
            )

        store.poll(settled, self._place.timeout_secs)
        for peer in others:
            value = store.take(keys[peer.rank]) if store.has([keys[peer.rank]]) else GAVE_UP
            if value[:1] == REPORT:
                result.reports[peer.rank] = value[1:]
            elif peer.state() == "gone":
                result.gone[peer.rank] = gone_text(peer)
            else:
                result.missing.append(peer.rank)
        if result.gone:
            result.missing.clear()  # not late: cut short
        if not (result.gone or result.missing):
            self._sweep(store)
            store.put(f"{key}/deciding", b"")
        return result

    def _sweep(self, store: View) -> None:
        """Every rank has reported for a later exchange, nobody looks at failed ones now."""
        for key in self._leftovers:
            _clear(store, key, [peer.rank for peer in self._peers])
        self._leftovers.clear()

    def _tell(self, key: str, verdict: dict[str, Any], outcome: bytes = b"") -> None:
        head = json.dumps(verdict, allow_nan=False).encode()
        self._client.call(lambda store: store.put(f"{key}/outcome", head + b"\n" + outcome))

    # The other ranks ------------------------------------------------------------------------------

    def _follow(self, phase: str, key: str, report: bytes) -> bytes:
        told = self._client.call(lambda store: self._report_and_wait(store, key, report))
        if told is None:
            raise self._unanswered(phase)
        head, _, outcome = told.partition(b"\n")
        verdict = json.loads(head)
        if "failure" in verdict:
            raise failed_error(phase, {0: verdict["failure"]}, {0: verdict["kind"]})
        if verdict:
            gone = {int(number): text for number, text in verdict["gone"].items()}
            raise self._incomplete(phase, gone, verdict["missing"])
        return outcome

    def _report_and_wait(self, store: View, key: str, report: bytes) -> bytes | None:
        """Return rank 0's outcome; None when it is gone or its time is up."""
        mine = f"{key}/report/{self._place.rank}"
        outcome = f"{key}/outcome"
        if not store.has([outcome]):  # else too late: it was decided without this rank
            store.put(mine, REPORT + report)
        leader = self._peers[0]
        watch = _Watch([leader])
        # Each sign that rank 0 has come one step further earns the limit once more.
        signs = [f"{key}/open", f"{key}/deciding"]
        while not store.poll(
            lambda: store.has([outcome]) or bool(watch.gone()), self._place.timeout_secs
        ):
            seen = [sign for sign in signs if store.has([sign])]
            if not seen or leader.state() == "stopped":
                break
            signs = [sign for sign in signs if sign not in seen]
        if not store.has([outcome]):
            if leader.state() == "gone":
                store.drop(mine)  # nobody reads it, and nobody else would clear it
            store.mark(mine, GAVE_UP)
            return None
        told = store.take(outcome)
        store.drop(mine)
        if store.add(f"{key}/acks", 1) == len(self._peers) - 1:
            _clear(store, key, [])
        return told

    def _unanswered(self, phase: str) -> JobError:
        leader = self._peers[0]
        if leader.state() == "gone":
            return failed_error(phase, {0: gone_text(leader)})
        return timeout_error(phase, [0], self._place.timeout_secs)

    def _incomplete(self, phase: str, gone: dict[int, str], missing: list[int]) -> JobError:
        if gone:
            return failed_error(phase, gone)
        return timeout_error(phase, missing, self._place.timeout_secs)


class _Watch:
    """Looks whether processes still live, now and then: a look costs as much as a store call."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._next = time.monotonic() + PEER_CHECK_SECS

    def gone(self) -> list[Peer]:
        """Return those that are known to have ended; empty when it isn't time to look."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + PEER_CHECK_SECS
        return [peer for peer in self._peers if peer.state() == "gone"]


def _clear(store: View, key: str, ranks: Sequence[int]) -> None:
    for rank in ranks:
        store.drop(f"{key}/report/{rank}")
    for name in ("outcome", "deciding", "open"):
        store.drop(f"{key}/{name}")
    store.drop_counter(f"{key}/acks")
