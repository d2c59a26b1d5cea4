"""How tensors inside the user's state lie in memory: kept, made again, and believed of no file."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.capture._memory import MadeTensors
from dist_ckpt.errors import CorruptFileError
from dist_ckpt.resume._values import _shifted
from helpers.capturing import everything, restore, save


class Box:
    """Holds whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def captured_of(*boxes: Box) -> Captured:
    net = nn.Linear(2, 2)
    extra = {f"box{number}": box for number, box in enumerate(boxes)}
    return Captured(net, torch.optim.SGD(net.parameters()), extra=extra)


def again(*states: Any) -> list[Any]:
    """Return the states as they come back, and see that they are told the same once more."""
    saved = save(captured_of(*map(Box, states)))
    boxes = [Box() for _ in states]
    live = captured_of(*boxes)
    restore(live, saved)
    assert everything(live)[-2:] == (saved.rank, saved.own)
    return [box.state for box in boxes]


def references(*states: Any) -> list[dict[str, Any]]:
    saved = json.loads(save(captured_of(*map(Box, states))).rank)["values"]
    return [next(iter(node.values())) for values in saved.values() for node in values]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(4, 6)[1:, ::2],
        torch.arange(48.0).reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
        torch.arange(6.0).as_strided((6, 1), (1, 7)),
        torch.arange(20, dtype=torch.int16)[3::4],
    ],
    ids=["transposed", "sliced", "channels-last", "one-column", "every-fourth"],
)
def test_strides_come_back(tensor: torch.Tensor) -> None:
    ((found,),) = again([tensor])
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_arrays_in_fortran_order_come_back_in_it() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    fixed = array.copy(order="F")
    fixed.flags.writeable = False
    ((found, other),) = again([array, fixed])
    assert np.array_equal(found, array)
    assert np.array_equal(other, array)
    assert found.strides == other.strides == array.strides


def test_what_shares_memory_shares_it_again() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    array = np.arange(4.0)
    state = [base, base.t(), base[1:], base.view(torch.int32)[:, 2], array, torch.from_numpy(array)]
    (found,) = again(state)
    for item, wanted in zip(found, state, strict=True):
        assert np.array_equal(np.asarray(item), np.asarray(wanted))
    found[0][1, 2] = -1.0
    found[4][3] = -2.0
    base[1, 2], array[3] = -1.0, -2.0
    for item, wanted in zip(found, state, strict=True):
        assert np.array_equal(np.asarray(item), np.asarray(wanted))
    assert found[1].stride() == (1, 4)


def test_an_average_of_a_tied_model_is_updated_once_a_name_as_before() -> None:
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    shadow = copy.deepcopy(dict(tied.state_dict()))
    ((first), (second)) = again({"s": shadow}, [shadow["a.weight"].detach()])
    second[0].fill_(3.0)
    assert [bool((item == 3.0).all()) for item in first["s"].values()] == [True, True]


def test_one_element_with_any_strides_comes_back() -> None:
    base = torch.arange(100.0)
    state = [base[50:51].as_strided((1, 1), (7, 50)), torch.ones(100)[::50][1:], base[::50][1:]]
    (found,) = again(state)
    assert [item.tolist() for item in found] == [[[50.0]], [1.0], [50.0]]
    found[0].fill_(2.0)
    assert found[2].item() == 2.0


def test_one_object_is_one_object_again() -> None:
    tensor = torch.ones(2)
    ((a, b), (c,)) = again([tensor, tensor], [tensor])
    assert a is b is c


def test_parameters_and_what_needs_a_gradient_do_so_again() -> None:
    leaf = torch.ones(2, requires_grad=True)
    state = [leaf, nn.Parameter(torch.zeros(2, 3).t()), nn.Parameter(torch.arange(2), False)]
    ((first, second, third, plain),) = again([*state, leaf * 2])
    assert [type(item) for item in (first, second, third)] == [torch.Tensor, *[nn.Parameter] * 2]
    assert [item.requires_grad for item in (first, second, third)] == [True, True, False]
    assert all(item.is_leaf for item in (first, second))
    assert second.stride() == (1, 3)
    assert not plain.requires_grad, "what another tensor's gradient runs through is its values"
    first.square().sum().backward()
    assert first.grad.tolist() == [2.0, 2.0]


def test_a_plain_tensor_is_told_by_its_number_alone() -> None:
    state = [torch.ones(2), np.ones((2, 2)), torch.ones(6)[2:4], *torch.ones(6).chunk(2)]
    assert references(state) == [{"at": number} for number in range(len(state))]


