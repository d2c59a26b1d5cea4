"""Several ranks: collectives on our own gloo group, exchanges beside them. Layer 2, network I/O.

Errors of gloo come out of one seam, `RankComm._collective`, as errors that name ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from dist_ckpt.comm._exchange import Exchanger, kind_of, text_of
from dist_ckpt.comm._exit import install_exit_guard
from dist_ckpt.comm._peers import Peer, Place, this_process
from dist_ckpt.comm._rollcall import (
    ROLL_CALL_SECS,
    START_AGAIN,
    Trouble,
    call_roll,
    explain_lost_store,
    failed_error,
    leave_note,
    timeout_error,
)
from dist_ckpt.comm._store import StoreClient, StoreLostError, View
from dist_ckpt.errors import JobError, UsageError

__all__ = ["RankComm", "connect_ranks"]

T = TypeVar("T")

PREFIX = "dist_ckpt"
NONCE_BYTES = 8
_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment] # torch's stubs disagree


def connect_ranks(timeout_secs: float) -> RankComm:
    """Return the `Comm` of this rank once all ranks are here. Collective. See `connect`."""
    install_exit_guard()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    prefix = _prefix(os.environ)

    def make_store() -> Store:
        # A clone has a connection of its own: a wait on the shared one would hold up the main
        # thread.
        store: Any = _get_default_store()  # torch's type stubs don't know clone
        return PrefixStore(prefix, store.clone())

    client = StoreClient(make_store, quiet_secs=timeout_secs)
    # The roll call comes when something is lost already: it must not wait long for a store that may
    # be lost too, nor stand in line behind an exchange.
    roll_client = StoreClient(make_store, quiet_secs=min(timeout_secs, 2 * ROLL_CALL_SECS))
    try:
        peers = _meet(client, rank, num_ranks, timeout_secs)
        # Connected now: when it is needed, the host may be gone, and connecting tries for long. It
        # takes its time where the machine is busy: the limit of all else counts here.
        roll_client.call(lambda store: store.has([]), quiet_secs=timeout_secs)
        return RankComm(Place(rank, peers, timeout_secs), client, roll_client)
    except BaseException:
        client.close()
        roll_client.close()
        raise


def _prefix(environ: Mapping[str, str]) -> str:
    """Return what all keys of this attempt begin with, the same on every rank."""
    # The store of an agent keeps what died ranks have left. One of rank 0's own is new, and agents
    # of several nodes count restarts apart.
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{PREFIX}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if shared else PREFIX


def _meet(client: StoreClient, rank: int, num_ranks: int, timeout_secs: float) -> tuple[Peer, ...]:
    """Return all ranks' processes once all have come; names who hasn't."""
    keys = [f"arrival/{number}" for number in range(num_ranks)]
    me = this_process(rank)

    def meet(store: View) -> list[bytes | None]:
        store.put(keys[rank], me.encode())
        store.poll(lambda: store.has(keys), timeout_secs)
        return [store.take(key) if store.has([key]) else None for key in keys]

    try:
        found = client.call(meet)
    except StoreLostError as lost:
        raise explain_lost_store(lost, "connecting", Place(rank, (me,), timeout_secs)) from lost
    missing = [number for number, data in enumerate(found) if data is None]
    if missing:
        raise timeout_error("connecting", missing, timeout_secs)
    return tuple(Peer.parse(data) for data in found if data is not None)


class RankComm:
    """The `Comm` of one rank of several. Built by `connect_ranks` only; building it is collective.

    Args:
        place: This rank among all.
        client: The store for exchanges.
        roll_client: The store for the roll call after a failure.
    """

    def __init__(
        self,
        place: Place,
        client: StoreClient,
        roll_client: StoreClient,
    ) -> None:
        self.rank = place.rank
        self.world_size = len(place.peers)
        self._place = place
        self._client = client
        self._roll_client = roll_client
        self._thread = threading.get_ident()
        self._lost = ""
        self._nonce = "connecting"
        self._group: dist.ProcessGroup | None = None
        # Reused by every agreement; the arrays are views of the tensors, and far cheaper to fill.
        self._word = torch.zeros(1, dtype=torch.int64)
        self._word_view = self._word.numpy()
        self._words = torch.zeros(1, dtype=torch.int64)
        self._view = self._words.numpy()
        self._group = self._collective("connecting", self._make_group)
        nonce = self.broadcast(secrets.token_hex(NONCE_BYTES).encode(), phase="connecting")
        self._nonce = nonce.decode()
        self._exchanger = Exchanger(client, self._nonce, place)
        # Connected: nobody reads it any more, since all had to be through to make the group.
        self._forget_arrival()

    # Collectives ----------------------------------------------------------------------------------

    def agree(self, values: Sequence[int], *, phase: str = "agreement") -> list[int]:
        """Return the element-wise maximum over all ranks. See `Comm.agree`."""
        # As one operation: who is interrupted between its two halves has left the others.
        return self._collective(phase, lambda: self._largest(values))

    def mean(self, value: float, *, phase: str = "mean") -> float:
        """Return the mean over all ranks. See `Comm.mean`."""
        total = torch.tensor([value], dtype=torch.float64)
        self._collective(phase, lambda: dist.all_reduce(total, group=self._group))
        return float(total.item()) / self.world_size

    def gather(self, payload: bytes, *, phase: str = "gather") -> list[bytes]:
        """Return every rank's payload. See `Comm.gather`."""
        sizes = self._all_gather(phase, torch.tensor([len(payload)], dtype=torch.int64))
        sizes_bytes = [int(size.item()) for size in sizes]
        # gloo gathers equal lengths only: pad to the longest.
        mine = torch.zeros(max(*sizes_bytes, 1), dtype=torch.uint8)
        mine[: len(payload)] = _as_tensor(payload)
        padded = self._all_gather(phase, mine)
        return [
            data[:size].numpy().tobytes() for data, size in zip(padded, sizes_bytes, strict=True)
        ]

    def broadcast(self, payload: bytes | None, *, phase: str = "broadcast") -> bytes:
        """Return rank 0's payload. See `Comm.broadcast`."""
        # None is told as well: the others must not wait for what rank 0 hasn't got.
        size = torch.tensor([-1 if payload is None else len(payload)], dtype=torch.int64)
        self._send_from_first(phase, size)
        size_bytes = int(size.item())
        if size_bytes < 0:
            raise UsageError(f"Rank 0 had nothing to send in {phase}.", phase=phase)
        data = torch.zeros(size_bytes, dtype=torch.uint8)
        if self.rank == 0 and payload:
            data[:] = _as_tensor(payload)
        if size_bytes:
            self._send_from_first(phase, data)
        return data.numpy().tobytes()

    def together(self, phase: str, fn: Callable[[], T]) -> T:
        """Return ``fn()`` once it succeeded on all ranks. See `Comm.together`."""
        self._check_usable(phase)
        try:
            value = fn()
        except KeyboardInterrupt as error:
            # A person wants out now: no waiting for ranks that may be far behind.
            self._leave(error)
            raise
        except BaseException as error:
            with suppress(JobError):  # this rank's own error is what counts here
                self.agree([1], phase=phase)
                self._tell_failures(phase, error)
            raise
        if self.agree([0], phase=phase) != [0]:
            failures, kinds = self._tell_failures(phase, None)
            raise failed_error(phase, failures, kinds)
        return value

    def exchange(self, phase: str, report: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return the outcome that rank 0 decided on. See `Comm.exchange`."""
        return self._exchanger.exchange(phase, report, decide)

    def close(self) -> None:
        """Our group and threads are gone. See `Comm.close`."""
        self._lost = self._lost or "this rank closed it"
        self._drop_group()
        self._client.close()
        self._roll_client.close()

    # Steps ----------------------------------------------------------------------------------------

    def _make_group(self) -> dist.ProcessGroup:
        limit = timedelta(seconds=self._place.timeout_secs)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        return group

    def _forget_arrival(self) -> None:
        rank = self.rank
        self._client.call(lambda store: store.drop(f"arrival/{rank}"))

    def _largest(self, values: Sequence[int]) -> list[int]:
        # gloo takes half as long for one number as for four: mostly nobody asks for anything.
        is_short = len(values) == 1
        self._word_view[0] = values[0] if is_short else any(values)
        self._take_largest(self._word)
        if is_short or not self._word_view[0]:
            return [int(self._word_view[0])] * len(values)
        if len(values) != len(self._view):
            self._words = torch.zeros(len(values), dtype=torch.int64)
            self._view = self._words.numpy()
        self._view[:] = values
        self._take_largest(self._words)
        return [int(value) for value in self._view]

    def _take_largest(self, words: torch.Tensor) -> None:
        group = self._group
        if group is None or not dist.is_initialized():
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)  # says what is wrong
        else:
            # What `dist.all_reduce` calls, without a third of its time.
            group.allreduce([words], _LARGEST).wait()

    def _all_gather(self, phase: str, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._collective(phase, lambda: dist.all_gather(found, mine, group=self._group))
        return found

    def _send_from_first(self, phase: str, data: torch.Tensor) -> None:
        self._collective(phase, lambda: dist.broadcast(data, src=0, group=self._group))

    def _tell_failures(
        self, phase: str, error: BaseException | None
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Return all ranks' failures and their kinds. Collective."""
        mine = None if error is None else [text_of(error), kind_of(error)]
        told = [json.loads(data) for data in self.gather(json.dumps(mine).encode(), phase=phase)]
        failed = {number: item for number, item in enumerate(told) if item is not None}
        return {r: text for r, (text, _) in failed.items()}, {r: k for r, (_, k) in failed.items()}

    # The seam -------------------------------------------------------------------------------------

    def _collective(self, phase: str, operation: Callable[[], T]) -> T:
        """Return what the operation returned; gloo's errors become errors that name ranks."""
        self._check_usable(phase)
        begun = time.monotonic()
        try:
            return operation()
        except RuntimeError as error:
            text = str(error).partition("\n")[0][:200]
            how = "timeout" if "timed out" in str(error).lower() else "closed"
            self._lost = f"it failed in {phase}"
            # Closing our connections tells ranks that wait for us rather than for the lost one.
            self._drop_group()
            trouble = Trouble(how, time.monotonic() - begun, text)
            raise self._call_roll(phase, trouble) from error
        except BaseException as error:
            # KeyboardInterrupt, or what a signal handler of the user raised.
            self._leave(error)
            raise

    def _call_roll(self, phase: str, trouble: Trouble) -> JobError:
        return call_roll(
            self._roll_client,
            f"{self._nonce}/roll",
            phase,
            trouble,
            self._place,
        )

    def _leave(self, error: BaseException) -> None:
        """The others learn why this rank takes no further part, now or when they next look."""
        self._lost = f"this rank left it ({text_of(error)})"
        leave_note(self._roll_client, f"{self._nonce}/roll", self.rank, text_of(error))
        self._drop_group()

    def _check_usable(self, phase: str) -> None:
        if threading.get_ident() != self._thread:
            raise UsageError(
                f"{phase.capitalize()} was called on another thread than the one that connected; "
                "two threads in one group hang.",
                next_step="Use exchange on background threads.",
            )
        if self._lost:
            raise JobError(
                f"The group of the ranks is lost: {self._lost}.",
                next_step=START_AGAIN,
                phase=phase,
            )

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        # The user's program may have destroyed all groups before us, ours among them.
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)


def _as_tensor(payload: bytes) -> torch.Tensor:
    # A copy: torch warns about read-only memory.
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
