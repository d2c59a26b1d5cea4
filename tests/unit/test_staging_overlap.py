"""The fence between a copy and the optimizer's next update, on streams that only count."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.errors import JobError
from dist_ckpt.layout import plan_layout
from dist_ckpt.staging import CudaStreams, Overlap, RankValues, Staged, Staging, _arena, _staged
from helpers.generating import SAVE_ID, Part, adam_part, part_of


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


def test_what_was_written_into_before_the_update_is_dropped_and_nothing_overlaps_any_more() -> None:
    """Weights swapped for an evaluation and put back: only torch's count of writes tells."""
    weight, optimizer, streams, overlap = parts()
    target = torch.zeros(3)
    overlap.start([(target, weight.detach())], ["model/w"])
    with torch.no_grad():
        weight.fill_(9.0)
        streams.wait(1)  # the side stream gets its turn during the evaluation
        weight.fill_(1.0)
    step(weight, optimizer)
    step(weight, optimizer)  # a second update in the same body clears nothing
    assert target.tolist() == [9, 9, 9], "the copy is torn"
    with pytest.warns(UserWarning, match=r"model/w was changed before the optimizer's step"):
        assert not overlap.settle()
    assert not overlap.is_on
    with pytest.raises(JobError, match=r"dropped: model/w was changed"):
        overlap.wait(0.01)
    assert overlap.settle()  # told once


def test_a_write_into_an_optimizers_own_state_is_seen_too() -> None:
    weight, optimizer, _, overlap = parts()
    moment = torch.ones(3)
    overlap.start([(torch.zeros(3), weight.detach()), (torch.zeros(3), moment)], ["w", "moment"])
    moment.zero_()
    step(weight, optimizer)
    with pytest.warns(UserWarning, match="moment was changed"):
        assert not overlap.settle()


def test_a_last_copy_that_was_written_into_is_dropped() -> None:
    weight, optimizer, _, overlap = parts()
    overlap.start([(torch.zeros(3), weight.detach())])
    step(weight, optimizer)
    overlap.start([(torch.zeros(3), weight.detach())])
    with torch.no_grad():
        weight.fill_(9.0)
    overlap.finish()
    with pytest.raises(JobError, match="dropped: a tensor was changed"):
        overlap.wait(0.01)


def test_a_parameter_pointed_at_other_memory_leaves_the_copy_as_it_was() -> None:
    weight, optimizer, _, overlap = parts()
    target = torch.zeros(3)
    overlap.start([(target, weight.detach())])
    weight.data = torch.full((3,), 9.0)
    step(weight, optimizer)
    assert overlap.settle()
    assert target.tolist() == [1, 1, 1]


def test_state_made_in_inference_mode_is_copied_though_nobody_counts_its_writes() -> None:
    weight, optimizer, _, overlap = parts()
    with torch.inference_mode():
        moment = torch.ones(4)
    into = torch.zeros(4)
    overlap.start([(into, moment)])
    step(weight, optimizer)
    overlap.wait(5.0)
    assert into.tolist() == [1.0] * 4


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


class OnDevice(torch.Tensor):
    """Says that it lies on a CUDA device."""

    is_cuda = True


