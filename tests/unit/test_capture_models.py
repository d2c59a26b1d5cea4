"""Names, wrappers, ties and buffers of models; what a model keeps and what it can't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.errors import MismatchError, UnsupportedValueError, UsageError
from dist_ckpt.slices import Role
from helpers.capturing import everything, prepare, restore, save


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def captured_of(model: nn.Module, **parts: Any) -> Captured:
    return Captured(model, sgd(model), **parts)


class Inner(nn.Module):
    """A user's own submodule called `module`, and one called `_orig_mod`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._orig_mod(self.module(x))
        return out


INNER_NAMES = ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]


def test_a_users_submodule_called_module_keeps_its_name() -> None:
    """Case 51."""
    assert list(captured_of(Inner()).parameters()) == INNER_NAMES


def test_wrappers_are_taken_off_by_type_in_any_nesting() -> None:
    """Case 51: names are the plain model's whatever is around it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled: Any = torch.compile(Inner(), backend="eager")
    assert type(compiled).__name__ == "OptimizedModule"
    parallel = nn.DataParallel(Inner())
    both: Any = torch.compile(nn.DataParallel(checkpoint_wrapper(Inner())), backend="eager")
    for model in (compiled, parallel, both):
        assert list(captured_of(model).parameters()) == INNER_NAMES
    inner: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    part = nn.Sequential(inner, nn.Linear(1, 1))
    assert list(captured_of(part).parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_point_saved_by_a_wrapped_model_restores_into_a_plain_one() -> None:
    plain = Inner()
    wrapped: Any = torch.compile(Inner(), backend="eager")
    saved = save(captured_of(wrapped))
    restore(captured_of(plain), saved)
    assert torch.equal(plain.module.weight, wrapped._orig_mod.module.weight)


_DDP = """
import gc, os, sys
import torch, torch.distributed as dist
from torch import nn
from dist_ckpt.capture import Captured
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
net.module = nn.Linear(2, 1)
ddp = nn.parallel.DistributedDataParallel(net)
names = []
for model in (net, ddp, torch.compile(ddp, backend="eager"),
              nn.parallel.DistributedDataParallel(torch.compile(net, backend="eager"))):
    captured = Captured(model, torch.optim.AdamW(model.parameters()))
    names.append([item.spec.key for item in captured.tensors()])
assert names[0] == names[1] == names[2] == names[3], names
assert "model/module.weight" in names[0]
print("checked", len(names[0]), flush=True)
os._exit(0)
"""


def test_ddp_and_compile_in_both_nestings_give_the_plain_names(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DDP, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "checked 9\n"), done.stderr


class Tied(nn.Module):
    embed: Any
    head: Any
    mask: torch.Tensor

    def __init__(self, *, head_first: bool = False) -> None:
        super().__init__()
        for name in ("head", "embed") if head_first else ("embed", "head"):
            layer = nn.Linear(3, 4, bias=False) if name == "head" else nn.Embedding(4, 3)
            setattr(self, name, layer)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("same_mask", self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(x))
        return out


def test_tied_tensors_are_kept_once_under_their_first_name() -> None:
    captured = captured_of(Tied())
    assert list(captured.parameters()) == ["embed.weight"]
    assert captured.aliases() == {"head.weight": "embed.weight", "same_mask": "mask"}
    assert [item.spec.key for item in captured.tensors()] == ["model/embed.weight", "model/mask"]


def test_ties_hold_after_a_restore_and_training_goes_on_bit_equal() -> None:
    def train(model: nn.Module, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = model(torch.randint(4, (5,))).square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    torch.manual_seed(1)
    one, two = Tied(), Tied(head_first=True)
    first_optimizer, second_optimizer = sgd(one), sgd(two)
    first, second = Captured(one, first_optimizer), Captured(two, second_optimizer)
    train(one, first_optimizer)
    saved = save(first)
    losses = [train(one, first_optimizer) for _ in range(3)]
    # Declared the other way round, its kept name is the other one: the same structure.
    assert second.aliases() == {"embed.weight": "head.weight", "same_mask": "mask"}
    assert second.structure().digest() == first.structure().digest()
    restore(second, saved)
    assert two.head.weight is two.embed.weight
    assert [train(two, second_optimizer) for _ in range(3)] == losses


def test_a_tie_on_one_side_only_is_a_mismatch() -> None:
    tied, loose = Tied(), Tied()
    loose.head.weight = nn.Parameter(loose.embed.weight.detach().clone())
    one, two = captured_of(tied), captured_of(loose)
    assert one.structure().digest() != two.structure().digest()
    with pytest.raises(MismatchError, match=r"model/head\.weight") as caught:
        prepare(two, save(one))
    assert "model/head.weight" in caught.value.missing
    with pytest.raises(MismatchError, match=r"saved on its own, here tied to model/embed\.weight"):
        prepare(one, save(two))


def test_buffers_go_along_and_transient_ones_stay_out() -> None:
    class Net(nn.Module):
        cache: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = nn.BatchNorm1d(3)
            self.register_buffer("cache", torch.zeros(1), persistent=False)
            self.register_buffer("nothing", None)
            self.register_buffer("empty", torch.zeros(0, 4))

    one, two = Net(), Net()
    optimizer = sgd(one)
    one.norm(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    saved = save(Captured(one, optimizer))
    buffers = [spec.key for spec in saved.specs.values() if spec.role is Role.BUFFER]
    assert buffers == [
        "model/empty", "model/norm.running_mean", "model/norm.running_var",
        "model/norm.num_batches_tracked",
    ]  # fmt: skip
    two.cache.fill_(7)
    restore(captured_of(two), saved)
    assert torch.equal(two.norm.running_mean, one.norm.running_mean)
    assert two.norm.num_batches_tracked.item() == 1
    assert two.cache.item() == 7


def test_a_buffer_that_was_replaced_is_seen_at_once() -> None:
    net = nn.BatchNorm1d(2)
    captured = captured_of(net)
    net.running_mean = torch.tensor([3.0, 4.0])
    live = {item.spec.key: item.tensor for item in captured.tensors()}
    assert live["model/running_mean"].tolist() == [3.0, 4.0]


def test_names_with_slashes_and_percents_are_escaped() -> None:
    net = nn.Module()
    net.register_parameter("a/b%c", nn.Parameter(torch.zeros(2)))
    optimizer = sgd(net)
    net._parameters["a/b%c"].sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    captured = Captured(net, optimizer)
    saved = save(captured)
    assert list(saved.specs) == ["model/a%2Fb%25c", "optimizer/a%2Fb%25c/momentum_buffer"]
    restore(captured, saved)
    assert save(captured) == saved


class Counting(nn.Module):
    """Keeps a plain value and a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls, self.history = 0, torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.history = state["calls"], state["history"]


