"""The collector waits for a moment, and is as it was after."""

from __future__ import annotations

import gc
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
