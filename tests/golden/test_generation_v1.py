"""The frozen generation of format version 1 stays readable: by the library, and by docs/format.md.

The second reader here follows docs/format.md with json, struct and xxhash alone, so that the
document is known to be enough.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torchsnapshot import Snapshot

from dist_ckpt.comm import SoloComm
from dist_ckpt.export import canonical_pieces, read_bin
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import canonical, parse_loss, read_journal
from dist_ckpt.resume import Reader, restore_newest
from dist_ckpt.resume_point import encode_resume_point
from dist_ckpt.seeding import kept_generators
from dist_ckpt.tree import TORCH_DTYPES
from dist_ckpt.tree._decode import _LEAF_TAGS, _NODE_TAGS
from golden.make_generation import EXTRA, LOSSES, STEP, Objects, at_step_100, fresh, seed

RUN = Path(__file__).parent / "generation_v1" / "golden"
HOME = RUN / "checkpoints" / "step_000100"
PIECE_BYTES = 16 * 2**20


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


# By the document alone


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def resume_point() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((HOME / "resume_point.json").read_bytes())
    return body


def manifest() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((HOME / ".snapshot_metadata").read_bytes())["manifest"]
    return body


def tail(rank: int) -> dict[str, Any]:
    data = (HOME / f"rank_{rank:05d}.state").read_bytes()
    length = int.from_bytes(data[-8:], "little")
    body: dict[str, Any] = json.loads(data[-8 - length : -8])
    return body


def numbers(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def by_the_document(entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return a tensor from its entry in ``.snapshot_metadata``."""
    shards = entry["shards"]
    ends = [[o + s for o, s in zip(p["offsets"], p["sizes"], strict=True)] for p in shards]
    shape = [max(sizes) for sizes in zip(*ends, strict=True)]
    whole = np.zeros(shape)
    for part in shards:
        where = part["tensor"]
        start, stop = where["byte_range"]
        data = (HOME / where["location"]).read_bytes()[start:stop]
        box = tuple(slice(o, o + s) for o, s in zip(part["offsets"], part["sizes"], strict=True))
        values = numbers(data, where["dtype"].removeprefix("torch."))
        whole[box] = values.reshape(part["sizes"])
    return whole


def test_the_resume_point_ends_with_the_digest_of_its_other_bytes() -> None:
    data = (HOME / "resume_point.json").read_bytes()
    match = re.search(rb'"digest": "xxh3_128:([0-9a-f]{32})"\n}\n\Z', data)
    assert match is not None
    assert xxh3(data[: match.start(1)] + data[match.end(1) :]).encode() == match.group(1)


