"""`Comm.exchange` on real ranks: beside collectives, with ranks late, lost and failing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dist_ckpt.comm import Comm, connect
from dist_ckpt.errors import DistCkptError
from helpers.ranks import RankContext, Strike, run_ranks

LIMIT_SECS = 2.5  # busy cores start and meet late
SLACK_SECS = 2.0


def caught(call: Callable[[], object]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - that it is raised is what is looked for
        told = error.to_json() if isinstance(error, DistCkptError) else {}
        spent = time.monotonic() - begun
        return {**told, "type": type(error).__name__, "text": str(error), "secs": spent}
    return {"type": None, "secs": time.monotonic() - begun}


def join(reports: list[bytes]) -> bytes:
    return b"|".join(reports)


def num_keys(comm: Comm) -> int:
    """Return how many keys the store holds, ours and torch's."""
    count: int = comm._client.call(lambda store: store._store.num_keys())  # type: ignore[attr-defined]
    return count


# Beside the main thread ----------------------------------------------------------------------


def body_beside(ctx: RankContext) -> dict[str, Any]:
    comm = connect(20.0)
    outcomes: list[str] = []
    sizes: list[int] = []

    def save() -> None:
        for number in range(50):
            report = f"{ctx.rank}:{number}".encode()
            outcomes.append(comm.exchange(f"save {number}", report, join).decode())
        for _ in range(3):  # equal names are counted
            big = bytes([ctx.rank]) * (9 * 2**20)
            sizes.append(len(comm.exchange("big", big, join)))
        comm.exchange("empty", b"", lambda _: b"")

    comm.agree([0])  # all have connected and put away what that took
    before = num_keys(comm)
    comm.agree([0])
    side = threading.Thread(target=save)
    side.start()
    rounds = 0
    while comm.agree([int(side.is_alive())])[0]:
        rounds += 1
        comm.gather(b"x" * ctx.rank)
    side.join()
    # The last rank to read an outcome clears it, a moment after the first has it.
    deadline = time.monotonic() + 5
    while num_keys(comm) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    after = num_keys(comm)
    comm.agree([0])
    comm.close()
    return {"outcomes": outcomes, "sizes": sizes, "rounds": rounds, "keys": after - before}


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_exchanges_run_beside_collectives_and_leave_no_keys(store: str) -> None:
    results = run_ranks(3, body_beside, store=store)
    assert [result.returncode for result in results] == [0, 0, 0], results
    for result in results:
        assert result.value["outcomes"] == [f"0:{n}|1:{n}|2:{n}" for n in range(50)]
        assert result.value["sizes"] == [3 * 9 * 2**20 + 2] * 3
        assert result.value["rounds"] > 10
        assert result.value["keys"] == 0


def body_decide(ctx: RankContext) -> list[dict[str, Any]]:
    comm = connect(20.0)

    def refuse(reports: list[bytes]) -> bytes:
        raise OSError(f"{len(reports)} reports, no room")

    seen = [caught(lambda: comm.exchange("save 1", b"", refuse))]
    seen.append({"next": comm.exchange("save 2", b"x", join).decode()})
    comm.close()
    return seen


def test_a_decision_that_fails_is_told_to_all() -> None:
    results = run_ranks(3, body_decide)
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert results[0].value[0]["type"] == "OSError"
    for result in results[1:]:
        error = result.value[0]
        assert error["type"] == "RankFailedError"
        assert error["failures"] == {"0": "OSError: 3 reports, no room"}
        assert (error["kinds"], error["phase"]) == ({"0": "OSError"}, "save 1")
    assert [result.value[1] for result in results] == [{"next": "x|x|x"}] * 3


# Ranks that don't come -----------------------------------------------------------------------


def body_absent(ctx: RankContext, absent: int) -> dict[str, Any]:
    comm = connect(LIMIT_SECS)
    found: dict[str, Any] = {}
    if ctx.rank == absent:
        for rank in set(range(ctx.world_size)) - {absent}:
            ctx.wait_for("told", rank)
    else:
        found["left out"] = caught(lambda: comm.exchange("save 1", b"a", join))
        ctx.reach("told")
    # Usable again, though one rank never took part in the first.
    found["next"] = comm.exchange("save 2", str(ctx.rank).encode(), join).decode()
    if ctx.rank == absent:
        for rank in set(range(ctx.world_size)) - {absent}:
            ctx.wait_for("told 2", rank)
        found["late"] = caught(lambda: comm.exchange("save 3", b"late", join))
    else:
        found["on time"] = caught(lambda: comm.exchange("save 3", b"b", join))
        ctx.reach("told 2")
    found["last"] = comm.exchange("save 4", str(ctx.rank).encode(), join).decode()
    # The group of the main thread never knew of it.
    found["agree"] = comm.agree([ctx.rank])
    comm.close()
    return found


