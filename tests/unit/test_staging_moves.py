"""Copies that threads share: the same bytes, nobody left behind, quick or slow threads alike."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch

from dist_ckpt.staging import _moves
from dist_ckpt.staging._moves import Moves

PIECE = _moves._PIECE_BYTES


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_moves, "_threads", lambda: 3)


def moved(*sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Moves]:
    torch.manual_seed(1)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    moves = Moves()
    for target, source in zip(targets, sources, strict=True):
        moves.add(target, source)
    return sources, targets, moves


def same(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


def test_every_byte_comes_over_whatever_the_sizes_and_again_when_they_have_changed() -> None:
    sources, targets, moves = moved(0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17)
    moves.run()
    assert same(sources, targets)
    for source in sources:
        source.add_(1)
    assert not same(sources, targets)
    moves.run()
    assert same(sources, targets)


def test_a_thread_that_is_slow_leaves_the_rest_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, taken = ctypes.memmove, {"MainThread": 0, "dist-ckpt-io": 0}
    helped, rest = threading.Event(), threading.Event()

    def memmove(*args: Any) -> int:
        taken[threading.current_thread().name] += 1
        if threading.current_thread() is threading.main_thread():
            assert helped.wait(30)  # a helper has a piece, and keeps it
            if sum(taken.values()) == 40:
                rest.set()
        else:
            helped.set()
            assert rest.wait(30)
        return real(*args)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    sources, targets, moves = moved(40 * PIECE)
    moves.run()
    assert same(sources, targets)
    assert sum(taken.values()) == 40
    assert 1 <= taken["dist-ckpt-io"] <= 2  # one each, while the training thread did the rest


def test_no_thread_outlives_the_copy_and_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    sources, targets, moves = moved(9 * PIECE)
    moves.run()
    assert threading.active_count() == before

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sources[0].add_(1)
    moves.run()
    assert same(sources, targets)


def test_an_interrupt_comes_out_once_every_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ctypes.memmove

    def memmove(*args: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    sources, targets, moves = moved(12 * PIECE)
    with pytest.raises(KeyboardInterrupt):
        moves.run()
    assert not same(sources, targets)
    assert not [t for t in threading.enumerate() if t.name == "dist-ckpt-io"]
