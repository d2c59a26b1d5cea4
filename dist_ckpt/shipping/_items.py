"""One file that is shipped: where its bytes come from, and what they must be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dist_ckpt import storage
from dist_ckpt.errors import DigestMismatchError
from dist_ckpt.storage import PIECE_BYTES, FileDigest

__all__ = ["Content", "Item", "RunningDigest", "content_of_bytes", "file_pieces", "measure"]

Bytes = bytes | bytearray | memoryview
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Content:
    """A file that is to be shipped, not read yet.

    Attributes:
        name: Its path below the shipped folder, with ``/``.
        size_bytes: Its size.
        chunks: Gives its bytes in order; what was given is only valid until the next.
        mode: Permission bits where the destination has such.
        digest: What its bytes must be, where that is known already.
    """

    name: str
    size_bytes: int
    chunks: Callable[[], Iterator[Bytes]]
    mode: int = 0o400
    digest: FileDigest | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A file that is to be shipped, read once.

    Attributes:
        content: Where its bytes come from.
        digest: What the copy has to be, piece by piece.
        sha256: The same for whoever has no dist_ckpt.
    """

    content: Content
    digest: FileDigest
    sha256: str

    @property
    def name(self) -> str:
        """Its path below the shipped folder."""
        return self.content.name

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.digest.size_bytes


class RunningDigest:
    """Both digests of a file, taken while its bytes go by in chunks of any size."""

    def __init__(self) -> None:
        self._piece = xxhash.xxh3_128()
        self._pieces: list[str] = []
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def update(self, data: Bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        self._sha256.update(view)
        while view.nbytes:
            room = PIECE_BYTES - self.size_bytes % PIECE_BYTES
            part, view = view[:room], view[room:]
            self._piece.update(part)
            self.size_bytes += len(part)
            if len(part) == room:
                self._end_piece()

    def finish(self) -> tuple[FileDigest, str]:
        """Return both, of all bytes that went by. Once."""
        if self.size_bytes % PIECE_BYTES:
            self._end_piece()
        return FileDigest.from_pieces(self.size_bytes, self._pieces), self._sha256.hexdigest()

    def _end_piece(self) -> None:
        self._pieces.append(self._piece.hexdigest())
        self._piece.reset()


def content_of_bytes(name: str, data: bytes, *, mode: int = 0o600) -> Content:
    """Return a file that is in memory; one that training appends to has the mode 0600."""

    def chunks() -> Iterator[Bytes]:
        yield data

    return Content(name, len(data), chunks, mode, FileDigest.of(data))


def file_pieces(path: Path, digest: FileDigest) -> Callable[[], Iterator[Bytes]]:
    """Return what gives a file piece by piece, each compared with its digest as it is read."""

    def chunks() -> Iterator[Bytes]:
        buffer = memoryview(bytearray(min(digest.size_bytes, PIECE_BYTES)))
        for number in range(len(digest.pieces)):
            start, stop = digest.piece_range(number)
            part = buffer[: stop - start]
            segment = storage.Segment(start, part, len(part))
            storage.read_segments(path, [segment], digest, threads=1)
            yield part

    return chunks


def measure(content: Content, progress: Progress) -> Item:
    """Return the file with its digests after all of it was read.

    Raises:
        CorruptFileError: It isn't what it must be, so it is no source.
    """
    running = RunningDigest()
    for chunk in watched(content.chunks(), progress):
        running.update(chunk)
    digest, sha256 = running.finish()
    if content.digest is not None and digest != content.digest:
        raise DigestMismatchError(
            f"{content.name} isn't what was saved: its digest is {digest.whole}, it must be "
            f"{content.digest.whole}.",
            next_step="`dist-ckpt verify RUN` names the whole generations; ship one of them.",
            path=content.name,
            expected=content.digest.whole,
            found=digest.whole,
        )
    return Item(content, digest, sha256)


def watched(chunks: Iterable[Bytes], progress: Progress) -> Iterator[Bytes]:
    """Give the chunks, and tell their bytes once they were dealt with."""
    for chunk in chunks:
        yield chunk
        progress(len(chunk))