@pytest.mark.parametrize("absent", [2, 0])
def test_a_rank_that_never_reports_is_named_within_the_limit_and_the_next_exchange_works(
    absent: int,
) -> None:
    """Case 29: one that leaves an exchange out, and one that comes when the others gave up."""
    results = run_ranks(3, body_absent, absent)
    assert [result.returncode for result in results] == [0, 0, 0], results
    for result in results:
        value = result.value
        assert value["next"] == value["last"] == "0|1|2"
        assert value["agree"] == [2]
        errors = [value[key] for key in ("left out", "on time", "late") if key in value]
        for error in errors:
            assert error["type"] == "RankTimeoutError"
            assert error["secs"] < LIMIT_SECS + SLACK_SECS
        if result.rank != absent:
            assert [error["missing"] for error in errors] == [[absent], [absent]]
            assert f"Rank {absent} didn't answer in save 1" in errors[0]["text"]
            assert errors[0]["timeout_secs"] == LIMIT_SECS
        elif absent:
            # Late itself: it is told so at once, and its report isn't taken for another save's.
            assert errors[0]["missing"] == [absent]
            assert errors[0]["secs"] < 0.5
        else:
            # Rank 0 finds that the others gave up on it, and doesn't wait for them.
            assert errors[0]["missing"] == [1, 2]
            assert errors[0]["secs"] < 0.5


def body_struck(ctx: RankContext, victim: int, limit_secs: float) -> dict[str, Any]:
    comm = connect(limit_secs)
    comm.exchange("save 1", b"", join)
    ctx.reach("past it")
    if ctx.rank == victim:
        for rank in range(ctx.world_size):
            ctx.wait_for("past it", rank)  # rank 0 may be the one whose store tells the outcome
        ctx.reach("there")
        time.sleep(30)
    seen: list[dict[str, Any]] = []
    side = threading.Thread(
        target=lambda: seen.append(caught(lambda: comm.exchange("save 2", b"", join)))
    )
    side.start()
    side.join()
    comm.close()
    return seen[0]


@pytest.mark.parametrize(("victim", "store"), [(1, "tcp"), (0, "tcp"), (0, "file")])
def test_a_rank_killed_during_an_exchange_is_named_long_before_the_limit(
    victim: int, store: str
) -> None:
    """Case 29; with rank 0 on tcp the store is gone as well."""
    strikes = [Strike("there", victim)]
    results = run_ranks(3, body_struck, victim, 30.0, store=store, strikes=strikes)
    assert results[victim].struck == (signal.SIGKILL,)
    for result in results:
        if result.rank != victim:
            assert result.returncode == 0, result
            assert result.value["type"] == "RankFailedError"
            assert list(result.value["failures"]) == [str(victim)]
            assert "has ended" in result.value["failures"][str(victim)]
            assert result.value["secs"] < 5.0


@pytest.mark.parametrize(("victim", "store"), [(2, "tcp"), (0, "tcp"), (0, "file")])
def test_a_rank_stopped_during_an_exchange_is_named_at_the_limit(victim: int, store: str) -> None:
    """Case 29; with rank 0 on tcp each call of the store would wait for ever."""
    strikes = [Strike("there", victim, signal.SIGSTOP, delay_secs=0.0)]
    results = run_ranks(3, body_struck, victim, LIMIT_SECS, store=store, strikes=strikes)
    assert results[victim].struck == (signal.SIGSTOP,)
    for result in results:
        if result.rank != victim:
            assert result.returncode == 0, result
            assert result.value["type"] == "RankTimeoutError"
            assert result.value["missing"] == [victim]
            assert result.value["secs"] < 2 * LIMIT_SECS + SLACK_SECS


def body_orphan(ctx: RankContext) -> dict[str, Any]:
    """Rank 0, which hosts the store and is on another host as far as the others can see, dies."""
    from dist_ckpt.comm import _peers

    if ctx.rank == 0:
        # No second host at hand: what tells hosts apart is replaced, everything else is real.
        _peers._host = lambda: "elsewhere"
    comm = connect(20.0)
    if ctx.rank == 0:
        ctx.reach("there")
        time.sleep(30)
    error = caught(lambda: comm.exchange("save 1", b"", join))
    comm.close()
    return error


def test_a_lost_store_is_said_where_nobody_can_be_named() -> None:
    results = run_ranks(2, body_orphan, strikes=[Strike("there", 0)])
    assert results[0].struck == (signal.SIGKILL,)
    error = results[1].value
    assert error["type"] == "JobError"
    assert "The job's store is lost" in error["text"]
    assert error["secs"] < 5.0


def body_slow_decision(ctx: RankContext) -> dict[str, Any]:
    comm = connect(LIMIT_SECS)

    def decide(reports: list[bytes]) -> bytes:
        time.sleep(0.9 * LIMIT_SECS)
        return join(reports)

    if ctx.rank == 0:
        time.sleep(0.5 * LIMIT_SECS)
    outcome = comm.exchange("save 1", b"x", decide)
    comm.close()
    return {"outcome": outcome.decode()}


def test_a_rank_0_that_gets_on_is_waited_for_longer_than_one_limit() -> None:
    """Else rank 0 would commit what the others call failed."""
    results = run_ranks(2, body_slow_decision)
    assert [result.value for result in results] == [{"outcome": "x|x"}] * 2, results
