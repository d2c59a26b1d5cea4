"""step_N.bin: linked, copied or put together, always the same bytes, never half there."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_ckpt import storage
from dist_ckpt.announce import process_start_time
from dist_ckpt.canonical import bin_size, encode_header, parse_header, regions
from dist_ckpt.capture import LiveTensor
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    NoSpaceError,
    NotFoundError,
    SettingError,
    StorageError,
    UsageError,
)
from dist_ckpt.export import (
    canonical_pieces,
    export_bin,
    read_bin,
    read_sum,
    write_bin,
    write_sum,
    write_whole,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.layout import plan_layout
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.slices import Box, Role, TensorSpec
from dist_ckpt.storage import PIECE_BYTES, FileDigest, Ops, use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps
from helpers.generating import Part, adam_part, change_byte, live, write_generation


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (11, 4),
        "layer/0%": (5, 3),
        "scale": (),
        "empty": (0, 4),
        "b": (7,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def exported(run_dir: Path, parts: list[Part], *, copy: bool = False, step: int = 100) -> bytes:
    point = write_generation(run_dir, parts, step=step)
    store = GenerationStore(run_dir)
    export_bin(store, point, copy=copy)
    return store.bin_path(step).read_bytes()


def check_sum(path: Path) -> None:
    """The system's own tool agrees with the sum beside the file."""
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("there is no sha256sum here")
    done = subprocess.run(
        [tool, "-c", "--strict", f"{path.name}.sha256"],
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path.name}: OK\n"


@pytest.mark.parametrize("name", ["b\udcffd", "new\nline\r", "back\\nslash", "plain ü"])
def test_the_sum_of_a_file_of_any_name_is_sha256sums_own(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"weights")
    found = write_sum(path)
    tool = shutil.which("sha256sum")
    if tool is not None:
        for words in (["-c", "--strict", f"{name}.sha256"], [name]):
            done = subprocess.run([tool, *words], cwd=tmp_path, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
        assert done.stdout == path.with_name(f"{name}.sha256").read_bytes()
    assert read_sum(path) == found
    path.with_name(f"{name}.sha256").write_bytes(b"%s  other\n" % found.encode())
    with pytest.raises(CorruptFileError, match="isn't the sum of"):
        read_sum(path)


def test_a_sum_of_a_backslash_that_was_written_as_it_is_is_read(tmp_path: Path) -> None:
    path = tmp_path / "back\\slash"
    (tmp_path / "back\\slash.sha256").write_text(f"{'0' * 64}  back\\slash\n")
    assert read_sum(path) == "0" * 64


def cut(part: Part, grids: dict[str, tuple[int, ...]]) -> list[Part]:
    """Return the ranks of a job that holds ``part`` cut into grids, by parameter."""
    num_ranks = max(math.prod(grid) for grid in grids.values())
    ranks: list[Part] = [Part([], part.encode, part.shared) for _ in range(num_ranks)]
    for item in part.tensors:
        grid = grids.get(item.spec.param or "", ())
        sides = [
            torch.arange(size).tensor_split(k)
            for size, k in zip(item.spec.shape, grid, strict=False)
        ]
        follows = len(grid) == len(item.spec.shape) and math.prod(grid) == num_ranks
        cells = list(itertools.product(*sides)) if follows else []
        for rank, held in enumerate(ranks):
            if not cells:
                held.tensors = [*held.tensors, item]
                continue
            cell = cells[rank]
            box = Box(tuple(int(side[0]) for side in cell), tuple(len(side) for side in cell))
            local = item.tensor[tuple(slice(int(s[0]), int(s[-1]) + 1) for s in cell)].clone()
            held.tensors = [*held.tensors, LiveTensor(replace(item.spec, boxes=(box,)), local)]
    return ranks


# The same bytes at any world size


@pytest.mark.parametrize("grid", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 1, 4)])
def test_parts_cut_along_any_dim_come_in_the_order_of_the_whole(
    grid: tuple[int, ...], tmp_path: Path
) -> None:
    """Tensor parallel on every dim, alone and with FSDP; replicas beside it."""
    torch.manual_seed(2)
    named = {
        "first": torch.randn(4, 5),
        "cube": torch.randn(6, 5, 4).to(torch.bfloat16),
        "last": torch.randn(9),
    }
    whole = exported(tmp_path / "one", [adam_part(named)])
    ranks = cut(adam_part(named), {"cube": grid})
    assert len(ranks) == 4
    assert exported(tmp_path / "four", ranks) == whole


