"""The reader: every dtype, shape and cut, and no byte that isn't what was written."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    FormatVersionError,
    MismatchError,
    StorageError,
)
from dist_ckpt.generations import GenerationStore, is_bad_bytes
from dist_ckpt.resume import Reader
from dist_ckpt.resume._read import _beginning
from dist_ckpt.slices import Role
from dist_ckpt.staging import OwnTensor
from dist_ckpt.storage import PIECE_BYTES, FileDigest, digest_bytes
from helpers.generating import (
    Part,
    adam_part,
    change_byte,
    live,
    part_of,
    write_generation,
)
from helpers.hostile import little_memory

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern, NaNs with payload among them."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    numel = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def reader_of(run_dir: Path, step: int = 100) -> Reader:
    store = GenerationStore(run_dir)
    return Reader(store, store.manifest(step))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, world_size: int
) -> None:
    """Case 34: dims of 7, of 1 and of 0, cut for three ranks and read whole."""
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(17, 3), (1,), (), (0, 4), (7,), (2, 3, 5)]
    saved = {f"t{i}": random_bytes(dtype, *shape) for i, shape in enumerate(shapes)}
    tensors = [live(f"model/{name}", Role.WEIGHT, t, name) for name, t in saved.items()]
    tensors += [live(f"model/b{name}", Role.BUFFER, t) for name, t in saved.items()]
    write_generation(tmp_path, [Part(tensors)] * world_size)
    reader = reader_of(tmp_path)
    fresh = {item.spec.key: torch.zeros(item.spec.shape, dtype=dtype) for item in tensors}
    total = reader.into(fresh, buffers={}, rank=0)
    assert total == sum(tensor.nbytes for tensor in fresh.values())
    for item in tensors:
        assert raw(fresh[item.spec.key]) == raw(item.tensor), item.spec.key
    if world_size == 3:
        parts = reader.index["model/t0"].placements
        assert len({place.location for place in parts}) > 1  # it really was cut


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(4, 3).t(),
        torch.zeros(6, 8)[::2, ::2],
        torch.zeros(12).as_strided((3, 4), (1, 3)),
    ],
    ids=["transposed", "strided", "column-major"],
)
def test_targets_that_are_not_contiguous_are_filled(tmp_path: Path, target: torch.Tensor) -> None:
    source = torch.arange(12.0).reshape(3, 4)
    write_generation(tmp_path, [adam_part({"w": source})] * 2)
    assert not target.is_contiguous()
    reader_of(tmp_path).into({"model/w": target}, buffers={}, rank=0)
    assert torch.equal(target, source)


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_targets_that_are_resolved_lazily_are_filled(tmp_path: Path, kind: str) -> None:
    source = torch.tensor([1 + 2j, 3 - 1j]) if kind == "conj" else torch.tensor([1.0, -2.0])
    write_generation(tmp_path, [adam_part({"w": torch.zeros(1)}, buffers={"b": source})])
    target: torch.Tensor = torch.zeros_like(source)
    target = target.conj() if kind == "conj" else torch._neg_view(target)
    assert target.is_contiguous()
    assert target.is_conj() or target.is_neg()
    reader_of(tmp_path).into({"model/b": target}, buffers={}, rank=0)
    assert torch.equal(target, source)


def test_one_element_with_any_stride_is_filled(tmp_path: Path) -> None:
    write_generation(tmp_path, [adam_part({"w": torch.tensor([3.0])})])
    target = torch.zeros(100)[::50][1:]
    assert target.view(-1).stride() == (50,)
    reader_of(tmp_path).into({"model/w": target}, buffers={}, rank=0)
    assert target.tolist() == [3.0]


def test_channels_last_is_kept_and_filled(tmp_path: Path) -> None:
    source = torch.randn(2, 3, 4, 5)
    write_generation(tmp_path, [adam_part({"w": source})])
    target = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    reader_of(tmp_path).into({"model/w": target}, buffers={}, rank=0)
    assert torch.equal(target, source)
    assert target.is_contiguous(memory_format=torch.channels_last)


def test_parameters_that_need_gradients_are_filled_without_a_trace(tmp_path: Path) -> None:
    source = torch.randn(3, 4)
    write_generation(tmp_path, [adam_part({"w": source, "u": source.t()})])
    model = nn.ParameterDict({"w": torch.zeros(3, 4), "u": torch.zeros(4, 3)})
    model["u"] = nn.Parameter(torch.zeros(3, 4).t())
    targets = {f"model/{name}": p.detach() for name, p in model.items()}
    reader_of(tmp_path).into(targets, buffers={}, rank=0)
    assert torch.equal(model["w"], source)
    assert torch.equal(model["u"], source.t())
    assert model["w"].grad_fn is None


def test_buffers_are_each_ranks_own(tmp_path: Path) -> None:
    """Case 33, for buffers: what differs by rank stays different."""
    parts = [adam_part({"w": torch.ones(2)}, buffers={"n": torch.tensor([r])}) for r in range(3)]
    write_generation(tmp_path, parts)
    reader = reader_of(tmp_path)
    for rank in range(3):
        target = torch.zeros(1, dtype=torch.int64)
        buffers = reader.tail(rank).buffers
        reader.into({"model/n": target}, buffers=buffers, rank=rank)
        assert target.item() == rank
    target = torch.full((1,), 9)
    reader.into({"model/n": target}, buffers={}, rank=0)  # another world size: rank 0's
    assert target.item() == 0


def own_part(rank: int) -> Part:
    base = adam_part({"w": torch.arange(30.0).reshape(10, 3)})

    def encode(put: Callable[[str, Any], Any]) -> Any:
        big = torch.full((5, 2), float(rank))
        return {
            "rng": rank,
            "values": [put("a", big), put("b", torch.tensor(rank, dtype=torch.int8))],
        }

    return Part(base.tensors, encode, {"lr": 0.1})


def test_own_tensors_come_back_from_the_right_rank(tmp_path: Path) -> None:
    """Case 33: one rank's values are never another's."""
    write_generation(tmp_path, [own_part(rank) for rank in range(3)])
    reader = reader_of(tmp_path)
    for rank in range(3):
        tail = reader.tail(rank)
        assert tail.values["rng"] == rank
        first, second = reader.own(rank, tail.tensors)
        assert first.tolist() == [[float(rank)] * 2] * 5
        assert (second.item(), second.dtype) == (rank, torch.int8)
        assert tail.shared == {"lr": 0.1}


def test_a_lack_of_memory_speaks_against_no_file(tmp_path: Path) -> None:
    write_generation(tmp_path, [own_part(0)])
    reader = reader_of(tmp_path)
    with little_memory(), pytest.raises(StorageError, match="1,099,511,627,776 bytes") as caught:
        reader.own(0, [OwnTensor(0, "uint8", (1 << 40,))])
    assert caught.value.errno == errno.ENOMEM
    assert not is_bad_bytes(caught.value)


def test_sizes_that_no_tensor_has_are_bad_bytes_whatever_memory_there_is(tmp_path: Path) -> None:
    write_generation(tmp_path, [own_part(0)])
    with pytest.raises(CorruptFileError, match="can't be: Stride"):
        reader_of(tmp_path).own(0, [OwnTensor(0, "uint8", (0, 1 << 62, 1 << 62))])


def test_a_tail_of_another_save_is_refused_though_every_digest_is_right(tmp_path: Path) -> None:
    """Case 38: files of different saves are never mixed."""
    write_generation(tmp_path, [own_part(0)], step=100, id_="a" * 32)
    write_generation(tmp_path, [own_part(0)], step=200, id_="b" * 32)
    store = GenerationStore(tmp_path)
    theirs = store.manifest(100).files["rank_00000.state"]
    data = (store.path(100) / "rank_00000.state").read_bytes()
    for step, id_ in ((300, "c" * 32), (400, "a" * 32)):
        point = write_generation(tmp_path, [own_part(0)], step=step, id_=id_)
        files = {**point.files, "rank_00000.state": theirs}
        store.path(step).rename(tmp_path / f"old-{step}")
        write_generation(tmp_path, [own_part(0)], step=step, id_=id_, files=files)
        path = store.path(step) / "rank_00000.state"
        path.chmod(0o600)
        path.write_bytes(data)
        reader = Reader(store, store.manifest(step))
        with pytest.raises(CorruptFileError, match=f"of step {step}, save {id_[:8]}"):
            reader.tail(0)


@pytest.mark.parametrize("sizes", [[10], [4, 4], [100, 0, 1, 50], [1, 1, 1, 1]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_that_read_the_same_files_begin_at_equal_distances(
    sizes: list[int], num_ranks: int
) -> None:
    total = sum(sizes)
    for rank in range(num_ranks):
        number, share = _beginning(sizes, rank, num_ranks)
        assert 0 <= share < 1
        at = sum(sizes[:number]) + share * sizes[number]
        assert at == pytest.approx(total * rank // num_ranks)
    assert _beginning([], 1, 2) == (0, 0.0)
    assert _beginning([0, 0], 1, 2) == (0, 0.0)


@pytest.mark.parametrize("rank", range(3))
def test_every_byte_comes_wherever_a_rank_begins(tmp_path: Path, rank: int) -> None:
    part = adam_part({f"w{n}": torch.randn(500 + n) for n in range(4)})
    point = write_generation(tmp_path, [part, part])
    live = {item.spec.key: torch.zeros_like(item.tensor) for item in part.tensors}
    Reader(GenerationStore(tmp_path), point, place=(rank, 3)).into(live, buffers={}, rank=0)
    for item in part.tensors:
        assert raw(live[item.spec.key]) == raw(item.tensor)


def test_a_tail_of_another_rank_is_refused(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [own_part(0), own_part(1)])
    store = GenerationStore(tmp_path)
    swapped = {
        **point.files,
        "rank_00000.state": point.files["rank_00001.state"],
        "rank_00001.state": point.files["rank_00000.state"],
    }
    write_generation(tmp_path, [own_part(0), own_part(1)], step=200, files=swapped)
    for rank in range(2):
        path = store.path(200) / f"rank_0000{rank}.state"
        path.chmod(0o600)
        path.write_bytes((store.path(100) / f"rank_0000{1 - rank}.state").read_bytes())
    reader = Reader(store, store.manifest(200))
    with pytest.raises(CorruptFileError, match="is of rank 1"):
        reader.tail(0)


def replace_file(run_dir: Path, part: Part, name: str, data: bytes, *, step: int) -> None:
    """Have a generation with right digests whose file ``name`` holds ``data``."""
    point = write_generation(run_dir, [part], step=step - 1)
    piece = digest_bytes(data).removeprefix("xxh3_128:")
    record = json.loads(json.dumps(FileDigest.from_pieces(len(data), [piece]).to_json()))
    write_generation(run_dir, [part], step=step, files={**point.files, name: record})
    path = GenerationStore(run_dir).path(step) / name
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("data", [b"1234", b"{}" + (9).to_bytes(8, "little"), b"\xff" * 8])
def test_a_state_file_whose_json_cannot_be_there_is_refused(tmp_path: Path, data: bytes) -> None:
    replace_file(tmp_path, own_part(0), "rank_00000.state", data, step=200)
    with pytest.raises(CorruptFileError, match="bytes"):
        reader_of(tmp_path, 200).tail(0)


@pytest.mark.parametrize("at", [9, PIECE_BYTES - 1, PIECE_BYTES, (24 << 20) + 7])
def test_a_changed_byte_is_found_in_whichever_piece_it_lies(tmp_path: Path, at: int) -> None:
    source = torch.arange(float(6 << 20)).reshape(-1, 8)  # 24 MiB behind 8 bytes of header
    part = Part([live("model/w", Role.WEIGHT, source, "w")])
    write_generation(tmp_path, [part])
    store = GenerationStore(tmp_path)
    change_byte(store.path(100) / "rank_00000.shard", at)
    with pytest.raises(DigestMismatchError) as caught:
        reader_of(tmp_path).into({"model/w": torch.empty_like(source)}, buffers={}, rank=0)
    assert caught.value.piece == at // PIECE_BYTES
    assert "rank_00000.shard" in str(caught.value)


def test_a_changed_byte_behind_what_is_read_is_found_too(tmp_path: Path) -> None:
    write_generation(tmp_path, [adam_part({"w": torch.ones(4), "u": torch.ones(4)})])
    change_byte(GenerationStore(tmp_path).path(100) / "rank_00000.shard", -1)
    with pytest.raises(DigestMismatchError):
        reader_of(tmp_path).into({"model/w": torch.empty(4)}, buffers={}, rank=0)


@pytest.mark.parametrize("at", [-1, -9, -200, 0])
def test_a_changed_byte_of_a_state_file_is_found_before_it_is_parsed(
    tmp_path: Path, at: int
) -> None:
    write_generation(tmp_path, [own_part(0)])
    change_byte(GenerationStore(tmp_path).path(100) / "rank_00000.state", at)
    with pytest.raises(DigestMismatchError):
        reader_of(tmp_path).tail(0)


def test_a_changed_index_is_found(tmp_path: Path) -> None:
    write_generation(tmp_path, [own_part(0)])
    change_byte(GenerationStore(tmp_path).path(100) / ".snapshot_metadata", 30)
    with pytest.raises(DigestMismatchError, match="snapshot_metadata was changed"):
        reader_of(tmp_path)


def test_a_state_file_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    write_generation(tmp_path, [own_part(0)])
    path = GenerationStore(tmp_path).path(100) / "rank_00000.state"
    data = path.read_bytes().replace(b'"version": 1', b'"version": 2')
    replace_file(tmp_path, own_part(0), path.name, data, step=200)
    with pytest.raises(FormatVersionError, match="2"):
        reader_of(tmp_path, 200).tail(0)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (torch.zeros(5), "float32 \\[5\\]"),
        (torch.zeros(4, dtype=torch.int32), "int32"),
        (torch.zeros(2, 2), "\\[2, 2\\]"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_a_byte_is_read(
    tmp_path: Path, target: torch.Tensor, word: str
) -> None:
    write_generation(tmp_path, [adam_part({"w": torch.ones(4)}, buffers={"n": torch.ones(4)})])
    reader = reader_of(tmp_path)
    for key, buffers in (("model/w", {}), ("model/n", reader.tail(0).buffers)):
        with pytest.raises(MismatchError, match=word):
            reader.into({key: target}, buffers=buffers, rank=0)
    assert not target.any()
    with pytest.raises(MismatchError, match="holds nothing as model/x"):
        reader.into({"model/x": target}, buffers={}, rank=0)


def test_places_that_overlap_are_bad_bytes_and_not_a_bad_call(tmp_path: Path) -> None:
    write_generation(tmp_path, [own_part(0)])
    reader = reader_of(tmp_path)
    twice = [OwnTensor(64, "float32", (4,)), OwnTensor(72, "float32", (4,))]
    with pytest.raises(CorruptFileError, match="overlap"):
        reader.own(0, twice)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.other = nn.Parameter(torch.empty(0, 2))


def test_tied_weights_are_one_tensor_under_two_keys(tmp_path: Path) -> None:
    model = Tied()
    captured = Captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    write_generation(tmp_path, [part_of(captured)])
    reader = reader_of(tmp_path)
    tied = {"model/first.weight", "model/second.weight"}
    assert tied < set(reader.index)
    assert tied & set(reader.untied) == {"model/first.weight"}
    assert {"model/empty", "model/other"} < set(reader.untied)
    saved = model.first.weight.detach().clone()
    model.first.weight.data.zero_()
    shared = reader.tail(0).shared
    names = GenerationStore(tmp_path).manifest(100).canonical.stateless
    targets = captured.prepare(reader.untied, names, shared)
    reader.into(targets, buffers={}, rank=0)
    assert torch.equal(model.second.weight, saved)
