"""Work by a few threads: all of it, by nobody else, and by nobody after."""

from __future__ import annotations

import threading
import time

import pytest

from dist_ckpt.storage import for_each


def test_every_item_is_handled_once_whatever_the_threads() -> None:
    for threads in (1, 2, 5):
        done: list[int] = []
        for_each(range(100), lambda: done.append, threads)  # noqa: B023 - used within the turn
        assert sorted(done) == list(range(100))


def test_a_helper_whose_start_was_interrupted_does_nothing_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = threading.Thread.start
    late: list[threading.Thread] = []
    may_go_on = threading.Event()

    def start(self: threading.Thread) -> None:
        run = self.run

        def delayed() -> None:
            assert may_go_on.wait(30)
            run()

        self.run = delayed  # type: ignore[method-assign]
        late.append(self)
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for_each(range(20), lambda: done.append, 3)
    assert len(late) == 1
    may_go_on.set()
    late[0].join(30)
    assert not late[0].is_alive()
    assert done == []


def test_a_helper_at_work_is_waited_for_though_its_start_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = threading.Thread.start
    at_work, begun = threading.Event(), threading.Event()

    def start(self: threading.Thread) -> None:
        real(self)
        assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    ended: list[int] = []

    def make() -> object:
        def work(item: int) -> None:
            begun.set()
            at_work.wait(0.3)
            ended.append(item)

        return work

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for_each(range(20), make, 2)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.3
    assert ended == [0]  # the piece in hand, and nothing after the interrupt