def test_rows_and_columns_larger_than_a_piece_are_put_together_in_bounded_memory(
    tmp_path: Path,
) -> None:
    row = PIECE_BYTES // 4 + 1000
    named = {"wide": torch.arange(2.0 * row).reshape(2, row), "flat": torch.ones(1, row)}
    whole = exported(tmp_path / "one", [adam_part(named)])
    ranks = cut(adam_part(named), {"wide": (1, 2), "flat": (1, 2)})
    point = write_generation(tmp_path / "two", ranks)
    digest = hashlib.sha256()
    for piece in canonical_pieces(GenerationStore(tmp_path / "two"), point):
        assert len(piece) <= PIECE_BYTES
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(whole).digest()


def three_pieces_a_rank(tmp_path: Path) -> tuple[GenerationStore, ResumePoint]:
    rows = 3 * PIECE_BYTES // 1000
    part = adam_part({"w": torch.arange(2.0 * rows * 250).reshape(2 * rows, 250)})
    point = write_generation(tmp_path, cut(part, {"w": (2, 1)}))
    return GenerationStore(tmp_path), point


def test_the_next_piece_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, point = three_pieces_a_rank(tmp_path)
    read: list[tuple[str, int, bool]] = []
    real = storage.read_piece

    def read_piece(path: Path, digest: FileDigest, number: int, buffer: np.ndarray) -> None:
        ahead = threading.current_thread() is not threading.main_thread()
        read.append((Path(path).name, number, ahead))
        real(path, digest, number, buffer)

    monkeypatch.setattr(storage, "read_piece", read_piece)
    found = hashlib.sha256()
    for piece in canonical_pieces(store, point):
        found.update(piece)
    wanted = {
        (name, number)
        for name, digest in store.digests(point).items()
        for number in range(len(digest.pieces))
        if name.endswith(".shard")
    }
    assert {(name, number) for name, number, _ in read} == wanted
    # The one in which one array ends and the next begins is read again, the files being gone
    # through in turn.
    assert len(read) <= len(wanted) + 4
    assert sum(ahead for *_, ahead in read) >= len(wanted) - 4
    assert not [t for t in threading.enumerate() if t.name.startswith("dist-ckpt-read")]


def test_a_flipped_bit_in_a_piece_that_was_read_ahead_comes_out_where_it_is_used(
    tmp_path: Path,
) -> None:
    store, point = three_pieces_a_rank(tmp_path)
    change_byte(store.path(point.step) / "rank_00001.shard", 2 * PIECE_BYTES + 9)
    with pytest.raises(DigestMismatchError) as caught:
        for _ in canonical_pieces(store, point):
            pass
    assert caught.value.piece == 2


def test_a_caller_that_stops_in_the_middle_leaves_no_thread(tmp_path: Path) -> None:
    store, point = three_pieces_a_rank(tmp_path)
    pieces = canonical_pieces(store, point)
    for _ in range(3):
        next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("dist-ckpt-read")]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_file_of_several_ranks_is_that_of_one_byte_for_byte(
    tmp_path: Path, world_size: int
) -> None:
    part = adam_part(weights())
    alone = exported(tmp_path / "one", [part])
    together = exported(tmp_path / "many", [part] * world_size)
    assert together == alone
    assert len(alone) == bin_size(44 + 15 + 1 + 0 + 7)
    store = GenerationStore(tmp_path / "many")
    used = {p.location for t in store.index(store.manifest(100)).values() for p in t.placements}
    assert len([name for name in used if name.endswith(".shard")]) > 1  # it really was cut
    check_sum(store.bin_path(100))


def test_the_order_is_the_models_own(tmp_path: Path) -> None:
    mine = weights()
    exported(tmp_path, [adam_part(mine)] * 2, step=31)
    state = read_bin(tmp_path / "step_000031.bin")
    flat = torch.cat([tensor.reshape(-1) for tensor in mine.values()]).numpy()
    assert state.step == 31
    assert (state.weights == flat).all()
    assert (state.m == flat + np.float32(0.25)).all()
    assert (state.v == flat + np.float32(0.5)).all()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened_exactly(
    tmp_path: Path, dtype: torch.dtype, world_size: int
) -> None:
    specials = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 2.0**-24, -1.5]
    narrow = {"w": torch.tensor(specials).to(dtype), "u": torch.randn(9, 3).to(dtype)}
    exported(tmp_path, [adam_part(narrow)] * world_size)
    state = read_bin(tmp_path / "step_000100.bin")
    expected = torch.cat([t.float().reshape(-1) for t in narrow.values()])
    found = torch.from_numpy(state.weights.copy())
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert state.m.dtype == np.float32


