"""Collectives of `comm` on real ranks: what they give, and how they end when a rank is lost."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dist_ckpt.comm import Comm, SoloComm, connect
from dist_ckpt.errors import (
    CorruptFileError,
    DistCkptError,
    JobError,
    RankFailedError,
    SettingError,
    UsageError,
)
from helpers.ranks import RankContext, Strike, run_ranks

LIMIT_SECS = 2.0
ROLL_CALL_SECS = 2.0
SLACK_SECS = 2.0


def outcome(error: BaseException) -> dict[str, Any]:
    """Return what a test wants to know of an error, for JSON."""
    told = error.to_json() if isinstance(error, DistCkptError) else {}
    return {**told, "type": type(error).__name__, "text": str(error)}


def caught(call: Any) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - that it is raised is what is looked for
        return {**outcome(error), "secs": time.monotonic() - begun}
    return {"type": None, "secs": time.monotonic() - begun}


# What they give ------------------------------------------------------------------------------


def body_values(ctx: RankContext) -> dict[str, Any]:
    comm = connect(20.0)
    assert (comm.rank, comm.world_size) == (ctx.rank, ctx.world_size)
    payload = bytes([ctx.rank]) * (ctx.rank * 70_000)
    found: dict[str, Any] = {
        "max": [
            comm.agree([ctx.rank, -ctx.rank, 2**62 + ctx.rank]),
            comm.agree([5 - ctx.rank]),
            comm.agree([-(2**63), ctx.rank, 7]),
            comm.agree([0, 0, 0]),
            comm.agree([0, 0, 9 if ctx.rank == 1 else 0]),
            comm.agree([0, -1 if ctx.rank == 1 else 0]),
        ],
        "mean": comm.mean(0.1 * (ctx.rank + 1)),
        "nan": math.isnan(comm.mean(math.nan if ctx.rank == 1 else 1.0)),
        "gather": [[len(data), len(set(data))] for data in comm.gather(payload)],
        "empty": [len(data) for data in comm.gather(b"")],
        "broadcast": comm.broadcast(b"from 0" if ctx.rank == 0 else None).decode(),
        "nothing": len(comm.broadcast(b"" if ctx.rank == 0 else b"not looked at")),
        "unset": caught(lambda: comm.broadcast(None))["id"],
        "together": comm.together("loading", lambda: ctx.rank * 10),
    }
    error: list[dict[str, Any]] = []
    side = threading.Thread(target=lambda: error.append(caught(lambda: comm.agree([1]))))
    side.start()
    side.join()
    found["thread"] = error[0]["id"]
    found["after all"] = comm.agree([ctx.rank])
    comm.close()
    comm.close()
    found["closed"] = caught(lambda: comm.agree([1]))["id"]
    second = connect(20.0)
    found["again"] = second.agree([ctx.rank])
    second.close()
    return found


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_every_rank_holds_the_same_after_a_collective(store: str) -> None:
    results = run_ranks(3, body_values, store=store)
    assert [result.returncode for result in results] == [0, 0, 0], results
    for rank, result in enumerate(results):
        value = result.value
        assert value.pop("together") == rank * 10
        assert value == {
            "max": [[2, 0, 2**62 + 2], [5], [-(2**63), 2, 7], [0, 0, 0], [0, 0, 9], [0, 0]],
            "mean": pytest.approx(0.2, rel=1e-15),
            "nan": True,
            "gather": [[0, 0], [70_000, 1], [140_000, 1]],
            "empty": [0, 0, 0],
            "broadcast": "from 0",
            "nothing": 0,
            "unset": "usage",
            "thread": "usage",
            "after all": [2],
            "closed": "job",
            "again": [2],
        }


# How they end --------------------------------------------------------------------------------


def body_together(ctx: RankContext) -> list[dict[str, Any]]:
    comm = connect(20.0)

    def fail(rank: int, error: BaseException) -> None:
        if ctx.rank == rank:
            raise error

    corrupt = CorruptFileError("Digest of piece 3 differs.", next_step="Verify.", path="shard")
    seen = [
        caught(lambda: comm.together("reading", lambda: fail(1, ValueError("no row 7")))),
        caught(lambda: comm.together("reading", lambda: fail(0, corrupt))),
        caught(lambda: comm.together("reading", lambda: fail(ctx.rank, OSError(f"{ctx.rank}")))),
        caught(lambda: comm.together("reading", lambda: fail(2, SystemExit(3)))),
    ]
    # Usable again: an exception in the work is no failure of the group.
    assert comm.agree([ctx.rank]) == [2]
    comm.close()
    return seen


def test_a_rank_that_raises_keeps_its_own_exception_and_the_others_name_it() -> None:
    """Cases 29 and 39: one rank throws in a phase, and nobody hangs."""
    results = run_ranks(3, body_together)
    assert [result.returncode for result in results] == [0, 0, 0], results
    first, second, third = (result.value for result in results)
    assert [first[0]["type"], second[0]["type"]] == ["RankFailedError", "ValueError"]
    for other in (first[0], third[0]):
        assert other["failures"] == {"1": "ValueError: no row 7"}
        assert other["kinds"] == {"1": "ValueError"}
        assert other["phase"] == "reading"
        assert "Rank 1" in other["text"]
    assert first[1]["type"] == "CorruptFileError"
    assert second[1]["kinds"] == third[1]["kinds"] == {"0": "corrupt-file"}
    assert second[1]["failures"] == {"0": "Digest of piece 3 differs. Verify."}
    assert [value[2]["type"] for value in (first, second, third)] == ["OSError"] * 3
    assert third[3]["type"] == "SystemExit"
    assert first[3]["kinds"] == {"2": "SystemExit"}


def body_lost(ctx: RankContext, how: str) -> list[dict[str, Any]]:
    comm = connect(LIMIT_SECS)
    comm.agree([1])
    victim = ctx.world_size - 1 if how != "kill first" else 0
    if ctx.rank == victim:
        ctx.reach("there")
        time.sleep(0.4 if how == "late" else 30.0 if how != "silent" else 3.0)
        if how == "late":
            time.sleep(LIMIT_SECS)
    seen = [caught(lambda: comm.together("loading", int))]
    seen.append(caught(lambda: comm.agree([1])))
    comm.close()
    return seen


@pytest.mark.parametrize(
    ("how", "store", "victim"),
    [("kill", "tcp", 2), ("kill first", "tcp", 0), ("kill first", "file", 0)],
)
def test_a_killed_rank_ends_the_others_at_once_and_is_named(
    how: str, store: str, victim: int
) -> None:
    """Case 29, and rank 0 among them, with whom the store goes."""
    results = run_ranks(3, body_lost, how, store=store, strikes=[Strike("there", victim)])
    assert results[victim].returncode == -signal.SIGKILL
    assert results[victim].struck == (signal.SIGKILL,)
    for result in results:
        if result.rank != victim:
            assert result.returncode == 0, result
            first, second = result.value
            assert first["type"] == "RankFailedError"
            assert list(first["failures"]) == [str(victim)]
            assert f"Rank {victim} failed in loading" in first["text"]
            assert first["secs"] < 1.0 + SLACK_SECS
            # The group is gone for good, and says so without a wait.
            assert second["type"] == "JobError"
            assert second["secs"] < 0.1


@pytest.mark.parametrize(("store", "victim"), [("tcp", 2), ("tcp", 0)])
def test_a_stopped_rank_is_named_at_the_limit(store: str, victim: int) -> None:
    """Case 29; with rank 0 the store itself falls silent: a call of it would wait for ever."""
    how = "kill first" if victim == 0 else "kill"
    strikes = [Strike("there", victim, signal.SIGSTOP)]
    results = run_ranks(3, body_lost, how, store=store, strikes=strikes)
    assert results[victim].struck == (signal.SIGSTOP,)
    for result in results:
        if result.rank != victim:
            assert result.returncode == 0, result
            first = result.value[0]
            assert first["type"] == "RankTimeoutError"
            assert first["missing"] == [victim]
            assert first["timeout_secs"] == LIMIT_SECS
            assert first["secs"] < LIMIT_SECS + ROLL_CALL_SECS + SLACK_SECS


def test_a_rank_that_comes_late_is_named_by_all_itself_included() -> None:
    results = run_ranks(3, body_lost, "late")
    assert [result.returncode for result in results] == [0, 0, 0], results
    for result in results:
        assert result.value[0]["type"] == "RankTimeoutError"
        assert result.value[0]["missing"] == [2]


def close_once_told(ctx: RankContext, comm: Comm) -> None:
    """Rank 1, which has left, stays alive until the other has learned why."""
    comm.close()
    if ctx.rank == 1:
        ctx.wait_for("told", 0)
    else:
        ctx.reach("told")


def body_leaves(ctx: RankContext) -> list[dict[str, Any]]:
    comm = connect(20.0)

    def work() -> None:
        if ctx.rank == 1:
            raise KeyboardInterrupt
        time.sleep(0.3)

    seen = [caught(lambda: comm.together("loading", work))]
    close_once_told(ctx, comm)
    return seen


def test_a_rank_that_is_interrupted_leaves_at_once_and_the_others_know_why() -> None:
    results = run_ranks(2, body_leaves)
    assert [result.returncode for result in results] == [0, 0], results
    other, left = results[0].value[0], results[1].value[0]
    assert left["type"] == "KeyboardInterrupt"
    assert left["secs"] < 1.0
    assert other["type"] == "RankFailedError"
    assert other["failures"] == {"1": "KeyboardInterrupt: no message"}


def body_leaves_between(ctx: RankContext) -> list[dict[str, Any]]:
    from dist_ckpt.comm import _ranks

    comm = connect(20.0)
    assert isinstance(comm, _ranks.RankComm)
    if ctx.rank == 1:
        take_largest, halves = comm._take_largest, []

        def interrupted(words: Any) -> None:
            halves.append(words)
            if len(halves) == 2:
                raise KeyboardInterrupt
            take_largest(words)

        comm._take_largest = interrupted  # type: ignore[method-assign]
    seen = [caught(lambda: comm.agree([0, 1])), caught(lambda: comm.agree([0]))]
    close_once_told(ctx, comm)
    return seen


def test_a_rank_that_is_interrupted_in_the_midst_of_an_agreement_has_left() -> None:
    results = run_ranks(2, body_leaves_between)
    assert [result.returncode for result in results] == [0, 0], results
    (other, _), (left, later) = (result.value for result in results)
    assert left["type"] == "KeyboardInterrupt"
    assert later["type"] == "JobError"
    assert other["type"] == "RankFailedError"
    assert other["failures"] == {"1": "KeyboardInterrupt: no message"}


def body_absent(ctx: RankContext) -> dict[str, Any]:
    if ctx.rank == 1:
        ctx.wait_for("told", 0)
        return {}
    seen = caught(lambda: connect(0.5))
    ctx.reach("told")
    return seen


def test_a_rank_that_never_connects_is_named() -> None:
    result = run_ranks(2, body_absent)[0]
    assert result.value["type"] == "RankTimeoutError"
    assert (result.value["missing"], result.value["phase"]) == ([1], "connecting")
    assert result.value["secs"] < 0.5 + SLACK_SECS


def body_skewed(ctx: RankContext) -> list[int]:
    """One rank is asked to stop and the other runs ahead; both must stop after the same step."""
    from dist_ckpt.signals import SignalWatch

    watch = SignalWatch()
    watch.install()
    comm = connect(20.0)
    ctx.reach("training")
    for step in range(1, 3000):
        time.sleep(0.001 * ctx.rank)
        if comm.agree([watch.stop_signal])[0]:
            return [step, watch.stop_signal]
    return [0, 0]


def test_ranks_stop_after_the_same_step_when_one_of_them_is_signalled() -> None:
    """Case 27: skewed ranks, one signalled."""
    strikes = [Strike("training", 1, signal.SIGTERM, delay_secs=0.2)]
    first, second = run_ranks(2, body_skewed, strikes=strikes)
    assert second.struck == (signal.SIGTERM,)
    assert first.value[0] == second.value[0] > 0
    assert (first.value[1], second.value[1]) == (0, signal.SIGTERM)


# Alone ---------------------------------------------------------------------------------------


def test_one_process_needs_no_group_and_agrees_with_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    comm = connect(1.0)
    assert isinstance(comm, SoloComm)
    assert (comm.rank, comm.world_size) == (0, 1)
    assert comm.agree([3, -1]) == [3, -1]
    assert comm.mean(0.1) == 0.1
    assert comm.gather(b"x") == [b"x"]
    assert comm.broadcast(b"x") == b"x"
    assert comm.together("loading", lambda: 7) == 7
    assert comm.exchange("commit", b"x", lambda reports: b"".join(reports) + b"!") == b"x!"
    with pytest.raises(UsageError):
        comm.broadcast(None)
    with pytest.raises(ZeroDivisionError):
        comm.together("loading", lambda: 1 // 0)
    comm.close()


def test_being_alone_imports_no_torch() -> None:
    """And so makes no call of torch.distributed: there is none to call."""
    script = (
        "import sys; from dist_ckpt.comm import connect; comm = connect(1.0); comm.agree([1]); "
        "comm.exchange('commit', b'', lambda reports: b''); comm.close(); "
        "assert 'torch' not in sys.modules"
    )
    env = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)


@pytest.mark.parametrize("size", ["2", "many"])
def test_a_rank_of_several_without_a_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match="init_process_group") as raised:
        connect(1.0)
    assert raised.value.found == size


@pytest.mark.parametrize("secs", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(secs: float) -> None:
    with pytest.raises(SettingError):
        connect(secs)


def body_one(ctx: RankContext) -> str:
    return type(connect(1.0)).__name__


def test_an_initialised_group_of_one_rank_is_being_alone() -> None:
    assert run_ranks(1, body_one)[0].value == "SoloComm"


def test_the_errors_are_job_errors() -> None:
    assert issubclass(RankFailedError, JobError)


# The end of the process ----------------------------------------------------------------------


def body_exit(ctx: RankContext) -> int:
    import torch

    comm = connect(20.0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return comm.agree([ctx.rank])[0]


def test_a_program_on_gloo_ends_with_status_0_without_closing_anything() -> None:
    """A plain one aborts now and then; `make soak` repeats it."""
    results = run_ranks(2, body_exit, fresh=True)
    assert [result.returncode for result in results] == [0, 0], results


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_programs_on_gloo_end_with_status_0() -> None:
    for _ in range(20):
        test_a_program_on_gloo_ends_with_status_0_without_closing_anything()