def test_extra_state_of_modules_is_kept() -> None:
    one: Any = nn.Sequential(Counting(), Counting())
    two: Any = nn.Sequential(Counting(), Counting())
    one[1].calls, one[1].history = 5, torch.tensor([1.0, 2.0])
    saved = save(captured_of(one))
    assert [item[0] for item in saved.own] == [
        "extra_state/0._extra_state/history", "extra_state/1._extra_state/history",
    ]  # fmt: skip
    restore(captured_of(two), saved)
    assert (two[0].calls, two[1].calls) == (0, 5)
    assert two[1].history.tolist() == [1.0, 2.0]
    with pytest.raises(MismatchError, match=r"extra_state\.2\._extra_state"):
        restore(captured_of(nn.Sequential(Counting(), Counting(), Counting())), saved)


def test_the_structure_does_not_depend_on_the_order_of_declaration() -> None:
    def net(names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(2, 3) for name in names})

    one, two = captured_of(net("ab")).structure(), captured_of(net("ba")).structure()
    assert one != two
    assert one.digest() == two.digest()
    assert one.digest() != captured_of(net("ac")).structure().digest()
    assert one.parameters[0] == ("a.weight", "float32", (3, 2))
    assert type(one).from_json(one.to_json()) == one
    wide = captured_of(net("ab").double()).structure()
    assert wide.digest() != one.digest()


def test_missing_unexpected_and_different_tensors_are_listed_and_nothing_changes() -> None:
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    two = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    saved = save(captured_of(one))
    live = captured_of(two)
    before = everything(live)
    with pytest.raises(MismatchError) as caught:
        prepare(live, saved)
    error = caught.value
    assert error.unexpected == ["model/c.weight", "model/c.bias"]
    assert error.missing == ["model/d.weight", "model/d.bias"]
    assert "model/a.weight (saved float32 (2, 2), here float32 (3, 2))" in error.different
    assert "model/b.weight (saved float32 (2, 2), here float64 (2, 2))" in error.different
    assert "model/b.weight" in str(error)
    assert everything(live) == before


def test_a_long_list_of_differences_shows_twenty() -> None:
    one, two = nn.ParameterDict(), nn.ParameterDict()
    for index in range(30):
        one[f"p{index:02}"] = nn.Parameter(torch.zeros(1))
    two["q"] = nn.Parameter(torch.zeros(1))
    with pytest.raises(MismatchError, match=r"p19, and 10 more") as caught:
        prepare(captured_of(two), save(captured_of(one)))
    assert len(caught.value.unexpected) == 30
    assert "p20" not in str(caught.value)


