"""The collector waits for a moment, and is as it was after."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

from dist_ckpt.collecting import without_collection


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_nothing_is_collected_meanwhile_and_it_is_after() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        ring = weakref.ref(Ring())
        _ = [[] for _ in range(100_000)]
        assert ring() is not None
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert ring() is None


def test_a_program_that_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_again_after_an_error() -> None:
    @without_collection()
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert gc.isenabled()


def test_threads_one_inside_the_other_leave_it_on() -> None:
    """The second comes while the first is inside, and stays longer; then many, at random."""
    inside, leave = threading.Event(), threading.Event()

    def second() -> None:
        with without_collection():
            inside.set()
            assert leave.wait(30)
            assert not gc.isenabled()

    thread = threading.Thread(target=second)
    with without_collection():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()  # the second is inside still
    leave.set()
    thread.join()
    assert gc.isenabled()

    def many() -> None:
        for _ in range(3000):
            with without_collection():
                pass

    threads = [threading.Thread(target=many) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert gc.isenabled()


def test_a_child_forked_meanwhile_has_it_on() -> None:
    with without_collection():
        child = os.fork()
        if child == 0:
            was_on = gc.isenabled()
            with without_collection():
                is_off = not gc.isenabled()
            os._exit(0 if was_on and is_off and gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert gc.isenabled()
