"""Tagged JSON: every listed type comes back exact, everything else is refused by its path."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dist_ckpt.errors import CorruptFileError, UnsupportedValueError
from dist_ckpt.tree import INLINE_LIMIT_BYTES, TORCH_DTYPES, decode_tree, encode_tree


def through_text(value: Any) -> Any:
    text = json.dumps(encode_tree(value, path="v"), allow_nan=False)
    return decode_tree(json.loads(text))


def same(one: Any, two: Any) -> bool:  # noqa: PLR0911 - one line a type
    """Return whether both are equal in value, type, key types and order."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two) if t.numel()]
        return not raw or raw[0].tolist() == raw[1].tolist()
    if isinstance(one, np.ndarray | np.generic):
        shapes = (one.dtype, one.shape) == (two.dtype, two.shape)
        return shapes and bool(one.tobytes() == two.tobytes())
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            same(a, b) and same(one[a], two[b]) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or (
            one == two and math.copysign(1, one) == math.copysign(1, two)
        )
    return bool(one == two)


VALUES: dict[str, Any] = {
    "none": None,
    "bool_is_not_int": [True, 1, False, 0],
    "int": [0, -1, 2**53, 2**53 + 1, -(2**127), 10**300],
    "float": [0.1, -0.0, 1e-320, math.pi, 1.0, float("inf"), -float("inf"), float("nan")],
    "complex": [1 + 2j, complex(float("nan"), -0.0), complex(float("inf"), 1)],
    "text": ["", "ü\u2028\0", "$tuple", "\ud800"],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "nested": {"a": [1, (2, [3, ({},)])], "b": {}},
    "dollar_key": {"$tuple": [1]},
    "dollar_key_beside": {"$x": 1, "y": 2},
    "int_keys": {1: "a", "1": "b", None: 0, False: "c", 2.5: "d", (1, "x"): "e"},
    "odd_keys": {b"k": 1, frozenset({1}): 2, 1j: 3, float("inf"): 4},
    "odict": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "counter": Counter({3: 2, 10: 1}),
    "defaultdict": [defaultdict(int, {"a": 1}), defaultdict(None, {1: 2}), defaultdict(list)],
    "deque": [deque([1, (2,)], maxlen=3), deque()],
    "sets": [{1, "a", (2, 3)}, set(), frozenset({b"x"})],
    "range_slice": [range(1, 10, 3), slice(None, 3), slice(1, 2, (3,))],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.bfloat16],
    "numpy": [
        np.float32(0.1), np.bool_(1), np.int64(-3), np.complex64(1j), np.str_("é"), np.bytes_(b"x"),
        np.dtype("float16"), np.dtype("<U3"), np.datetime64("2020-01-01"),
    ],
    "arrays": [
        np.arange(6, dtype=np.int16).reshape(2, 3).T, np.array(3.5), np.zeros((0, 2)),
        np.array(["ab", "c"]), np.array([True]), np.array(["2020"], dtype="datetime64[Y]"),
    ],
    "tensors": [
        torch.arange(6).reshape(2, 3).t(), torch.tensor(1.5), torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(), torch.zeros(2).expand(3, 2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_exact(name: str) -> None:
    value = VALUES[name]
    back = through_text(value)
    if name == "tensors":
        assert all(torch.equal(a, b) for a, b in zip(value, back, strict=True))
        return
    assert same(back, value)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_a_tensor_of_every_dtype_comes_back_bit_equal(name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    raw = raw % 2 if name == "bool" else raw
    tensor = raw.view(TORCH_DTYPES[name])
    assert same(through_text(tensor), tensor)
    assert same(through_text({"d": tensor.dtype}), {"d": tensor.dtype})


def test_a_deque_and_a_factory_work_as_before() -> None:
    recent, groups = through_text([deque([1, 2], maxlen=2), defaultdict(list)])
    recent.append(3)
    groups["new"].append(1)
    assert recent == deque([2, 3])
    assert groups == {"new": [1]}


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    back = through_text(nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=3),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(deque)
        | st.sets(_keys, max_size=3)
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(_trees)
def test_any_tree_of_listed_types_comes_back_exact(value: Any) -> None:
    assert same(through_text(value), value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("$tuple", "$dict", "$set", "$bytes", "$int", "$float", "$tensor", "$ndarray"),
                    *("$deque", "$defaultdict", "$npscalar", "$device", "$dtype", "$size", "a"),
                    *("$range", "$slice", "$counter", "$complex", "$npdtype", "items"),
                ]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(_json)
def test_hostile_nodes_give_a_value_or_a_corrupt_file_never_another_error(node: Any) -> None:
    try:
        decode_tree(node)
    except CorruptFileError as error:
        assert error.next_step  # noqa: PT017 - either outcome is right


def test_tensors_and_arrays_go_to_the_sink_under_unique_paths() -> None:
    value = {
        "a": [torch.zeros(1), {0: torch.ones(1), "0": torch.ones(2), "[0]": torch.ones(3)}],
        "b/c": np.zeros(2),
        "d%": {(1, 2): np.array(["text"])},
    }
    kept: dict[str, Any] = {}

    def put(path: str, item: Any) -> str:
        assert path not in kept
        kept[path] = item
        return path

    node = json.loads(json.dumps(encode_tree(value, path="extra/x", put_tensor=put)))
    assert list(kept) == [
        "extra/x/a/0", "extra/x/a/1/[0]", "extra/x/a/1/0", "extra/x/a/1/%5B0]", "extra/x/b%2Fc",
    ]  # fmt: skip

    def get(path: Any) -> torch.Tensor:
        item = kept[path]
        return item if isinstance(item, torch.Tensor) else torch.from_numpy(item)

    assert same(decode_tree(node, get_tensor=get), value)


class Color(enum.IntEnum):
    RED = 1


class MyDict(dict[str, int]):
    """A subclass would come back as its base."""


Point = namedtuple("Point", "x y")  # noqa: PYI024
_cycle: list[Any] = []
_cycle.append([_cycle])


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        ({"f": print}, "v/f", "builtin_function"),
        ([0, lambda: 0], "v/1", "function"),
        ({"m": [nn.Linear(1, 1)]}, "v/m/0", "Linear"),
        (object(), "v", "object"),
        ([Color.RED], "v/0", "Color"),
        (Point(1, 2), "v", "Point"),
        ({1: {"a/b": MyDict()}}, "v/[1]/a%2Fb", "MyDict"),
        (defaultdict(lambda: 0), "v", "factory"),
        (_cycle, "v/0/0", "contains itself"),
        ({"t": torch.zeros(INLINE_LIMIT_BYTES + 1, dtype=torch.uint8)}, "v/t", "1048577 bytes"),
        ({"t": np.zeros(INLINE_LIMIT_BYTES // 8 + 1)}, "v/t", "1048584 bytes"),
        (np.array([object()]), "v", "dtype object"),
        (np.zeros(1, dtype=">i4"), "v", "dtype >i4"),
        (np.dtype([("a", "<i4")]), "a NumPy dtype", "can't be kept"),
        (np.ma.masked_array([1]), "v", "MaskedArray"),
        (torch.zeros(2, 2).to_sparse(), "v", "layout"),
        (torch.zeros(1, device="meta"), "v", "meta device"),
        ({1: {torch.zeros(1)}}, "v/[1]", "tensor"),
        ([1 << 20_000], "v/0", "20001 bits"),
        (NotImplemented, "v", "NotImplementedType"),
    ],
)
def test_another_type_is_refused_with_its_path(value: Any, path: str, what: str) -> None:
    with pytest.raises(UnsupportedValueError, match=what) as caught:
        encode_tree(value, path="v")
    assert caught.value.path == path
    assert caught.value.next_step


def test_a_hundred_levels_are_kept_and_more_are_refused() -> None:
    assert through_text(_deep(100)) == _deep(100)
    with pytest.raises(UnsupportedValueError, match="deeper than 100"):
        encode_tree(_deep(101), path="v")
    node: Any = 1
    for _ in range(500):
        node = [node]
    with pytest.raises(CorruptFileError, match="deeper"):
        decode_tree(node)


def test_the_same_list_twice_is_no_cycle() -> None:
    twice = [1]
    assert through_text([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "node",
    [
        {"$function": "os.system"},
        {"$tuple": 1},
        {"$tuple": [1], "x": 2},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$set": [[1]]},
        {"$bytes": "?"},
        {"$int": "0x10"},
        {"$int": 5},
        {"$float": "1.5"},
        {"$float": "infinity"},
        {"$dtype": "os"},
        {"$npdtype": "O"},
        {"$device": "nowhere:0"},
        {"$size": [-1]},
        {"$range": [1, 2, 0]},
        {"$defaultdict": {"factory": "os.system", "items": []}},
        {"$deque": [1]},
        {"$deque": {"items": [1], "maxlen": "x"}},
        {"$complex": [1.0]},
        {"$npscalar": {"dtype": "<f8", "data": "AAAA"}},
        {"$ndarray": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$ndarray": {"dtype": "<f8", "shape": [2], "data": "AAAAAAAAAAA="}},
        {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAAAA=="}},
        {"$tensor": {"dtype": "float32", "shape": [2**62], "data": ""}},
        {"$tensor": "path/of/a/sink"},
        float("nan"),
        float("inf"),
        (1, 2),
    ],
)
def test_a_malformed_node_is_a_corrupt_file(node: Any) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decode_tree({"inside": [node]})
    assert caught.value.next_step


def test_an_error_of_get_tensor_is_not_reworded() -> None:
    def get(_reference: Any) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        decode_tree({"$tuple": [{"$tensor": 1}]}, get_tensor=get)


def test_devices_that_are_not_here_come_back_as_the_cpu() -> None:
    """Case 49."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert decode_tree({"$device": "cuda:3"}) == torch.device("cpu")
    assert decode_tree({"$device": "mps"}) == torch.device("cpu")
    assert through_text(torch.device("meta")) == torch.device("meta")


def test_equal_sets_give_equal_text() -> None:
    names = [f"name{index}" for index in range(50)]
    backwards = list(reversed(names))
    one = encode_tree(set(names), path="v")
    two = encode_tree(set(backwards), path="v")
    assert one == two


@pytest.mark.parametrize(
    "last", [0, 2**53, 2**53 + 1, -(2**53) - 1, True, None, 0.5, math.inf, "x"]
)
def test_a_long_list_of_integers_is_kept_as_a_short_one_is(last: Any) -> None:
    for length in (3, 40):
        value = (3, [*range(length), last], None)
        decoded = decode_tree(json.loads(json.dumps(encode_tree(value, path="x"), allow_nan=False)))
        assert decoded == value
        assert [type(item) for item in decoded[1]] == [type(item) for item in value[1]]
    assert encode_tree([*range(40)], path="x") == [*range(40)]
