"""A connection to the store: how long its silence is borne."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dist_ckpt.comm._store import StoreClient, StoreLostError


@contextmanager
def held(*, quiet_secs: float) -> Iterator[tuple[StoreClient, threading.Event]]:
    """Yield a client whose connection isn't made before the event is set."""
    let_go = threading.Event()

    def make_store() -> Store:
        assert let_go.wait(30)
        return HashStore()

    client = StoreClient(make_store, quiet_secs=quiet_secs)
    try:
        yield client, let_go
    finally:
        let_go.set()
        client.close()


def later(act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.3, act)
    timer.start()
    return timer


def test_a_connection_that_takes_longer_than_the_limit_is_a_lost_store() -> None:
    with held(quiet_secs=0.1) as (client, _), pytest.raises(StoreLostError, match=r"for 0\.1 s"):
        client.call(lambda _: 5)


def test_the_first_call_may_have_a_longer_limit_than_the_others() -> None:
    """A start on a busy machine; with the short limit it was refused."""
    with held(quiet_secs=0.1) as (client, let_go):
        timer = later(let_go.set)
        assert client.call(lambda _: 5, quiet_secs=30.0) == 5
        timer.join()