def test_saved_optimizer_state_without_a_live_owner_is_a_mismatch() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([one.weight, one.bias], momentum=0.9)
    one(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    live = Captured(two, torch.optim.SGD([two.weight], momentum=0.9))
    with pytest.raises(MismatchError) as caught:
        prepare(live, save(Captured(one, optimizer)))
    assert caught.value.unexpected == ["optimizer/bias"]
    assert "param_groups/0" in caught.value.different[0]


def test_state_that_the_saved_point_neither_has_nor_lacks_is_a_mismatch() -> None:
    one = nn.Linear(2, 2)
    saved = save(captured_of(one))
    saved.stateless.remove("bias")
    with pytest.raises(MismatchError) as caught:
        prepare(captured_of(nn.Linear(2, 2)), saved)
    assert caught.value.missing == ["optimizer/bias"]


def test_another_number_of_groups_is_a_mismatch() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    groups: Any = [{"params": [two.weight]}, {"params": [two.bias]}]
    split = torch.optim.SGD(groups, momentum=0.9)
    with pytest.raises(MismatchError, match=r"number of optimizer's groups \(saved 1, here 2\)"):
        prepare(Captured(two, split), save(captured_of(one)))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)


def test_what_cannot_be_kept_in_a_model_is_refused_by_name() -> None:
    def refused(change: Any, match: str) -> None:
        net = nn.Linear(2, 2)
        optimizer = sgd(net)
        change(net)
        with pytest.raises(UnsupportedValueError, match=match):
            Captured(net, optimizer)

    refused(
        lambda net: net.register_buffer("b", torch.ones(1).expand(3)),
        r"model/b is an expanded view",
    )
    refused(
        lambda net: net.register_buffer("b", torch.zeros(2, 2).to_sparse()),
        r"model/b is a tensor of layout",
    )
    refused(lambda net: net.register_buffer("b", torch.zeros(1, device="meta")), "meta device")
    refused(lambda net: net.add_module("self", net), "contains itself")
    lazy = Lazy()
    with pytest.raises(UnsupportedValueError, match=r"layer\.weight is not initialised"):
        Captured(lazy, torch.optim.SGD(lazy.parameters()))


class Hidden(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.zeros(1)


def test_a_module_that_writes_more_than_it_shows_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match=r"model/0 \(Hidden\) keeps packed outside"):
        captured_of(nn.Sequential(Hidden(1, 1)))


class Seen(nn.Module):
    """Keeps a number that decides, in a way of its own each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 1), 0


class Overriding(Seen):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"seen": torch.tensor(self.seen)}


class Nesting(Seen):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {"layer": self.layer.state_dict(), "more": {"seen": self.seen}}


def hooked(register: str) -> nn.Module:
    net = Seen()

    def hook(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}seen"] = module.seen

    getattr(net, register)(hook)
    return net


class Refreshing(Seen):
    """Brings a buffer up to date only when a state_dict is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))
        register: Any = self.register_state_dict_pre_hook
        register(lambda module, *_: module.number.fill_(module.seen))


def test_what_an_own_state_dict_adds_is_refused_by_name() -> None:
    on_instance: Any = Seen()
    on_instance.state_dict = lambda: {"seen": on_instance.seen}
    cases: list[tuple[nn.Module, str]] = [
        (Overriding(), r"model \(Overriding\) adds seen "),
        (nn.Sequential(nn.Linear(1, 1), Overriding()), r"model/1 \(Overriding\) adds seen "),
        (Nesting(), r"model \(Nesting\) adds more\.seen "),
        (hooked("register_state_dict_post_hook"), r"model \(Seen\) adds seen "),
        (nn.ModuleList([hooked("_register_state_dict_hook")]), r"model/0 \(Seen\) adds seen "),
        (on_instance, r"model \(Seen\) adds seen "),
        (Refreshing(), r"model \(Refreshing\) writes number when its state_dict\(\) is asked"),
    ]
    for net, match in cases:
        with pytest.raises(UnsupportedValueError, match=match) as caught:
            captured_of(net)
        assert "get_extra_state" in caught.value.next_step
        assert "`extra`" in caught.value.next_step


def test_a_state_dict_that_fails_is_refused_and_one_of_other_names_is_taken() -> None:
    class Picky(Seen):
        def state_dict(self, *, kind: str) -> Any:  # type: ignore[override]
            return {kind: 1}

    class Renaming(Seen):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {f"net.{k}": v for k, v in super().state_dict(*args, **kwargs).items()}

    class Inner(Seen):
        def state_dict(self, *, destination: Any, prefix: str, keep_vars: bool) -> Any:  # type: ignore[override]
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    class Silent(Seen):
        def state_dict(
            self, destination: Any = None, prefix: str = "", keep_vars: bool = False
        ) -> Any:
            super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    class Empty(Renaming):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("nothing", torch.ones(0, 3))

    with pytest.raises(UnsupportedValueError, match=r"model \(Picky\) failed when its state_dict"):
        captured_of(Picky())
    for net in (nn.Sequential(Inner()), nn.Sequential(Silent()), Empty()):
        assert len(captured_of(net).parameters()) == 2
    assert list(captured_of(Renaming()).parameters()) == ["layer.weight", "layer.bias"]


