"""The codec of step_NNNNNN.bin: every byte, every check, and the frozen example."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.canonical import (
    HEADER_BYTES,
    MAX_PARAMS,
    CanonicalState,
    bin_name,
    bin_size,
    encode_header,
    encode_pieces,
    parse_header,
    parse_state,
    parse_step_name,
    regions,
    step_name,
)
from dist_ckpt.errors import CorruptFileError, SettingError

GOLDEN = Path(__file__).parents[1] / "golden" / "step_000007.bin"
GOLDEN_SHA256 = "dbc7d325c6a0412cf046815e85e951795caa2ce08f82f2be7adff8046ec84853"


def state(step: int = 3, num_params: int = 5) -> CanonicalState:
    rng = np.random.default_rng(0)
    weights, m, v = (rng.standard_normal(num_params).astype(np.float32) for _ in range(3))
    return CanonicalState(step, weights, m, v)


def encoded(value: CanonicalState, **options: int) -> bytes:
    return b"".join(bytes(piece) for piece in encode_pieces(value, **options))


def test_the_published_model_has_the_published_size() -> None:
    assert bin_size(12_780_288) == 153_363_464
    assert bin_size(0) == HEADER_BYTES


def test_the_frozen_example_is_read_and_written_byte_for_byte() -> None:
    data = GOLDEN.read_bytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256
    golden = parse_state(data, path=GOLDEN)
    assert golden.step == 7
    assert golden.num_params == 6
    assert parse_step_name(GOLDEN.name) == golden.step
    assert golden.weights.tolist() == pytest.approx(
        [0.0, -0.0, 1.0, -1.5, 3.4028234663852886e38, 1.401298464324817e-45], abs=0.0, rel=0.0
    )
    assert np.signbit(golden.weights[1])
    assert golden.m[0] == np.float32(0.1)
    assert golden.v[5] == np.float32(0.25)
    assert encoded(golden) == data


def test_the_script_that_made_the_example_still_makes_it(tmp_path: Path) -> None:
    script = tmp_path / "make_bin.py"
    script.write_bytes((GOLDEN.parent / "make_bin.py").read_bytes())
    subprocess.run([sys.executable, "-B", str(script)], check=True, timeout=30)
    assert (tmp_path / GOLDEN.name).read_bytes() == GOLDEN.read_bytes()


def test_the_header_is_two_little_endian_int32() -> None:
    assert encode_header(1, 2**24 + 1) == b"\x01\0\0\0\x01\0\0\x01"
    assert encode_header(MAX_PARAMS, MAX_PARAMS) == b"\xff\xff\xff\x7f" * 2


@pytest.mark.parametrize("n_params", [-1, MAX_PARAMS + 1])
def test_a_count_outside_int32_is_refused(n_params: int) -> None:
    for call in (bin_size, regions, lambda n: encode_header(1, n)):
        with pytest.raises(SettingError) as caught:
            call(n_params)
        assert caught.value.found == n_params


@pytest.mark.parametrize("step", [-1, 2**31])
def test_a_step_outside_int32_is_refused(step: int) -> None:
    with pytest.raises(SettingError, match=str(step)):
        encode_header(step, 1)


@given(st.integers(0, 2**31 - 1), st.integers(0, MAX_PARAMS))
def test_any_header_comes_back(step: int, n_params: int) -> None:
    data = encode_header(step, n_params)
    assert parse_header(data, file_size=bin_size(n_params), path="x.bin") == (step, n_params)


@pytest.mark.parametrize("size", [0, 7])
def test_a_short_header_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptFileError) as caught:
        parse_header(b"\0" * size, file_size=size, path="x.bin")
    assert (caught.value.path, caught.value.expected, caught.value.found) == ("x.bin", 8, size)


def test_a_negative_step_is_corrupt() -> None:
    with pytest.raises(CorruptFileError, match="step -1"):
        parse_header(struct.pack("<ii", -1, 0), file_size=8, path="x.bin")


def test_a_negative_count_is_corrupt() -> None:
    # -1 parameters would call for a file of -4 bytes: the sign is checked, not the size alone.
    with pytest.raises(CorruptFileError, match="-1 parameters"):
        parse_header(struct.pack("<ii", 1, -1), file_size=8, path="x.bin")


@pytest.mark.parametrize("difference", [-1, 1, -12, 12])
def test_a_size_that_the_header_does_not_call_for_is_corrupt(difference: int) -> None:
    with pytest.raises(CorruptFileError) as caught:
        parse_header(encode_header(1, 10), file_size=128 + difference, path="x.bin")
    assert (caught.value.expected, caught.value.found) == (128, 128 + difference)


def test_a_header_that_asks_for_gigabytes_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptFileError):
        parse_state(encode_header(1, MAX_PARAMS) + b"\0" * 12, path="x.bin")


def test_the_regions_cover_the_file_without_a_gap() -> None:
    parts = regions(7)
    assert [part.start for part in parts] == [8, 36, 64]
    assert [part.stop for part in parts] == [36, 64, bin_size(7)]


@pytest.mark.parametrize("piece_bytes", [1, 8, 12, 2**24])
@pytest.mark.parametrize("num_params", [0, 1, 5])
def test_a_state_comes_back_whatever_the_pieces(num_params: int, piece_bytes: int) -> None:
    before = state(num_params=num_params)
    data = encoded(before, piece_bytes=piece_bytes)
    assert len(data) == bin_size(num_params)
    after = parse_state(data, path="x.bin")
    assert after.step == before.step
    for name in ("weights", "m", "v"):
        assert getattr(after, name).tobytes() == getattr(before, name).tobytes()


def test_reading_and_writing_copy_nothing() -> None:
    data = np.frombuffer(encoded(state()), np.uint8).copy()
    view = parse_state(data, path="x.bin")
    assert all(np.shares_memory(part, data) for part in (view.weights, view.m, view.v))
    pieces = list(encode_pieces(view))[1:]
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), data) for piece in pieces)


def test_an_array_with_gaps_is_written_in_its_own_order() -> None:
    wide = np.arange(10, dtype=np.float32)
    value = CanonicalState(1, wide[::2], wide[:5], wide[5:])
    assert parse_state(encoded(value), path="x").weights.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(4, np.float32),
        np.zeros(5, np.float64),
        np.zeros((5, 1), np.float32),
        np.zeros(5, ">f4"),
    ],
    ids=["length", "dtype", "dims", "byte order"],
)
def test_arrays_that_do_not_fit_together_are_refused(wrong: np.ndarray) -> None:
    good = np.zeros(5, np.float32)
    with pytest.raises(SettingError, match="v is"):
        CanonicalState(1, good, good, wrong)


def test_names_have_six_digits_at_least() -> None:
    assert bin_name(100) == "step_000100.bin"
    assert step_name(0) == "step_000000"
    assert bin_name(1_234_567) == "step_1234567.bin"
    with pytest.raises(SettingError):
        bin_name(-1)


@given(st.integers(0, 10**12))
def test_every_name_says_its_step(step: int) -> None:
    assert parse_step_name(step_name(step)) == step
    assert parse_step_name(bin_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step_100",
        "step_0000100",
        "step_-00100",
        "step_00010a",
        "step_000100.bin.sha256",
        "step_000100\n",
        " step_000100",
        "Step_000100",
        "step_000100.BIN",
        "step_٠٠٠١٠٠",
        "step_",
        ".tmp-step_000100",
        "",
    ],
)
def test_no_other_name_means_a_step(name: str) -> None:
    assert parse_step_name(name) is None


def test_steps_are_ordered_as_numbers() -> None:
    """Case 5: names sorted as text put 10000000 before 9900."""
    names = [step_name(step) for step in (9_900, 10_000, 999_999, 10_000_000)]
    steps = [parse_step_name(name) for name in sorted(names)]
    assert max(step for step in steps if step is not None) == 10_000_000
    assert steps[-1] == 999_999  # what text makes the last


@pytest.mark.parametrize("module", ["dist_ckpt.canonical", "dist_ckpt.history"])
def test_reading_what_a_run_left_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