def test_every_file_has_the_digests_that_the_resume_point_says() -> None:
    point = resume_point()
    assert sorted(point["files"]) == [
        f"rank_{rank:05d}.{kind}" for rank in range(2) for kind in ("shard", "state")
    ]
    for name, record in point["files"].items():
        data = (HOME / name).read_bytes()
        pieces = [xxh3(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]
        assert record == {
            "size_bytes": len(data),
            "piece_bytes": PIECE_BYTES,
            "pieces": pieces,
            "whole": "xxh3_128:" + xxh3(b"".join(map(bytes.fromhex, pieces))),
        }
    index = (HOME / ".snapshot_metadata").read_bytes()
    assert point["index"] == {"size_bytes": len(index), "digest": "xxh3_128:" + xxh3(index)}


def test_the_verification_names_the_resume_point() -> None:
    verified = json.loads((HOME / "verified.json").read_bytes())
    digest = xxh3((HOME / "resume_point.json").read_bytes())
    assert verified["resume_point"] == f"xxh3_128:{digest}"


def test_every_tensor_is_found_by_its_entry() -> None:
    saved = at_step_100(0)
    entries = {key: e for key, e in manifest().items() if e["type"] == "ShardedTensor"}
    expected = {f"0/model/{n}": t for n, t in saved.model.state_dict().items()}
    names = {id(p): n for n, p in saved.model.named_parameters()}
    for parameter, state in saved.optimizer.state.items():
        for kind, tensor in state.items():
            expected[f"0/optimizer/{names[id(parameter)]}%2F{kind}"] = tensor
    assert set(entries) == set(expected)
    for key, tensor in expected.items():
        assert by_the_document(entries[key]).tolist() == tensor.double().tolist(), key
    assert entries["0/model/head.weight"] == entries["0/model/wte.weight"]


def test_each_ranks_own_tensors_are_found_by_its_tail() -> None:
    for rank in range(2):
        body = tail(rank)
        saved = at_step_100(rank)
        assert (body["format"], body["version"]) == ("dist_ckpt.state", 1)
        assert (body["rank"], body["step"], body["id"]) == (rank, STEP, resume_point()["id"])
        data = (HOME / f"rank_{rank:05d}.state").read_bytes()
        for name, buffer in saved.model.named_buffers():
            start, dtype, shape = body["buffers"][f"model/{name}"]
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            found = numbers(data[start : start + num_bytes], dtype).reshape(shape)
            assert found.tolist() == buffer.tolist(), name
        reference = body["values"]["values"]["extra.mine"]["$dict"][-1]
        start, dtype, shape = body["tensors"][reference[1]["$ndarray"]["at"]]
        found = numbers(data[start : start + 2 * shape[0]], dtype)
        assert (reference[0], found.tolist()) == ("array", list(range(3 + rank)))


def test_the_canonical_file_follows_from_the_names() -> None:
    point, entries = resume_point(), manifest()
    data = (RUN / "step_000100.bin").read_bytes()
    count = point["canonical"]["num_params"]
    assert np.frombuffer(data[:8], "<i4").tolist() == [STEP, count]
    assert len(data) == 8 + 12 * count
    expected: list[float] = []
    kinds = (("model", ""), ("optimizer", "%2Fexp_avg"), ("optimizer", "%2Fexp_avg_sq"))
    for prefix, suffix in kinds:
        for name in point["canonical"]["names"]:
            if suffix and name in point["canonical"]["stateless"]:
                weight = by_the_document(entries[f"0/model/{name}"])
                expected += [0.0] * weight.size
            else:
                tensor = by_the_document(entries[f"0/{prefix}/{name}{suffix}"])
                expected += tensor.reshape(-1).tolist()
    assert np.frombuffer(data[8:], "<f4").tolist() == np.array(expected, "<f4").tolist()
    line = (RUN / "step_000100.bin.sha256").read_text()
    assert line == f"{hashlib.sha256(data).hexdigest()}  step_000100.bin\n"


def test_the_document_names_every_key_and_tag_that_is_written() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    point, body = resume_point(), tail(1)
    verified = json.loads((HOME / "verified.json").read_bytes())
    objects = [point, point["canonical"], point["index"], point["files"]["rank_00000.shard"]]
    objects += [body, body["values"], body["values"]["rng"], body["shared"], verified]
    objects += body["shared"]["optimizers"].values()
    keys = {key for item in objects for key in item}
    assert [key for key in sorted(keys) if f"`{key}`" not in text and f'"{key}"' not in text] == []
    tags = {*_LEAF_TAGS, *_NODE_TAGS, "$tensor", "$ndarray"}
    assert [tag for tag in sorted(tags) if f'{{"{tag}": ' not in text] == []
    assert [name for name in TORCH_DTYPES if f"`{name}`" not in text] == []


# By the library


def restored() -> Objects:
    objects = fresh()
    store = GenerationStore(RUN)
    resumed = restore_newest(store, SoloComm(), objects.captured, admit=lambda _point: None)
    assert resumed is not None
    assert (resumed.step, resumed.skipped) == (STEP, ())
    resumed.restore_rng()
    return objects


def test_it_is_resumed_with_every_value_and_type() -> None:
    objects = restored()
    draws = objects.captured.rng_draws()
    saved = at_step_100(0)
    seed(0)
    assert draws == saved.captured.rng_draws()
    found, expected = objects.captured.tensors(), saved.captured.tensors()
    assert [t.spec for t in found] == [t.spec for t in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), mine.spec.key
    assert [g["lr"] for g in objects.optimizer.param_groups] == [0.005, 0.0025]
    assert objects.scheduler.state_dict() == saved.scheduler.state_dict()
    assert {key: objects.extra.state[key] for key in EXTRA} == EXTRA
    assert [type(objects.extra.state[key]) for key in EXTRA] == [type(v) for v in EXTRA.values()]
    assert objects.extra.state["array"].dtype == np.int16
    assert objects.data.state["order"].tolist() == [0, 1, 2, 3]


def test_the_other_ranks_values_are_read() -> None:
    store = GenerationStore(RUN)
    reader = Reader(store, store.manifest(STEP))
    values, objects = reader.tail(1), fresh()
    own = reader.own(1, values.tensors)
    objects.captured.load_rank(values.values, lambda number: own[number])
    objects.captured.load_rng(values.values)
    assert objects.extra.state["rank"] == 1
    assert objects.data.state["order"].tolist() == [0, 1, 2, 3, 4]
    draws = objects.captured.rng_draws()
    saved = at_step_100(1)
    seed(1)
    assert draws == saved.captured.rng_draws()


def test_it_verifies_and_counts_as_verified() -> None:
    store = GenerationStore(RUN)
    point = store.manifest(STEP)
    store.check_files(point)
    assert store.verify(point) == point.num_bytes
    assert store.verified_at(STEP) is not None
    assert (point.run, point.attempt, point.reasons) == ("golden", 2, ("cadence", "SIGUSR1"))
    assert encode_resume_point(point) == (HOME / "resume_point.json").read_bytes()


def test_its_canonical_file_is_read_and_would_be_the_same_today() -> None:
    store = GenerationStore(RUN)
    state = read_bin(RUN / "step_000100.bin")
    assert (state.step, state.num_params) == (STEP, 44)
    pieces = b"".join(map(bytes, canonical_pieces(store, store.manifest(STEP))))
    assert pieces == (RUN / "step_000100.bin").read_bytes()


def test_its_history_is_read() -> None:
    data = (RUN / "golden.loss.json").read_bytes()
    entries = parse_loss(data, path="x")
    assert entries == [(s, None if math.isnan(x) else x) for s, x in LOSSES]
    assert list(canonical(entries)) == entries
    assert json.loads(data) == [list(entry) for entry in entries]
    events = read_journal(RUN)
    assert [event["event"] for event in events] == ["loss_not_finite", "saved"]
    assert events[1]["step"] == STEP


def test_torchsnapshot_reads_it_without_us() -> None:
    saved = at_step_100(0)
    snapshot = Snapshot(str(HOME))
    for name, tensor in saved.model.state_dict().items():
        target = torch.zeros_like(tensor)
        snapshot.read_object(f"0/model/{name}", obj_out=target)
        assert torch.equal(target, tensor), name
