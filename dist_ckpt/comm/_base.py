"""The interface that every way of connecting ranks has. Layer 2, pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

__all__ = ["Comm"]

T = TypeVar("T")


class Comm(Protocol):
    """The ranks of one job as seen from one of them.

    All methods but `exchange` and `close` are collective: every rank calls them, in the same order,
    on the thread that connected. They end with a `RankFailedError` or a `RankTimeoutError` that
    names ranks when a peer is lost; the group is then lost too, and each later collective raises
    `JobError` at once.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""

    def agree(self, values: Sequence[int], *, phase: str = "agreement") -> list[int]:
        """Every rank holds the element-wise maximum of all ranks' ``values``.

        They are int64s, as many on every rank.

        Collective, on the connecting thread; one all_reduce of one number where all values are 0,
        one more where any isn't. ``phase`` names the moment in errors.
        """

    def mean(self, value: float, *, phase: str = "mean") -> float:
        """Every rank holds the float64 mean of all ranks' values.

        Collective, on the connecting thread.
        """

    def gather(self, payload: bytes, *, phase: str = "gather") -> list[bytes]:
        """Every rank holds every rank's payload, by rank; lengths may differ.

        Collective, on the connecting thread. Nothing is pickled.
        """

    def broadcast(self, payload: bytes | None, *, phase: str = "broadcast") -> bytes:
        """Every rank holds rank 0's payload; the other ranks' is not looked at.

        Collective, on the connecting thread. `UsageError` on every rank when rank 0 gives None.
        """

    def together(self, phase: str, fn: Callable[[], T]) -> T:
        """``fn`` has run on every rank without an exception; this rank's value is returned.

        Collective, on the connecting thread. If any rank raised, every rank raises: the one that
        failed its own exception, the others `RankFailedError` with ``failures`` (rank → message)
        and ``kinds`` (rank → the ``id`` of an error of this package, else the name of the
        exception's class). ``fn`` may call collectives only if all ranks get to them. A
        KeyboardInterrupt leaves at once, without waiting for the others to be done.
        """

    def exchange(self, phase: str, report: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Every rank holds what ``decide`` made of all ranks' reports, by rank.

        ``decide`` runs on rank 0 only.

        For one background thread a rank, beside collectives of the main thread; goes through the
        store. Reports and outcome may be megabytes. If ``decide`` raises, rank 0 raises that
        exception and the others `RankFailedError`. Ranks that don't report in time make
        `RankTimeoutError` with ``missing``; a rank whose process ended on this host is noticed
        within a second (`RankFailedError`). It can be used again after either. Rank 0 waits
        ``timeout_secs`` for reports; the others that long for rank 0 to come, once more for the
        reports, once more for its decision.

        ``phase`` tells one exchange from another: give each attempt a name of its own ("commit of
        step 100, attempt 2"), then a rank that left one out meets the others at the next. Equal
        names are counted, and a rank that left one out under an equal name answers one too late
        from then on. Not promised: that all ranks learn an outcome. If the job breaks right then,
        rank 0 may have decided what others call timed out.
        """

    def close(self) -> None:
        """Our group and threads are gone, the user's groups untouched.

        Not collective. Twice is fine.
        """
