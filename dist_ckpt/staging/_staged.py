"""One instant, ready to be written: from the arena, or streamed where there is no memory for one.

Layer 3. Made on the training thread, written on the background thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from dist_ckpt import storage
from dist_ckpt.layout import RankLayout
from dist_ckpt.resume_point import shard_name, state_name
from dist_ckpt.slices import Box, Role, local_boxes
from dist_ckpt.staging._compose import Composed
from dist_ckpt.staging._overlap import Overlap
from dist_ckpt.storage import PIECE_BYTES, FileDigest

__all__ = ["Staged", "Streamed", "Writable", "Written", "part_of"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Written:
    """This rank's files, durable but for their names.

    Attributes:
        files: name → digest.
        content: Digest of weights and optimizer state alone, without the step in the header; None
            where it wasn't taken.
    """

    files: Mapping[str, FileDigest]
    content: str | None


class Writable(Protocol):
    """One instant of one rank.

    Attributes:
        num_bytes: Of both files together.
        blocks: The live tensors must not change until it is written.
    """

    @property
    def num_bytes(self) -> int:
        """Of both files together."""

    @property
    def blocks(self) -> bool:
        """The live tensors must not change until it is written."""

    def wait(self, timeout_secs: float) -> None:
        """Return once the bytes are all there and known to be of one instant; on any thread."""

    def write(self, directory: Path, rank: int) -> Written:
        """Return once both files are written and synced.

        Raises:
            StorageError: The file system refused; a file that was begun is gone.
        """


@dataclass(frozen=True)
class Staged:
    """One instant's bytes in the arena, until the next call of ``Staging.stage``.

    Attributes:
        shard: uint8, page-aligned, padded to whole pages.
        shard_bytes: True length of the shard.
        state: The same for the ``.state`` file.
        state_bytes: Its true length.
        header_bytes: Bytes at the start of the shard that hold the step rather than state.
        optimizer_bytes: Bytes at the start of ``state`` that hold optimizer tensors.
        overlap: What the copy still waits for, if anything.
    """

    shard: ByteArray
    shard_bytes: int
    state: ByteArray
    state_bytes: int
    header_bytes: int
    optimizer_bytes: int
    overlap: Overlap | None = None
    blocks: bool = False

    @property
    def num_bytes(self) -> int:
        """Of both files together."""
        return self.shard_bytes + self.state_bytes

    def wait(self, timeout_secs: float) -> None:
        """Return once the bytes are all there and known to be of one instant; on any thread."""
        if self.overlap is not None:
            self.overlap.wait(timeout_secs)

    def write(self, directory: Path, rank: int) -> Written:
        """Return once both files are written from the arena and synced."""
        shard = storage.write_shard(directory / shard_name(rank), self.shard, self.shard_bytes)
        state = storage.write_shard(directory / state_name(rank), self.state, self.state_bytes)
        return Written({shard_name(rank): shard, state_name(rank): state}, self._content(shard))

    def _content(self, shard: FileDigest) -> str:
        first = self.shard[self.header_bytes : min(PIECE_BYTES, self.shard_bytes)]
        found = xxhash.xxh3_128(first.data)
        found.update("".join(shard.pieces[1:]).encode())
        found.update(self.state[: self.optimizer_bytes].data)
        return str(found.hexdigest())


@dataclass(frozen=True)
class Streamed:
    """One instant that is read from the live tensors while it is written: slower, and blocking.

    Attributes:
        plan: What this rank writes.
        live: key → this rank's part of a tensor, and the boxes that it is.
        composed: The end of the ``.state`` file.
        header: Bytes at the start of the shard.
    """

    plan: RankLayout
    live: Mapping[str, tuple[torch.Tensor, Sequence[Box]]]
    composed: Composed
    header: bytes
    blocks: bool = True

    @property
    def num_bytes(self) -> int:
        """Of both files together."""
        return self.plan.shard_bytes + self.composed.state_bytes

    def wait(self, timeout_secs: float) -> None:
        """Return at once: the live tensors are what they are."""

    def write(self, directory: Path, rank: int) -> Written:
        """Return once both files are written from the live tensors and synced."""
        shard = [(owned.start, self._source(owned.key, owned.box)) for owned in self.plan.shard]
        state = [(owned.start, self._source(owned.key, owned.box)) for owned in self.plan.state]
        state += [(own.start, tensor) for own, tensor in self.composed.tensors]
        files = {
            shard_name(rank): _write(
                directory / shard_name(rank),
                self.plan.shard_bytes,
                [self.header, *_laid_out(shard, len(self.header), self.plan.shard_bytes)],
            ),
            state_name(rank): _write(
                directory / state_name(rank),
                self.composed.state_bytes,
                [*_laid_out(state, 0, self.composed.tail_start), self.composed.tail],
            ),
        }
        return Written(files, None)

    def _source(self, key: str, box: Box) -> torch.Tensor:
        tensor, holds = self.live[key]
        return part_of(tensor, holds, box)


def part_of(tensor: torch.Tensor, holds: Sequence[Box], wanted: Box) -> torch.Tensor:
    """Return the view of ``tensor``, a rank's part of a global tensor, that is the box ``wanted``.

    Args:
        tensor: All that the rank holds.
        holds: The boxes that it holds; ``wanted`` lies in one of them.
        wanted: Of the global tensor.
    """
    if len(holds) == 1 and holds[0] == wanted:
        return tensor
    for box, place in zip(holds, local_boxes(holds), strict=True):
        if box.contains(wanted):
            steps = zip(wanted.offsets, box.offsets, place.offsets, wanted.sizes, strict=True)
            for dim, (start, origin, at, size) in enumerate(steps):
                tensor = tensor.narrow(dim, at + start - origin, size)
            return tensor
    raise RuntimeError(f"{wanted} isn't held here")


def optimizer_end(plan: RankLayout) -> int:
    """Return where the optimizer's tensors end in the ``.state`` file."""
    return max((o.stop for o in plan.state if o.role is Role.OPTIMIZER), default=0)


def _laid_out(
    items: Iterable[tuple[int, torch.Tensor]], start: int, end: int
) -> Iterator[torch.Tensor | int]:
    """Yield tensors in the order of the file, and between them the lengths of gaps."""
    at = start
    for place, tensor in items:
        if place > at:
            yield place - at
        yield tensor
        at = place + tensor.nbytes
    if end > at:
        yield end - at


def _write(path: Path, size_bytes: int, parts: Iterable[torch.Tensor | int | bytes]) -> FileDigest:
    with storage.StreamWriter(path, size_bytes, sha256=False) as writer:
        for part in parts:
            if isinstance(part, torch.Tensor):
                for piece in _pieces(part):
                    writer.write(piece)
            elif isinstance(part, int):
                for at in range(0, part, PIECE_BYTES):
                    writer.write(bytes(min(PIECE_BYTES, part - at)))
            else:
                writer.write(part)
    if writer.digest is None:
        raise RuntimeError("a finished stream has its digest")
    return writer.digest


def _pieces(tensor: torch.Tensor) -> Iterator[ByteArray]:
    """Yield a tensor's bytes, row-major, at most 16 MiB of host memory at a time."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element may have any stride
    count = max(PIECE_BYTES // max(flat.element_size(), 1), 1)
    for at in range(0, flat.numel(), count):
        yield flat[at : at + count].cpu().view(torch.uint8).numpy()
