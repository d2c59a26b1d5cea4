"""Digests of files: one per piece of 16 MiB and one over the pieces. Layer 2, pure.

xxh3_128 shows that bytes changed; it doesn't show who changed them. A digest over pieces lets
partial reads be checked and is computed by several threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.storage._ops import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dist_ckpt.storage._types import AnyArray, Bytes, Path

PREFIX: Final = "xxh3_128:"
_HEX = re.compile(r"[0-9a-f]{32}")


def piece_count(size_bytes: int) -> int:
    """Return how many pieces a file of ``size_bytes`` has; an empty file has none."""
    return -(-size_bytes // PIECE_BYTES)


def flat(data: Bytes | AnyArray) -> memoryview:
    """Return the bytes of ``data``, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type] # an array has a buffer, typed or not
    # An empty array of several dimensions can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def digest_piece(data: Bytes | AnyArray) -> str:
    """Return the 32 hexadecimal digits of the xxh3_128 of one piece. Lets go of the GIL."""
    return xxhash.xxh3_128_hexdigest(flat(data))


def digest_bytes(data: Bytes | AnyArray) -> str:
    """Return ``'xxh3_128:<32 hex>'`` of ``data``, as one whole and not in pieces."""
    return PREFIX + xxhash.xxh3_128_hexdigest(flat(data))


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file's bytes must be.

    Attributes:
        size_bytes: True size of the file.
        pieces: xxh3_128 of each 16 MiB piece in the order of the file, 32 hexadecimal digits each;
            the last is shorter.
        whole: ``'xxh3_128:<hex>'`` over the 16-byte digests of the pieces, concatenated.
    """

    size_bytes: int
    pieces: tuple[str, ...]
    whole: str

    @classmethod
    def from_pieces(cls, size_bytes: int, pieces: Sequence[str]) -> FileDigest:
        """Return the digest of a file whose pieces have these digests."""
        return cls(size_bytes, tuple(pieces), digest_bytes(bytes.fromhex("".join(pieces))))

    @classmethod
    def of(cls, data: Bytes | AnyArray) -> FileDigest:
        """Return the digest of a file that holds exactly ``data``."""
        view = flat(data)
        starts = range(0, len(view), PIECE_BYTES)
        return cls.from_pieces(
            len(view), [digest_piece(view[at : at + PIECE_BYTES]) for at in starts]
        )

    def piece_range(self, piece: int) -> tuple[int, int]:
        """Return the half-open byte range of a piece."""
        return piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.size_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the digest as plain JSON values."""
        return {
            "size_bytes": self.size_bytes,
            "piece_bytes": PIECE_BYTES,
            "pieces": list(self.pieces),
            "whole": self.whole,
        }

    @classmethod
    def from_json(cls, node: object, *, path: Path | None = None) -> FileDigest:
        """Return the digest that ``to_json`` gave, after checking every part of it.

        Args:
            node: Parsed JSON, from a file that isn't trusted.
            path: The file it came from, for the error.

        Raises:
            CorruptFileError: A part is missing, of another type, out of range, or contradicts
                another.
        """
        if not isinstance(node, dict):
            raise _malformed(path, "an object", type(node).__name__)
        size = node.get("size_bytes")
        if type(size) is not int or size < 0:
            raise _malformed(path, "size_bytes of 0 or more", repr(size))
        if node.get("piece_bytes") != PIECE_BYTES:
            raise _malformed(path, f"piece_bytes {PIECE_BYTES}", repr(node.get("piece_bytes")))
        pieces = node.get("pieces")
        if not isinstance(pieces, list) or len(pieces) != piece_count(size):
            found = f"{len(pieces)} pieces" if isinstance(pieces, list) else repr(pieces)
            raise _malformed(path, f"{piece_count(size)} pieces for {size} bytes", found)
        for piece in pieces:
            if not isinstance(piece, str) or not _HEX.fullmatch(piece):
                raise _malformed(path, "32 hexadecimal digits a piece", repr(piece))
        digest = cls.from_pieces(size, pieces)
        if node.get("whole") != digest.whole:
            raise _malformed(path, f"whole {digest.whole}", repr(node.get("whole")))
        return digest


def _malformed(path: Path | None, expected: str, found: str) -> CorruptFileError:
    where = f" in {path}" if path is not None else ""
    return CorruptFileError(
        f"A file digest{where} is malformed: expected {expected}, found {found}.",
        next_step="Use another generation.",
        path=None if path is None else str(path),
        expected=expected,
        found=found,
    )
