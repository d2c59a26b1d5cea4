"""The tail of a .state file: what is written is read, and hostile ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import CorruptFileError, FormatVersionError
from dist_ckpt.staging import (
    TAIL_BYTES,
    OwnTensor,
    StateTail,
    encode_tail,
    parse_tail,
    tail_start,
)

TAIL = StateTail(
    rank=3,
    step=100,
    id="ab" * 16,
    buffers={"model/bn.running_mean": OwnTensor(64, "float32", (4,))},
    values={"rng": {"python": [3, [1, 2], None]}, "values": {"extra.ema": {"at": 0}}},
    shared={"groups": [{"lr": 0.1}], "größe": "ß"},
    tensors=(OwnTensor(128, "bfloat16", (2, 3)), OwnTensor(192, "int64", ())),
)


def split(data: bytes) -> bytes:
    """The JSON of an encoded tail, found as a reader finds it."""
    start = tail_start(data[-TAIL_BYTES:], file_size=len(data), path="x")
    return data[start:-TAIL_BYTES]


def test_a_tail_is_read_as_it_was_written() -> None:
    assert parse_tail(split(encode_tail(TAIL)), limit=200, path="x") == TAIL


def test_the_tail_is_plain_json_and_a_little_endian_length() -> None:
    data = encode_tail(TAIL)
    body = json.loads(data[:-8])
    assert int.from_bytes(data[-8:], "little") == len(data) - 8
    assert body["format"] == "dist_ckpt.state"
    assert body["version"] == 1
    assert body["buffers"] == {"model/bn.running_mean": [64, "float32", [4]]}
    assert body["tensors"] == [[128, "bfloat16", [2, 3]], [192, "int64", []]]


def test_places_count_bytes_of_the_dtype() -> None:
    ranges = [own.byte_range for own in TAIL.tensors]
    assert [(r.start, r.stop) for r in ranges] == [(128, 140), (192, 200)]
    assert OwnTensor(64, "float32", (0, 4)).byte_range.num_bytes == 0


@given(last=st.binary(max_size=12), size=st.integers(0, 2**40))
def test_a_length_is_believed_only_inside_the_file(last: bytes, size: int) -> None:
    try:
        start = tail_start(last, file_size=size, path="x")
    except CorruptFileError:
        return
    assert 0 <= start <= size - TAIL_BYTES


def test_a_tensor_that_reaches_into_the_json_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="ends at byte 200, behind 199"):
        parse_tail(split(encode_tail(TAIL)), limit=199, path="x")


def test_a_later_version_is_refused_by_name() -> None:
    data = split(encode_tail(TAIL)).replace(b'"version": 1', b'"version": 2')
    with pytest.raises(FormatVersionError, match="format version 2"):
        parse_tail(data, limit=200, path="x")


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda b: b.update(format="other"),
    "no rank": lambda b: b.pop("rank"),
    "negative rank": lambda b: b.update(rank=-1),
    "bool step": lambda b: b.update(step=True),
    "float step": lambda b: b.update(step=1.0),
    "no values": lambda b: b.pop("values"),
    "buffers a list": lambda b: b.update(buffers=[]),
    "row too short": lambda b: b.update(tensors=[[0, "float32"]]),
    "row a text": lambda b: b.update(tensors=["abc"]),
    "row a number": lambda b: b.update(tensors=[7]),
    "negative start": lambda b: b.update(tensors=[[-8, "float32", []]]),
    "negative size": lambda b: b.update(tensors=[[0, "float32", [-1]]]),
    "float size": lambda b: b.update(tensors=[[0, "float32", [1.0]]]),
    "giant": lambda b: b.update(tensors=[[0, "float32", [1 << 62, 1 << 62]]]),
    "dtype": lambda b: b.update(tensors=[[0, "load", []]]),
    "dtype a list": lambda b: b.update(tensors=[[0, ["float32"], []]]),
    "shape a text": lambda b: b.update(tensors=[[0, "float32", "12"]]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tails_are_refused(kind: str) -> None:
    body = json.loads(split(encode_tail(TAIL)))
    HOSTILE[kind](body)
    with pytest.raises(CorruptFileError):
        parse_tail(json.dumps(body).encode(), limit=200, path="x")


def test_every_truncation_of_the_json_is_refused() -> None:
    data = split(encode_tail(TAIL))
    for length in range(len(data)):
        with pytest.raises(CorruptFileError):
            parse_tail(data[:length], limit=200, path="x")


def test_infinities_have_to_be_tagged_before() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_tail(replace(TAIL, values=float("inf")))