def test_views_that_overlap_themselves_or_are_mostly_gaps_come_back_on_their_own() -> None:
    thin = torch.arange(150.0)[::50]
    state = [torch.ones(3).expand(2, 3), torch.arange(4.0).unfold(0, 2, 1), thin, thin[1:]]
    assert references(state) == [{"at": number} for number in range(len(state))]
    (found,) = again(state)
    for item, wanted in zip(found, state, strict=True):
        assert torch.equal(item, wanted)
        assert item.is_contiguous()


@pytest.mark.parametrize(
    "node",
    [
        {"at": 0, "strides": [1]},
        {"at": 0, "strides": "31"},
        {"at": 0, "strides": [3, -1]},
        {"at": 0, "strides": [True, 3]},
        {"at": 0, "strides": [1.0, 3.0]},
        {"at": 0, "strides": [0, 1]},
        {"at": 0, "strides": [1, 1]},
        {"at": 0, "strides": [2**62, 1]},
        {"at": 0, "strides": [2**64, 1]},
        {"at": 0, "strides": [1, 50]},
        {"at": 0, "shares": 0, "offset": -4},
        {"at": 0, "shares": 0, "offset": 2},
        {"at": 0, "shares": "0"},
        {"at": 0, "shares": [0]},
        {"at": 1, "shares": 0},
        {"at": 0, "parameter": 1},
        {"at": 0, "requires_grad": "yes"},
        {"at": 2, "requires_grad": True},
        {"at": "0", "strides": [1, 2]},
        {"at": 0, "strides": [1, 2], "device": ["cpu"]},
    ],
    ids=str,
)
def test_a_place_that_no_save_gives_is_a_corrupt_file(node: dict[str, Any]) -> None:
    kept = [torch.ones(2, 3), torch.ones(0, 3), torch.ones(2, dtype=torch.int64)]
    with pytest.raises(CorruptFileError):
        MadeTensors([{"$tensor": node}], kept.__getitem__).get(node)


def test_a_forged_file_takes_no_more_memory_than_a_multiple_of_its_tensors() -> None:
    kept = [torch.ones(64) for _ in range(8)]
    nodes = [{"at": at, "shares": 0, "offset": 2048 * at} for at in range(8)]
    tree = [{"$tensor": node} for node in nodes]
    assert MadeTensors(tree, kept.__getitem__).get(nodes[7]).untyped_storage().nbytes() == 14592
    # The same tensor again and again counts once.
    nodes = [{"at": 0, "shares": 0, "offset": 2048 * number} for number in range(8)]
    tree = [{"$tensor": node} for node in nodes]
    made = MadeTensors(tree, kept.__getitem__)
    assert len({made.get(node).data_ptr() for node in nodes}) == 1
    # What is too far out for all that is there lies on its own, as where a part is left out.
    for far in (nodes[7], {"at": 0, "shares": 0, "offset": 2**40}):
        alone = MadeTensors([{"$tensor": far}], kept.__getitem__).get(far)
        assert (alone.tolist(), alone.untyped_storage().nbytes()) == ([1.0] * 64, 256)


def test_what_shares_memory_with_a_part_that_is_left_out_is_on_its_own() -> None:
    pool = torch.arange(1000.0)
    saved = save(captured_of(Box(pool), Box(pool[-10:])))
    boxes = Box(torch.ones(1)), Box()
    restore(captured_of(*boxes), saved, omit=("extra.box0",))
    assert [box.state.tolist() for box in boxes] == [[1.0], pool[-10:].tolist()]


def test_what_is_left_of_a_memory_still_shares_it() -> None:
    pool = torch.arange(1000.0)
    saved = save(captured_of(Box(pool), Box([pool[-10:], pool[-9::2]])))
    box = Box()
    restore(captured_of(Box(), box), saved, omit=("extra.box0",))
    whole, odd = box.state
    whole += 1
    assert odd.tolist() == [992.0, 994.0, 996.0, 998.0, 1000.0]
    assert whole.untyped_storage().nbytes() < 64


def test_numbers_of_another_ranks_tensors_are_moved_together() -> None:
    tree = [{"$tensor": {"at": 1, "shares": 0, "offset": 4}}, {"$ndarray": {"at": 0}}]
    moved = [{"$tensor": {"at": 4, "shares": 3, "offset": 4}}, {"$ndarray": {"at": 3}}]
    assert _shifted(tree, 3) == moved
