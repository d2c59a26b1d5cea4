"""resume_point.json: what is written is read, and every change shows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dist_ckpt.errors import CorruptFileError, DigestMismatchError, FormatVersionError
from dist_ckpt.resume_point import (
    Canonical,
    ResumePoint,
    encode_resume_point,
    load_strict_json,
    parse_resume_point,
)
from helpers.hostile import resealed


def record(size: int = 10) -> dict[str, Any]:
    return {"size_bytes": size, "piece_bytes": 1 << 24, "pieces": ["0" * 32], "whole": "xxh3_128:0"}


POINT = ResumePoint(
    run="andrea",
    step=100,
    id="ab" * 16,
    parent={"step": 50, "id": "cd" * 16},
    attempt=2,
    time=1.5,
    reasons=("cadence", "SIGUSR1"),
    world_size=2,
    files={f"rank_{rank:05d}.{kind}": record() for rank in range(2) for kind in ("shard", "state")},
    index={"size_bytes": 3, "digest": "xxh3_128:1"},
    canonical=Canonical(("w", "b"), 12, is_shard=False, stateless=("b",)),
    identity={"config": {"lr": 0.1}},
    shared={"groups": []},
    notes={"größe": 1},
)


def test_a_resume_point_is_read_as_it_was_written() -> None:
    assert parse_resume_point(encode_resume_point(POINT), path="x") == POINT
    assert parse_resume_point(encode_resume_point(POINT), path="x").num_bytes == 40


def test_every_single_byte_that_changes_is_noticed() -> None:
    data = encode_resume_point(POINT)
    for position in range(len(data)):
        for flip in (1, 0x20):
            changed = bytearray(data)
            changed[position] ^= flip
            with pytest.raises(CorruptFileError):
                parse_resume_point(bytes(changed), path="x")


def test_every_truncation_is_noticed() -> None:
    data = encode_resume_point(POINT)
    for length in range(len(data)):
        with pytest.raises(CorruptFileError):
            parse_resume_point(data[:length], path="x")


def test_white_space_that_changes_is_noticed_too() -> None:
    data = encode_resume_point(POINT)
    with pytest.raises(DigestMismatchError):
        parse_resume_point(data.replace(b"\n", b"\n ", 1), path="x")


def rewritten(**changes: Any) -> bytes:
    """A resume point with other fields and a right digest."""
    return encode_resume_point(replace(POINT, **changes))


def test_a_later_format_version_is_refused_by_name() -> None:
    data = resealed(encode_resume_point(POINT).replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(FormatVersionError, match="2"):
        parse_resume_point(data, path="x")


def test_a_flipped_bit_in_the_version_is_no_later_version() -> None:
    """Case 1: the run goes on from an older generation, rather than asking for another program."""
    data = encode_resume_point(POINT).replace(b'"version": 1', b'"version": 3')
    with pytest.raises(DigestMismatchError):
        parse_resume_point(data, path="x")


def test_a_huge_number_of_ranks_takes_no_memory() -> None:
    with pytest.raises(CorruptFileError, match="4 files where 1000000000000 ranks"):
        parse_resume_point(rewritten(world_size=10**12), path="x")


def test_a_foreign_json_file_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="isn't a resume point"):
        parse_resume_point(b'{"format": "other"}', path="x")


@pytest.mark.parametrize(
    "name", ["../evil", "rank_00000.shard/../x", "/etc/passwd", "rank_0.shard", "rank_00000.exe"]
)
def test_a_file_name_that_could_leave_the_directory_is_refused(name: str) -> None:
    with pytest.raises(CorruptFileError, match="file name"):
        parse_resume_point(rewritten(files={**POINT.files, name: record()}), path="x")


def test_a_missing_rank_is_noticed() -> None:
    """Case 3: one rank's shard isn't listed."""
    files = {name: rec for name, rec in POINT.files.items() if name != "rank_00001.shard"}
    with pytest.raises(CorruptFileError, match="3 files where 2 ranks wrote 4"):
        parse_resume_point(rewritten(files=files), path="x")


def test_numbers_out_of_range_are_refused() -> None:
    for changes in ({"step": -1}, {"world_size": 0}, {"step": True}, {"attempt": "1"}):
        with pytest.raises(CorruptFileError):
            parse_resume_point(rewritten(**changes), path="x")


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff\xfe{}",
        b"[]",
        b"",
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_json_with_duplicates_nan_depth_or_another_encoding_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        load_strict_json(data, path="x")


def test_the_file_is_plain_json_for_other_readers() -> None:
    assert json.loads(encode_resume_point(POINT))["step"] == 100