class CountingInHook(Counting):
    """What its hook adds is what it keeps as extra state anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: list[str] = []

        def asked(module: Any, _state: Any, prefix: str, _: Any) -> None:
            module.prefixes.append(prefix)

        register: Any = self.register_state_dict_post_hook
        register(asked)


def test_hooks_of_torch_and_hooks_that_add_nothing_are_taken() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    quantization: Any = torch.ao.quantization
    nets: list[Any] = [
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        nn.utils.spectral_norm(nn.Linear(2, 2)),
        nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
        torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(2), use_buffers=True),
        quantization.FakeQuantize(),
        CountingInHook(),
    ]
    for net in nets:
        whole = nn.Sequential(nn.Linear(1, 1), net)
        kept = captured_of(whole).structure()
        names = {name for name, *_ in (*kept.parameters, *kept.buffers)}
        written = {key for key in whole.state_dict() if not key.endswith("_extra_state")}
        assert names == written, type(net).__name__
    for inner in (CountingInHook(), nn.Sequential(CountingInHook())):
        for wrapped in (checkpoint_wrapper(inner), torch.compile(inner, backend="eager")):
            captured_of(nn.Sequential(cast("nn.Module", wrapped)))
    assert nets[-1].prefixes[0] == ""


_SHARDED = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
from dist_ckpt.capture import Captured
from dist_ckpt.errors import UnsupportedValueError
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

def refused(make):
    try:
        make()
    except UnsupportedValueError as error:
        print(error.message, error.next_step, flush=True)
    else:
        print("taken", flush=True)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

first = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
nn.Module.__init__(first)
refused(lambda: Captured(nn.Sequential(nn.Linear(1, 1), first), sgd(nn.Linear(1, 1))))
partial = nn.Linear(2, 2)
partial.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
refused(lambda: Captured(partial, sgd(partial)))
early = nn.Linear(2, 2)
optimizer = sgd(early)
fully_shard(early, mesh=mesh)
refused(lambda: Captured(early, optimizer))
class Extra:
    def state_dict(self):
        return {"shadow": distribute_tensor(torch.ones(2), mesh, [Shard(0)])}
    def load_state_dict(self, state):
        pass
refused(lambda: Captured(early, sgd(early), extra={"ema": Extra()}))
odd = nn.Linear(2, 2)
odd.weight = nn.Parameter(DTensor.from_local(
    torch.ones(2, 3), mesh, [Shard(0)], shape=torch.Size([2, 2]), stride=(2, 1), run_check=False
))
refused(lambda: Captured(odd, sgd(odd)))
whole = nn.Linear(2, 2)
zero = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.Adam, lr=0.1)
refused(lambda: Captured(whole, zero))
zero._overlap_with_ddp = True
refused(lambda: Captured(whole, zero))
early.register_state_dict_post_hook(lambda module, state, prefix, _: print("asked", *state))
refused(lambda: Captured(early, sgd(early)))
early.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(more=1))
refused(lambda: Captured(early, sgd(early)))
os._exit(0)
"""


def test_what_sharding_cannot_be_kept_is_refused_by_name_with_the_way_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    found = done.stdout.splitlines()
    expected = [
        "1 is wrapped by FSDP1 (FullyShardedDataParallel)",
        "model/weight is placed as Partial",
        "optimizer holds 2 parameters that the model doesn't have",
        "extra/ema/shadow is a DTensor, of which this rank has only a part",
        "model/weight has a local shape [2, 3]",
        "taken",
        "optimizer is a ZeroRedundancyOptimizer with overlap_with_ddp=True",
        "asked weight bias",
        "taken",
        "asked weight bias",
        "model (FSDPLinear) adds more in its state_dict",
    ]
    assert len(found) == len(expected), done.stderr
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start), text
    assert "fully_shard" in found[0]
    assert "fully_shard" in found[2]


def test_arguments_that_are_not_what_they_must_be_are_refused() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"model\.a is a function"):
        Captured({"a": print_nothing, "b": net}, sgd(net))  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="There is no model"):
        Captured({}, sgd(net))
    with pytest.raises(UsageError, match="There is no optimizer"):
        Captured(net, {})
    with pytest.raises(UsageError, match="no name"):
        Captured({"": net}, sgd(net))


def print_nothing() -> None:
    """Stand for something that is no module."""


def test_a_thousand_parameters_are_listed_in_a_few_milliseconds() -> None:
    import time

    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    captured = Captured(net, optimizer)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        tensors = captured.tensors()
        times.append(time.perf_counter() - start)
    assert len(tensors) == 4000
    assert min(times) < 0.1, times
