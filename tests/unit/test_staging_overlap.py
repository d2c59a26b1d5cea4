"""The fence between a copy and the optimizer's next update, on streams that only count."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

import pytest
import torch

from dist_ckpt.errors import JobError
from dist_ckpt.layout import plan_layout
from dist_ckpt.staging import Overlap, RankValues, Staged, Staging
from helpers.generating import SAVE_ID, adam_part


class LateStreams:
    """Copies nothing until somebody waits or holds; remembers what happened in which order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._pending: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._count = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
        self._count += 1
        self._pending[self._count] = list(pairs)
        self.calls.append(f"copy {self._count}")
        return self._count

    def hold(self, mark: int) -> None:
        self.calls.append(f"hold {mark}")
        self._flush(mark)

    def wait(self, mark: int) -> None:
        self.calls.append(f"wait {mark}")
        self._flush(mark)

    def _flush(self, mark: int) -> None:
        for target, source in self._pending.pop(mark, []):
            target.copy_(source)


def parts() -> tuple[torch.nn.Parameter, torch.optim.Optimizer, LateStreams, Overlap]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    streams = LateStreams()
    return weight, optimizer, streams, Overlap([optimizer], streams)


def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_the_copy_is_made_before_the_optimizer_changes_anything() -> None:
    weight, optimizer, streams, overlap = parts()
    target = torch.zeros(3)
    overlap.start([(target, weight.detach())])
    assert target.tolist() == [0, 0, 0]  # not yet: it overlaps
    step(weight, optimizer)
    assert target.tolist() == [1, 1, 1]
    assert weight.tolist() == [0, 0, 0]
    assert streams.calls == ["copy 1", "hold 1"]
    assert overlap.settle()
    overlap.wait(0.01)
    assert streams.calls[-1] == "wait 1"


def test_the_background_waits_for_the_hook_and_then_for_the_copy() -> None:
    weight, optimizer, streams, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    ended = threading.Event()

    def background() -> None:
        overlap.wait(10.0)
        ended.set()

    thread = threading.Thread(target=background)
    thread.start()
    try:
        assert not ended.wait(0.05)
        step(weight, optimizer)
        assert ended.wait(5.0)
    finally:
        thread.join()
    assert streams.calls == ["copy 1", "hold 1", "wait 1"]


def test_only_the_first_update_after_a_copy_is_held() -> None:
    weight, optimizer, streams, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    step(weight, optimizer)
    step(weight, optimizer)
    assert streams.calls == ["copy 1", "hold 1"]


def test_with_several_optimizers_the_first_that_steps_is_held() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=1.0) for w in weights]
    streams = LateStreams()
    overlap = Overlap(optimizers, streams)
    targets = [torch.zeros(2), torch.zeros(2)]
    overlap.start([(t, w.detach()) for t, w in zip(targets, weights, strict=True)])
    step(weights[1], optimizers[1])
    assert [t.tolist() for t in targets] == [[1, 1], [1, 1]]
    assert streams.calls == ["copy 1", "hold 1"]


def test_a_copy_without_a_hook_is_dropped_and_over_before_the_arena_is_used_again() -> None:
    weight, _, streams, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    weight.data.zero_()  # an update that no hook told of
    assert not overlap.settle()
    assert streams.calls == ["copy 1", "wait 1"]
    with pytest.raises(JobError, match="dropped"):
        overlap.wait(0.01)
    assert overlap.settle()  # told once
    assert overlap.is_on


def test_three_dropped_copies_in_a_row_turn_overlap_off_with_a_warning() -> None:
    weight, _, _, overlap = parts()
    for _ in range(2):
        overlap.start([(torch.zeros(3), weight.detach())])
        assert not overlap.settle()
    assert overlap.is_on
    overlap.start([(torch.zeros(3), weight.detach())])
    with pytest.warns(UserWarning, match="hasn't fired"):
        assert not overlap.settle()
    assert not overlap.is_on


def test_a_warning_made_an_error_leaves_nothing_waiting() -> None:
    weight, _, _, overlap = parts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            overlap.start([(torch.zeros(3), weight.detach())])
            assert not overlap.settle()
        overlap.start([(torch.zeros(3), weight.detach())])
        with pytest.raises(UserWarning, match="hasn't fired"):
            overlap.settle()
    with pytest.raises(JobError, match="dropped"):
        overlap.wait(0.01)


def test_a_copy_that_stands_makes_the_count_begin_anew() -> None:
    weight, optimizer, _, overlap = parts()
    for _ in range(4):
        for _ in range(2):
            overlap.start([(torch.zeros(3), weight.detach())])
            assert not overlap.settle()
        overlap.start([(torch.zeros(3), weight.detach())])
        step(weight, optimizer)
        assert overlap.settle()
    assert overlap.is_on


def test_no_update_in_time_is_an_error_of_the_waiting_side() -> None:
    weight, _, _, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    with pytest.raises(JobError, match="No optimizer step came within"):
        overlap.wait(0.01)


def test_a_last_copy_stands_where_the_hook_is_known_to_fire() -> None:
    weight, optimizer, _, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    step(weight, optimizer)
    target = torch.full((3,), 9.0)
    overlap.start([(target, weight.detach())])
    overlap.finish()
    overlap.wait(0.01)
    assert target.tolist() == [0, 0, 0]


def test_a_last_copy_is_dropped_where_the_hook_never_fired() -> None:
    weight, _, streams, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    overlap.finish()
    assert streams.calls == ["copy 1", "wait 1"]
    with pytest.raises(JobError, match="dropped"):
        overlap.wait(0.01)


def test_finishing_without_a_copy_does_nothing() -> None:
    _, _, streams, overlap = parts()
    overlap.finish()
    assert overlap.settle()
    assert streams.calls == []


def test_a_copy_that_could_not_be_queued_leaves_nothing_to_wait_for() -> None:
    weight, optimizer, streams, overlap = parts()

    def refuse(pairs: object) -> int:
        raise RuntimeError("out of memory")

    streams.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        overlap.start([(torch.zeros(3), weight.detach())])
    assert overlap.settle()
    step(weight, optimizer)
    assert streams.calls == []


def test_closing_removes_the_hooks() -> None:
    weight, optimizer, streams, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    overlap.close()
    step(weight, optimizer)
    assert streams.calls == ["copy 1"]


def test_on_the_cpu_everything_is_copied_at_the_boundary_even_with_overlap() -> None:
    """Case 32: nothing that the host may change at any time is left for later."""
    weight, optimizer, streams, overlap = parts()
    part = adam_part({"w": weight.detach()})
    layout = plan_layout([[item.spec for item in part.tensors]])
    staging = Staging(overlap)
    values = RankValues(part.encode, part.shared, 0, 1, SAVE_ID)
    staged = staging.stage(layout, part.tensors, values, may_overlap=True)
    assert isinstance(staged, Staged)
    assert staged.shard[8:20].view("<f4").tolist() == [1, 1, 1]
    step(weight, optimizer)
    assert staging.settle()
    staged.wait(0.01)
    assert staged.shard[8:20].view("<f4").tolist() == [1, 1, 1]
    assert streams.calls == ["copy 1", "hold 1", "wait 1"]
    staging.close()
