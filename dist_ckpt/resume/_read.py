"""Bytes of a generation straight into live tensors. Layer 5; reads only, no collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from dist_ckpt import storage
from dist_ckpt.capture import is_sharded, parts_of
from dist_ckpt.collecting import without_collection
from dist_ckpt.errors import CorruptFileError, MismatchError, UsageError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.resume._segments import FileSegments, Scatter, add_place, batches_of, bytes_of
from dist_ckpt.resume_point import ResumePoint, state_name
from dist_ckpt.slices import Box
from dist_ckpt.snapshot_index import IndexedTensor
from dist_ckpt.staging import TAIL_BYTES, OwnTensor, StateTail, parse_tail, tail_start, torch_dtype
from dist_ckpt.storage import FileDigest, Segment

__all__ = ["Reader"]

#: What can't be read in place (on a device, strided) goes through this much host memory at a time.
_BOUNCE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Part:
    """One box to be filled, and where it comes from."""

    target: torch.Tensor
    box: Box
    source: IndexedTensor | OwnTensor


class Reader:
    """Reads one generation; every piece that is touched is checked against its digest.

    Args:
        store: The run's generations.
        point: The checked resume point.
        place: This rank, and how many read the same files at this time: through the page cache
            then, each beginning elsewhere, so that each brings a part there for all.

    Attributes:
        index: key → tensor, tied ones under each of their keys.
    """

    @without_collection()
    def __init__(
        self, store: StoredGenerations, point: ResumePoint, *, place: tuple[int, int] = (0, 1)
    ) -> None:
        self._point = point
        self._place = place
        self._direct = place[1] == 1
        self._directory = store.path(point.step)
        self._digests = store.digests(point)
        self.index = store.index(point)

    @property
    def untied(self) -> dict[str, IndexedTensor]:
        """Each tensor once: of several keys of the same bytes the first, as capture names them."""
        return {key: tensor for key, tensor in self.index.items() if key not in self.tied}

    @cached_property
    def tied(self) -> dict[str, str]:
        """Each other key of the same bytes → the first."""
        first: dict[object, str] = {}
        tied: dict[str, str] = {}
        for key, tensor in self.index.items():
            # Tensors without elements take no place that they could share.
            has_bytes = any(place.byte_range.num_bytes for place in tensor.placements)
            if (same := first.setdefault(tensor.placements if has_bytes else key, key)) != key:
                tied[key] = same
        return tied

    def tail(self, rank: int) -> StateTail:
        """Return the JSON at the end of a rank's ``.state`` file.

        Raises:
            CorruptFileError: Not whole, or of another step, save or rank.
        """
        name = state_name(rank)
        path = self._directory / name
        size = self._digests[name].size_bytes
        if size < TAIL_BYTES:
            raise CorruptFileError(
                f"{path} has only {size} bytes.",
                next_step="Use another generation.",
                path=str(path),
            )
        last = self._bytes(name, size - TAIL_BYTES, TAIL_BYTES)
        start = tail_start(last, file_size=size, path=path)
        data = self._bytes(name, start, size - TAIL_BYTES - start)
        tail = parse_tail(data, limit=start, path=path)
        if (tail.rank, tail.step, tail.id) != (rank, self._point.step, self._point.id):
            raise CorruptFileError(
                f"{path} is of rank {tail.rank}, step {tail.step}, save {tail.id[:8]}; "
                f"the resume point is of step {self._point.step}, save {self._point.id[:8]}.",
                next_step="Use another generation.",
                path=str(path),
            )
        return tail

    def _bytes(self, name: str, start: int, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        if num_bytes:
            segment = Segment(start, memoryview(buffer), num_bytes)
            digest = self._digests[name]
            storage.read_segments(self._directory / name, [segment], digest, threads=1)
        return bytes(buffer)

    def own(self, rank: int, tensors: Iterable[OwnTensor]) -> list[torch.Tensor]:
        """Return fresh CPU tensors read from a rank's ``.state`` file.

        Raises:
            CorruptFileError: Sizes that no tensor has, or a piece that isn't what was written.
            StorageError: There is no memory for them.
        """
        wanted = list(tensors)
        path = self._directory / state_name(rank)
        fresh = [_room_of(own, path) for own in wanted]
        plan = FileSegments()
        for own, tensor in zip(wanted, fresh, strict=True):
            plan.add(own.byte_range.start, bytes_of(tensor))
        self._read({state_name(rank): plan})
        return fresh

    @without_collection()
    def into(
        self, live: Mapping[str, torch.Tensor], *, buffers: Mapping[str, OwnTensor], rank: int
    ) -> int:
        """Fill live tensors; return the bytes filled.

        Args:
            live: key → tensor of the whole global shape, on any device, in any memory format; of a
                DTensor the part that this rank holds is filled.
            buffers: Places in ``rank``'s own ``.state`` that count before the index's.
            rank: Whose ``.state`` that is.

        Raises:
            MismatchError: It holds no such tensor, or one of another dtype or shape.
            CorruptFileError: A piece isn't what was written, or places overlap; what was filled
                until then stays.
        """
        direct: list[_Part] = []
        bounced: list[_Part] = []
        for key, tensor in live.items():
            source = self._source(key, tensor, buffers)
            for box, view in parts_of(tensor):
                in_place = view.device.type == "cpu" and view.is_contiguous()
                # The bytes of a lazily conjugated or negated view aren't those of its values.
                in_place &= not (view.is_conj() or view.is_neg())
                (direct if in_place else bounced).append(_Part(view, box, source))
        self._fill(direct, rank)
        sizes = [part.target.nbytes for part in bounced]
        for batch in batches_of(bounced, sizes, _BOUNCE_BYTES):
            fresh = [
                replace(part, target=_room(part.target.shape, part.target.dtype)) for part in batch
            ]
            self._fill(fresh, rank)
            with torch.no_grad():
                for part, filled in zip(batch, fresh, strict=True):
                    part.target.copy_(filled.target)
        return sum(part.target.nbytes for part in (*direct, *bounced))

    def _fill(self, parts: Sequence[_Part], rank: int) -> None:
        """Have every part's bytes in its target, a contiguous CPU tensor."""
        plan: dict[str, FileSegments] = {}
        scatters: list[Scatter] = []
        for part in parts:
            if isinstance(part.source, OwnTensor):
                file = plan.setdefault(state_name(rank), FileSegments())
                file.add(part.source.byte_range.start, bytes_of(part.target))
                continue
            for place in part.source.placements:
                file = plan.setdefault(place.location, FileSegments())
                scatters += add_place(file, place, part.box, part.target, limit_bytes=_BOUNCE_BYTES)
        self._read(plan)
        # In the order of the files: what several parts want is close together.
        scatters.sort(key=lambda scatter: (scatter.location, scatter.start))
        for batch in batches_of(scatters, [s.num_bytes for s in scatters], _BOUNCE_BYTES):
            self._scatter(batch)

    def _scatter(self, batch: Sequence[Scatter]) -> None:
        """Read rows once, whoever wants a part of them, and copy the parts out."""
        scratch: dict[tuple[str, int, int], torch.Tensor] = {}
        plan: dict[str, FileSegments] = {}
        for scatter in batch:
            key = (scatter.location, scatter.start, scatter.num_bytes)
            if key not in scratch:
                scratch[key] = _room((scatter.num_bytes,), torch.uint8)
                file = plan.setdefault(scatter.location, FileSegments())
                file.add(scatter.start, bytes_of(scratch[key]))
        self._read(plan)
        with torch.no_grad():
            for scatter in batch:
                scatter.copy_from(scratch[scatter.location, scatter.start, scatter.num_bytes])

    def _source(
        self, key: str, tensor: torch.Tensor, buffers: Mapping[str, OwnTensor]
    ) -> IndexedTensor | OwnTensor:
        # What ranks share comes from the index, so that all of them get the same.
        own = None if is_sharded(tensor) else buffers.get(key)
        source: IndexedTensor | OwnTensor | None = own or self.index.get(key)
        here = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if source is None or (source.dtype, source.shape) != here:
            there = "nothing" if source is None else f"{source.dtype} {list(source.shape)}"
            raise MismatchError(
                f"Step {self._point.step} holds {there} as {key}, not {here[0]} {list(here[1])}.",
                next_step="Build the model and optimizer of the saved run.",
                key=key,
            )
        return source

    def _read(self, plan: Mapping[str, FileSegments]) -> None:
        names = sorted(plan)
        first, begin = _beginning([plan[name].num_bytes for name in names], *self._place)
        for name in names[first:] + names[:first]:
            digest: FileDigest = self._digests[name]
            path = self._directory / name
            segments = sorted(plan[name].segments, key=lambda segment: segment.offset)
            try:
                storage.read_segments(path, segments, digest, direct=self._direct, begin=begin)
            except UsageError as error:
                raise CorruptFileError(
                    f"Tensors overlap in {path}: {error.message}",
                    next_step="Use another generation.",
                    path=str(path),
                ) from error
            begin = 0.0


def _room_of(own: OwnTensor, path: Path) -> torch.Tensor:
    """Return room for a tensor whose sizes a file gives: they alone can be at fault there."""
    dtype = torch_dtype(own.dtype)
    try:
        torch.empty(own.shape, dtype=dtype, device="meta")  # counted as ever, and no memory taken
    except (RuntimeError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{path} has a tensor that can't be: {error}",
            next_step="Use another generation.",
            path=str(path),
        ) from error
    return _room(own.shape, dtype)


def _room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty CPU tensor; where the memory is lacking, that speaks against no file."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise storage.no_memory("allocate", math.prod(shape) * dtype.itemsize) from error


def _beginning(sizes: Sequence[int], rank: int, num_ranks: int) -> tuple[int, float]:
    """Return where a rank begins so that all of them cover the most: which file, which share of it.

    Args:
        sizes: Bytes wanted of each file.
        rank: Who.
        num_ranks: How many read them.
    """
    skipped = sum(sizes) * rank // num_ranks
    for number, size in enumerate(sizes):
        if skipped < size:
            return number, skipped / size
        skipped -= size
    return 0, 0.0