class Averaging(nn.Module):
    """MoCo: the key encoder follows the query encoder in forward, before the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(2, 2), nn.Linear(2, 2)
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(query, 0.5)
        out: torch.Tensor = (self.query(x) - self.key(x)).square().sum()
        return out


@pytest.mark.parametrize("has_all", [False, True], ids=["its own", "all parameters"])
def test_weights_that_no_optimizer_updates_are_copied_at_the_boundary(
    monkeypatch: pytest.MonkeyPatch, has_all: bool
) -> None:
    part = _staged.part_of
    monkeypatch.setattr(_arena, "part_of", lambda *of: part(*of).as_subclass(OnDevice))
    model = Averaging()
    given = model if has_all else model.query
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1, momentum=0.9)
    streams = LateStreams()
    overlap = Overlap([optimizer], streams)
    captured = Captured(model, optimizer)
    model(torch.ones(2)).backward()
    optimizer.step()
    held = part_of(captured)
    layout = plan_layout([[item.spec for item in held.tensors]])
    staging = Staging(overlap)
    values = RankValues(held.encode, held.shared, 0, 1, SAVE_ID)
    before = {item.spec.key: item.tensor.clone() for item in held.tensors}
    assert isinstance(staging.stage(layout, held.tensors, values, may_overlap=True), Staged)
    model(torch.ones(2)).backward()
    assert not torch.equal(before["model/key.weight"], model.key.weight), "forward changed it"
    optimizer.step()
    assert staging.settle()
    assert streams.calls == ["copy 1", "hold 1"]
    staged = {owned.key: target for owned, target in staging._targets}
    assert staged.keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(staged[key], tensor), key
    staging.close()


def test_what_was_made_in_inference_mode_is_copied_at_the_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = _staged.part_of
    monkeypatch.setattr(_arena, "part_of", lambda *of: part(*of).as_subclass(OnDevice))
    weight, optimizer, streams, overlap = parts()
    with torch.inference_mode():
        moment = torch.ones(3)
    live = [replace(item, is_updated=True) for item in adam_part({"w": weight.detach()}).tensors]
    held = Part(
        [replace(item, tensor=moment) if "/exp_avg" in item.spec.key else item for item in live]
    )
    layout = plan_layout([[item.spec for item in held.tensors]])
    staging = Staging(overlap)
    values = RankValues(held.encode, held.shared, 0, 1, SAVE_ID)
    assert isinstance(staging.stage(layout, held.tensors, values, may_overlap=True), Staged)
    with torch.inference_mode():
        moment.zero_()
    step(weight, optimizer)
    assert staging.settle()
    assert streams.calls == ["copy 1", "hold 1"]  # the others' copy overlaps
    staged = {owned.key: target for owned, target in staging._targets}
    moments = [key for key in staged if "/exp_avg" in key]
    assert len(moments) == 2
    assert [staged[key].tolist() for key in moments] == [[1.0] * 3] * 2
    staging.close()


# Streams of several devices --------------------------------------------------------------------


class FakeStream:
    """Runs what is queued on it when somebody waits for a place behind it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.queue.append(other.run)

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(event.synchronize)

    def run(self) -> None:
        waiting, self.queue = self.queue, []
        for work in waiting:
            work()


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.synchronize = stream.run


class FakeSource:
    """A tensor on a device: reads and writes are queued on that device's current stream."""

    def __init__(self, machine: FakeMachine, device: torch.device, value: int) -> None:
        self.machine, self.device, self.value = machine, device, value
        self.readers: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.readers.append(stream)


class FakeTarget:
    value = 0

    def copy_(self, source: FakeSource, *, non_blocking: bool) -> None:
        assert non_blocking
        stream = source.machine.current_stream(source.device)
        stream.queue.append(lambda: setattr(self, "value", source.value))


class FakeMachine:
    """Two devices of which the first is the current one."""

    def __init__(self) -> None:
        self.here = torch.device("cuda", 0)
        self.current: dict[torch.device, FakeStream] = {}

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        device = device or self.here
        if device not in self.current:
            self.current[device] = FakeStream(device)
        return self.current[device]

    def new_stream(self, device: torch.device | None = None) -> FakeStream:
        return FakeStream(device or self.here)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        here, before = self.here, self.current_stream(stream.device)
        self.here, self.current[stream.device] = stream.device, stream
        yield
        self.here, self.current[stream.device] = here, before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    return fake


def test_copies_from_a_device_that_is_not_the_current_one_are_waited_for(
    machine: FakeMachine,
) -> None:
    devices = [torch.device("cuda", index) for index in (0, 1)]
    sources = [FakeSource(machine, device, 5) for device in devices]
    targets = [FakeTarget(), FakeTarget()]
    streams = CudaStreams()
    mark = streams.copy(list(zip(targets, sources, strict=True)))  # type: ignore[arg-type]
    assert [target.value for target in targets] == [0, 0]  # not yet: they overlap
    streams.wait(mark)
    assert [target.value for target in targets] == [5, 5]
    assert [[s.device for s in source.readers] for source in sources] == [[d] for d in devices]


def test_an_update_on_each_device_is_held_behind_the_copies_from_it(machine: FakeMachine) -> None:
    devices = [torch.device("cuda", index) for index in (0, 1)]
    sources = [FakeSource(machine, device, 0) for device in devices]
    targets = [FakeTarget(), FakeTarget()]
    for source in sources:  # what the training has queued before comes first
        queue = machine.current_stream(source.device).queue
        queue.append(lambda source=source: setattr(source, "value", 5))  # type: ignore[misc]
    streams = CudaStreams()
    mark = streams.copy(list(zip(targets, sources, strict=True)))  # type: ignore[arg-type]
    streams.hold(mark)
    for source in sources:
        stream = machine.current_stream(source.device)
        stream.queue.append(lambda source=source: setattr(source, "value", 6))  # type: ignore[misc]
        stream.run()
    assert [source.value for source in sources] == [6, 6]
    assert [target.value for target in targets] == [5, 5]
