""".snapshot_metadata: torchsnapshot reads what is written here, and hostile numbers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from torchsnapshot.manifest import SnapshotMetadata

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.slices import Box, ByteRange, Placement
from dist_ckpt.snapshot_index import (
    IndexedTensor,
    decode_name,
    encode_index,
    encode_name,
    parse_index,
)

SHARD = "rank_00000.shard"
WEIGHT = IndexedTensor(
    "model/w%2Fx",
    "float32",
    (4, 3),
    (
        Placement(SHARD, Box((0, 0), (2, 3)), ByteRange(8, 32)),
        Placement("rank_00001.shard", Box((2, 0), (2, 3)), ByteRange(0, 24)),
    ),
)
STEP = IndexedTensor(
    "optimizer/w%2Fx/step",
    "float32",
    (),
    (Placement("rank_00000.state", Box((), ()), ByteRange(0, 4)),),
)
SIZES = {SHARD: 32, "rank_00001.shard": 24, "rank_00000.state": 64}


def test_the_index_is_read_as_it_was_written() -> None:
    data = encode_index([WEIGHT, STEP], {"model/tied": WEIGHT.key})
    tensors = parse_index(data, path="x", file_sizes=SIZES)
    assert tensors[WEIGHT.key] == WEIGHT
    assert tensors[STEP.key] == STEP
    assert tensors["model/tied"].placements == WEIGHT.placements


def test_torchsnapshots_own_classes_read_and_write_the_same() -> None:
    data = encode_index([WEIGHT, STEP], {})
    metadata = SnapshotMetadata.from_yaml(data.decode())
    assert json.loads(metadata.to_yaml()) == json.loads(data)
    assert metadata.manifest["0/model"].keys == ["w/x"]


def test_names_with_slashes_and_percents_come_back() -> None:
    for name in ("a/b", "50%", "%2F", "plain.weight", "a%/b"):
        assert decode_name(encode_name(name)) == name
        assert "/" not in encode_name(name)


def shard(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["manifest"]["0/" + WEIGHT.key]["shards"][0]
    return found


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "outside": lambda b: shard(b)["tensor"].update(location="../../etc/passwd"),
    "unlisted": lambda b: shard(b)["tensor"].update(location="rank_00009.shard"),
    "behind the end": lambda b: shard(b)["tensor"].update(byte_range=[1 << 40, (1 << 40) + 24]),
    "negative": lambda b: shard(b)["tensor"].update(byte_range=[-24, 0]),
    "length": lambda b: shard(b)["tensor"].update(byte_range=[8, 28]),
    "offsets": lambda b: shard(b).update(offsets=[0]),
    "hole": lambda b: shard(b).update(offsets=[5, 0]),
    "giant": lambda b: shard(b).update(sizes=[1 << 62, 1 << 62]),
    "float": lambda b: shard(b).update(sizes=[2.0, 3]),
    "bool": lambda b: shard(b).update(sizes=[True, 3]),
    "dtype": lambda b: shard(b)["tensor"].update(dtype="torch.load"),
    "dtypes": lambda b: shard(b)["tensor"].update(dtype="torch.int32"),
    "no shards": lambda b: b["manifest"]["0/" + WEIGHT.key].update(shards=[]),
    "object": lambda b: b["manifest"].update({"0/model/o": {"type": "object"}}),
    "other rank": lambda b: b["manifest"].update({"1/model": {"type": "dict", "keys": []}}),
    "no manifest": lambda b: b.pop("manifest"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers_and_places_are_refused(kind: str) -> None:
    body = json.loads(encode_index([WEIGHT, STEP], {}))
    HOSTILE[kind](body)
    with pytest.raises(CorruptFileError):
        parse_index(json.dumps(body).encode(), path="x", file_sizes=SIZES)
