"""A connection to the store: how long its silence is borne."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dist_ckpt.comm import _store
from dist_ckpt.comm._exchange import GAVE_UP, REPORT, Exchanger
from dist_ckpt.comm._peers import Peer, Place, this_process
from dist_ckpt.comm._store import StoreClient, StoreLostError, View
from dist_ckpt.errors import JobError


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


BIG = bytes(range(8))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut values into parts of 2 bytes, in place of 4 MiB."""
    monkeypatch.setattr(_store, "PART_BYTES", 2)


@pytest.mark.usefixtures("small_parts")
def test_a_mark_over_a_value_of_many_parts_leaves_all_of_them_to_drop() -> None:
    store = HashStore()
    view = View(store, threading.Event())
    view.put("key", BIG)
    assert store.num_keys() == 4
    view.mark("key", GAVE_UP)
    assert view.take("key")[:1] == GAVE_UP
    view.drop("key")
    assert store.num_keys() == 0
    view.mark("key", GAVE_UP)  # with nothing there it is the value
    assert view.take("key") == GAVE_UP


@pytest.mark.usefixtures("small_parts")
def test_who_has_begun_to_take_a_value_finds_all_of_it_below_a_mark() -> None:
    """Rank 0 comes late and reads a report in the very moment when its rank gives up."""

    class Marking:
        """A store in which the mark is set between the head and the other parts."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            value: bytes = store.get(key)
            if key == "key":
                View(store, threading.Event()).mark("key", GAVE_UP)
            return value

    store = HashStore()
    View(store, threading.Event()).put("key", BIG)
    reader = View(Marking(), threading.Event())  # type: ignore[arg-type]
    assert reader.take("key") == BIG
    assert reader.take("key")[:1] == GAVE_UP


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("leader", ["late", "gone"])
def test_a_rank_that_gives_up_leaves_no_parts_of_its_report_behind(leader: str) -> None:
    """Those of a late rank 0 go when it sweeps; of one that is gone nobody would clear them."""
    store = HashStore()
    me = this_process(1)
    first = Peer(0, me.host if leader == "gone" else "elsewhere", me.pid, "another start")
    assert first.state() == {"gone": "gone", "late": "unknown"}[leader]
    client = StoreClient(lambda: store, quiet_secs=30.0)
    try:
        follower = Exchanger(client, "job", Place(1, (first, me), 0.5))
        with pytest.raises(JobError):
            follower.exchange("save", BIG, lambda _: b"")
        assert store.get("job/save/1/report/1")[2:3] == GAVE_UP
        if leader == "gone":
            assert store.num_keys() == 1
            return
        keys = [f"job/save/1/report/1{part}" for part in ("", "#1", "#2", "#3", "#4")]
        assert store.num_keys() == len(keys)
        assert store.check(keys)
        # Rank 0 comes at last, and goes on with the next exchange.
        late = Exchanger(client, "job", Place(0, (first, me), 0.5))
        with pytest.raises(JobError, match="Rank 1 didn't answer"):
            late.exchange("save", b"", lambda _: b"")
        View(store, threading.Event()).put("job/save/2/report/1", REPORT)
        assert late.exchange("save", b"", lambda _: b"") == b""
        assert not [key for key in keys if store.check([key])]
    finally:
        client.close()
