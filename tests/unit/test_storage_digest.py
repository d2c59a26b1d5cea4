"""Digests as values, and as JSON that isn't trusted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.storage import PIECE_BYTES, FileDigest, digest_bytes

GOOD = FileDigest.of(b"hello" * 1000)


def test_a_digest_comes_back_from_json() -> None:
    for digest in (GOOD, FileDigest.of(b""), FileDigest.of(bytes(PIECE_BYTES + 1))):
        text = json.dumps(digest.to_json(), allow_nan=False)
        assert FileDigest.from_json(json.loads(text)) == digest


def test_all_kinds_of_bytes_have_the_same_digest() -> None:
    array = np.arange(100, dtype=np.float32)
    data = array.tobytes()
    expected = digest_bytes(data)
    assert expected.startswith("xxh3_128:")
    assert len(expected) == len("xxh3_128:") + 32
    assert digest_bytes(memoryview(data)) == digest_bytes(bytearray(data)) == expected
    assert digest_bytes(array) == digest_bytes(array.reshape(10, 10)) == expected
    assert digest_bytes(np.zeros((0, 3), np.float32)) == digest_bytes(b"")


def test_the_range_of_each_piece_is_known() -> None:
    digest = FileDigest.of(bytes(PIECE_BYTES + 5))
    assert [digest.piece_range(piece) for piece in (0, 1)] == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, PIECE_BYTES + 5),
    ]


BAD: dict[str, Any] = {
    "not an object": [],
    "no size": {"size_bytes": None},
    "a size that is a boolean": {"size_bytes": True},
    "a negative size": {"size_bytes": -1},
    "another size": {"size_bytes": PIECE_BYTES + 1},
    "another piece size": {"piece_bytes": 4096},
    "no pieces": {"pieces": None},
    "too many pieces": {"pieces": list(GOOD.pieces) * 2},
    "a piece that isn't text": {"pieces": [5]},
    "a piece that isn't hexadecimal": {"pieces": ["g" * 32]},
    "a piece in capitals": {"pieces": [GOOD.pieces[0].upper()]},
    "a piece with a line end": {"pieces": [GOOD.pieces[0] + "\n"]},
    "another piece": {"pieces": ["0" * 32]},
    "another whole": {"whole": "xxh3_128:" + "0" * 32},
    "no whole": {"whole": None},
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_digest_is_a_corrupt_file(name: str) -> None:
    node = {**GOOD.to_json(), **BAD[name]} if isinstance(BAD[name], dict) else BAD[name]
    with pytest.raises(CorruptFileError) as caught:
        FileDigest.from_json(node, path="resume_point.json")
    assert caught.value.path == "resume_point.json"
    assert caught.value.expected
    assert "resume_point.json" in str(caught.value)