def test_narrow_moments_are_widened_too(tmp_path: Path) -> None:
    part = adam_part({"w": torch.arange(6.0).bfloat16()}, moment_dtype=torch.bfloat16)
    exported(tmp_path, [part])
    assert read_bin(tmp_path / "step_000100.bin").m.tolist() == [x + 0.25 for x in range(6)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_without_state_are_zeros_in_their_place(tmp_path: Path, world_size: int) -> None:
    mine = weights()
    point = write_generation(tmp_path, [adam_part(mine, stateless=("layer/0%",))] * world_size)
    assert point.canonical.stateless == ("layer/0%",)
    export_bin(GenerationStore(tmp_path), point)
    state = read_bin(tmp_path / "step_000100.bin")
    for moment, shift in ((state.m, 0.25), (state.v, 0.5)):
        assert (moment[44:59] == 0).all()
        assert (moment[:44] == mine["wte"].reshape(-1).numpy() + np.float32(shift)).all()
        assert (moment[60:] == mine["b"].numpy() + np.float32(shift)).all()


def test_a_tensor_larger_than_a_piece_is_whole(tmp_path: Path) -> None:
    rows = PIECE_BYTES // 4 // 8 + 5
    part = adam_part({"w": torch.arange(float(rows * 8)).reshape(rows, 8), "b": torch.ones(3)})
    alone = hashlib.sha256(exported(tmp_path / "one", [part])).hexdigest()
    assert hashlib.sha256(exported(tmp_path / "two", [part] * 2)).hexdigest() == alone


def test_each_piece_is_read_once_however_many_tensors_lie_in_it(tmp_path: Path) -> None:
    class Counting(Ops):
        num_bytes = 0

        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            taken = super().preadv(fd, buffers, offset)
            self.num_bytes += taken
            return taken

    part = adam_part({f"w{number}": torch.ones(256, 512) for number in range(40)})
    point = write_generation(tmp_path, [part] * 2)
    with use_ops(Counting()) as ops:
        size = sum(len(piece) for piece in canonical_pieces(GenerationStore(tmp_path), point))
    assert isinstance(ops, Counting)
    assert size <= ops.num_bytes < 1.1 * size  # the rest is the index


def test_no_piece_is_larger_than_two_of_the_files(tmp_path: Path) -> None:
    part = adam_part({"w": torch.zeros(PIECE_BYTES // 4 + 1, dtype=torch.bfloat16)})
    point = write_generation(tmp_path, [part])
    pieces = canonical_pieces(GenerationStore(tmp_path), point)
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) <= 2 * PIECE_BYTES
    assert sum(sizes) == bin_size(PIECE_BYTES // 4 + 1)


def test_12_780_288_parameters_are_153_363_464_bytes() -> None:
    """Requirement A2 to A4, by numbers alone: no buffer is made."""
    n = 12_780_288
    shape = (n // 64, 64)
    specs = [
        TensorSpec(key, role, "float32", shape, (Box.whole(shape),), "w")
        for key, role in (
            ("model/w", Role.WEIGHT),
            ("optimizer/w/exp_avg", Role.EXP_AVG),
            ("optimizer/w/exp_avg_sq", Role.EXP_AVG_SQ),
        )
    ]
    layout = plan_layout([specs])
    assert layout.ranks[0].shard_bytes == bin_size(n) == 153_363_464
    assert [region.start for region in regions(n)] == [8, 51_121_160, 102_242_312]
    header = encode_header(100, n)
    assert parse_header(header, file_size=153_363_464, path="x") == (100, n)
    several = plan_layout([specs] * 3)
    assert sum(plan.shard_bytes for plan in several.ranks) == 12 * n


def test_a_sparse_file_of_12_780_288_parameters_is_read_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "step_000100.bin"
    with path.open("wb") as file:
        file.write(encode_header(100, 12_780_288))
        file.truncate(153_363_464)
    state = read_bin(path)
    assert (state.step, state.num_params) == (100, 12_780_288)
    assert (state.v[-1], state.weights[0]) == (0, 0)
    with path.open("r+b") as file:
        file.truncate(153_363_463)
    with pytest.raises(CorruptFileError, match=r"153363463.*153363464"):
        read_bin(path)


# Link or copy


def test_at_world_size_one_it_is_the_shard_under_another_name(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    assert export_bin(store, point) == "link"
    shard = store.path(100) / "rank_00000.shard"
    assert os.path.samefile(store.bin_path(100), shard)
    check_sum(store.bin_path(100))
    assert export_bin(store, point) == "there"


def test_on_wish_it_is_a_file_of_its_own(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    assert export_bin(store, point, copy=True) in {"copy", "reflink"}
    shard = store.path(100) / "rank_00000.shard"
    assert not os.path.samefile(store.bin_path(100), shard)
    assert store.bin_path(100).read_bytes() == shard.read_bytes()
    assert export_bin(store, point, copy=True) == "there"
    check_sum(store.bin_path(100))


def test_a_link_becomes_a_copy_and_a_copy_a_link_when_the_wish_changes(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    shard = store.path(100) / "rank_00000.shard"
    export_bin(store, point)
    assert export_bin(store, point, copy=True) in {"copy", "reflink"}
    assert not os.path.samefile(store.bin_path(100), shard)
    assert export_bin(store, point) == "link"
    assert os.path.samefile(store.bin_path(100), shard)


def test_where_links_are_refused_it_is_copied(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    ops = FaultyOps(Fault("link", "*", error="EPERM"))
    with use_ops(ops):
        assert export_bin(store, point) in {"copy", "reflink"}
    assert ops.struck == 1
    check_sum(store.bin_path(100))


def test_a_link_that_cant_be_looked_at_for_a_moment_leaves_no_second_name(tmp_path: Path) -> None:
    """A rename between two links of one file does nothing, and leaves both names."""
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    export_bin(store, point)
    ops = FaultyOps(Fault("open", "step_000100.bin", error="EIO"))
    with use_ops(ops):
        assert export_bin(store, point) == "link"
    assert ops.struck == 1
    names = ["checkpoints", "step_000100.bin", "step_000100.bin.sha256"]
    assert sorted(os.listdir(tmp_path)) == names
    check_sum(store.bin_path(100))


def test_the_name_is_given_to_a_whole_file_only(tmp_path: Path) -> None:
    """Case 2: the final name is always whole, a copy's too."""
    for name, parts, copy in (("a", 1, True), ("b", 1, False), ("c", 2, False)):
        run_dir = tmp_path / name
        point = write_generation(run_dir, [adam_part(weights())] * parts)
        store = GenerationStore(run_dir)
        with use_ops(RecordingOps()) as ops:
            export_bin(store, point, copy=copy)
        assert isinstance(ops, RecordingOps)
        target = store.bin_path(100)
        calls = [(call.op, call.path, call.args) for call in ops.calls]
        (beside,) = (path for op, path, args in calls if (op, args) == ("rename", (target,)))
        assert Path(beside).name.startswith(f".tmp-{target.name}-")
        rename = calls.index(("rename", beside, (target,)))
        before, after = calls[:rename], calls[rename + 1 :]
        assert not any(op == "pwrite" and path == str(target) for op, path, _ in calls)
        if copy or parts > 1:
            assert ("fsync", beside, ()) in before
        assert ("fsync", str(run_dir), ()) in after


# What is there already


def put(run_dir: Path, data: bytes) -> Path:
    path = run_dir / "step_000100.bin"
    path.write_bytes(data)
    write_sum(path)
    return path


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "short": lambda data: data[:-4],
    "of another step": lambda data: encode_header(99, 67) + data[8:],
    "of another size": lambda _: encode_header(100, 1) + bytes(12),
    "not one of ours": lambda _: b"hello",
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_under_the_name_is_replaced(
    tmp_path: Path, kind: str, world_size: int
) -> None:
    parts = [adam_part(weights())] * world_size
    right = exported(tmp_path / "right", parts)
    point = write_generation(tmp_path, parts)
    path = put(tmp_path, WRONG[kind](right))
    assert export_bin(GenerationStore(tmp_path), point) in {"link", "assembled"}
    assert path.read_bytes() == right
    check_sum(path)


@pytest.mark.parametrize("copy", [False, True])
def test_another_files_bytes_under_the_same_header_are_replaced(tmp_path: Path, copy: bool) -> None:
    """The abandoned past of a run that went back has the same step and the same size."""
    part = adam_part(weights())
    right = exported(tmp_path / "right", [part])
    point = write_generation(tmp_path, [part])
    path = put(tmp_path, right[:-4] + b"\1\2\3\4")
    assert export_bin(GenerationStore(tmp_path), point, copy=copy) != "there"
    assert path.read_bytes() == right
    check_sum(path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_that_the_device_cannot_read_is_replaced(tmp_path: Path, world_size: int) -> None:
    """Through a memory map an unreadable page would end the process by SIGBUS."""
    parts = [adam_part(weights())] * world_size
    right = exported(tmp_path / "right", parts)
    point = write_generation(tmp_path, parts)
    path = put(tmp_path, right)
    ops = FaultyOps(Fault("preadv", path.name, error="EIO"))
    with use_ops(ops):
        assert export_bin(GenerationStore(tmp_path), point) in {"link", "assembled"}
    assert ops.struck == 1
    assert path.read_bytes() == right
    check_sum(path)


def test_an_assembled_file_without_a_sum_is_made_again(tmp_path: Path) -> None:
    """The sum is written last: without it, nobody knows what is there."""
    parts = [adam_part(weights())] * 2
    point = write_generation(tmp_path, parts)
    store = GenerationStore(tmp_path)
    assert export_bin(store, point) == "assembled"
    right = store.bin_path(100).read_bytes()
    assert export_bin(store, point) == "there"
    store.bin_path(100).with_name("step_000100.bin.sha256").unlink()
    assert export_bin(store, point) == "assembled"
    assert store.bin_path(100).read_bytes() == right
    check_sum(store.bin_path(100))


def test_a_link_without_a_sum_gets_one(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    export_bin(store, point)
    (tmp_path / "step_000100.bin.sha256").unlink()
    assert export_bin(store, point) == "there"
    check_sum(store.bin_path(100))


# Refusals


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (adam_part({"w": torch.ones(2, dtype=torch.float64)}), "float64"),
        (Part(adam_part({"w": torch.ones(2)}).tensors[:2]), "no Adam moments"),
        (Part([live("model/w", Role.WEIGHT, torch.ones(2, dtype=torch.int8), "w")]), "int8"),
    ],
    ids=["float64", "one moment", "int8"],
)
def test_what_the_format_cannot_hold_is_refused_with_the_reason(
    tmp_path: Path, part: Part, word: str
) -> None:
    point = write_generation(tmp_path, [part])
    assert point.canonical.refused is not None
    with pytest.raises(UsageError, match=word):
        export_bin(GenerationStore(tmp_path), point)
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_bytes_that_changed_never_become_a_file(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())] * 2)
    store = GenerationStore(tmp_path)
    change_byte(store.path(100) / "rank_00001.shard", 5)
    with pytest.raises(DigestMismatchError, match=r"rank_00001\.shard"):
        export_bin(store, point)
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_an_index_that_lacks_a_parameter_is_an_error_of_ours(tmp_path: Path) -> None:
    part = adam_part(weights())
    point = write_generation(tmp_path, [part] * 2)
    canonical = replace(point.canonical, names=(*point.canonical.names[:-1], "gone"))
    with pytest.raises(CorruptFileError, match="'gone' has no weight"):
        export_bin(GenerationStore(tmp_path), replace(point, canonical=canonical))
    assert os.listdir(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("pwrite", ".tmp-step_000100.bin-*", error="ENOSPC"), NoSpaceError),
        (Fault("fsync", ".tmp-step_000100.bin-*", error="EIO"), StorageError),
        (Fault("rename", ".tmp-step_000100.bin-*", error="EIO"), StorageError),
    ],
    ids=["write", "sync", "rename"],
)
def test_an_export_that_fails_leaves_nothing_and_can_be_made_again(
    tmp_path: Path, fault: Fault, error: type[StorageError]
) -> None:
    """Case 4, for the export."""
    point = write_generation(tmp_path, [adam_part(weights())] * 2)
    store = GenerationStore(tmp_path)
    ops = FaultyOps(fault)
    with use_ops(ops), pytest.raises(error):
        export_bin(store, point)
    assert ops.struck == 1
    assert os.listdir(tmp_path) == ["checkpoints"]
    assert export_bin(store, point) == "assembled"
    check_sum(store.bin_path(100))


def test_an_export_over_a_wrong_file_that_fails_leaves_no_sum_for_it(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())] * 2)
    put(tmp_path, b"wrong")
    ops = FaultyOps(Fault("rename", ".tmp-step_000100.bin-*", error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        export_bin(GenerationStore(tmp_path), point)
    assert ops.struck == 1
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "step_000100.bin"]


# Files by themselves


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    w, m, v = (np.arange(5, dtype=np.float32) + i for i in range(3))
    write_bin(path, 7, w, m, v)
    state = read_bin(path)
    assert (state.step, state.num_params) == (7, 5)
    for found, expected in ((state.weights, w), (state.m, m), (state.v, v)):
        assert (found == expected).all()
    assert not state.weights.flags.writeable
    assert path.stat().st_mode & 0o777 == 0o400
    assert os.listdir(tmp_path) == ["x.bin"]


def test_of_two_exports_to_one_name_each_puts_a_whole_file_there(tmp_path: Path) -> None:
    target, half = tmp_path / "x.bin", 1 << 20
    began, go_on = threading.Event(), threading.Event()

    def second() -> Iterator[bytes]:
        yield b"b" * half
        began.set()
        assert go_on.wait(20)
        yield b"b" * half

    def first() -> Iterator[bytes]:
        yield b"a" * half
        other.start()
        assert began.wait(20)
        yield b"a" * half

    other = threading.Thread(target=lambda: write_whole(target, 2 * half, second()))
    digest = write_whole(target, 2 * half, first())
    assert other.is_alive()  # in the midst of its file
    data = target.read_bytes()
    go_on.set()
    other.join(20)
    assert (data, digest) == (b"a" * 2 * half, hashlib.sha256(data).hexdigest())
    assert target.read_bytes() == b"b" * 2 * half
    assert os.listdir(tmp_path) == ["x.bin"]


def test_a_name_as_long_as_names_may_be_gets_its_file_and_its_sum(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 248)  # with .sha256 it has 255
    write_sum(path, write_whole(path, 1, [b"a"]))
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.sha256"]
    check_sum(path)


def test_what_killed_exports_left_is_removed_and_what_is_being_written_is_not(
    tmp_path: Path,
) -> None:
    parent = os.getppid()
    alive = f".tmp-x.bin-{parent}-{process_start_time(parent)}-0123abcd"
    others = [alive, f".tmp-x.bin.sha256-{parent}-1-0123abcd", ".tmp-x.binary"]
    for name in (".tmp-x.bin", f".tmp-x.bin-{parent}-1-0123abcd", *others):
        (tmp_path / name).write_text("half")
    write_whole(tmp_path / "x.bin", 1, [b"a"])
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "x.bin"])


def test_a_leftover_that_may_not_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    """Another user's in a directory like /tmp."""
    (tmp_path / ".tmp-x.bin").write_text("half")
    ops = FaultyOps(Fault("unlink", ".tmp-x.bin", error="EPERM"))
    with use_ops(ops):
        write_whole(tmp_path / "x.bin", 1, [b"a"])
    assert ops.struck == 1
    assert sorted(os.listdir(tmp_path)) == [".tmp-x.bin", "x.bin"]


def test_narrower_floats_are_widened_and_wider_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    half, full = np.ones(2, np.float16), np.ones(2, np.float32)
    write_bin(path, 1, half, full[::-1], np.ones(2, ">f4"))
    assert read_bin(path).weights.tolist() == [1, 1]
    with pytest.raises(UsageError, match="float64"):
        write_bin(path, 1, np.ones(2), full, full)
    with pytest.raises(SettingError, match="v is"):
        write_bin(path, 1, full, full, np.ones(3, np.float32))
    assert read_bin(path).weights.tolist() == [1, 1]


def test_writing_over_a_link_leaves_the_shard_as_it_was(tmp_path: Path) -> None:
    point = write_generation(tmp_path, [adam_part(weights())])
    store = GenerationStore(tmp_path)
    export_bin(store, point)
    empty = np.empty(0, np.float32)
    write_bin(store.bin_path(100), 100, empty, empty, empty)
    store.verify(point)
    assert read_bin(store.bin_path(100)).num_params == 0


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_bin(tmp_path / "x.bin")
