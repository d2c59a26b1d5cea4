"""Bytes of a generation straight into live tensors. Layer 5; reads only, no collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, MismatchError, UsageError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.layout import plan_runs
from dist_ckpt.resume_point import ResumePoint, state_name
from dist_ckpt.slices import Box, Placement, dtype_size
from dist_ckpt.snapshot_index import IndexedTensor
from dist_ckpt.staging import TAIL_BYTES, OwnTensor, StateTail, parse_tail, tail_start, torch_dtype
from dist_ckpt.storage import FileDigest, Segment

__all__ = ["Reader"]

#: What can't be read in place (on a device, strided) goes through this much host memory at a time.
_BOUNCE_BYTES = 256 << 20


@dataclass
class _File:
    """What is to be read of one file."""

    segments: list[Segment] = field(default_factory=list)

    def add(self, start: int, target: memoryview) -> None:
        if target.nbytes:
            self.segments.append(Segment(start, target, target.nbytes))


class Reader:
    """Reads one generation; every piece that is touched is checked against its digest.

    Args:
        store: The run's generations.
        point: The checked resume point.

    Attributes:
        index: key → tensor, tied ones under each of their keys.
    """

    def __init__(self, store: StoredGenerations, point: ResumePoint) -> None:
        self._point = point
        self._directory = store.path(point.step)
        self._digests = store.digests(point)
        self.index = store.index(point)

    @property
    def untied(self) -> dict[str, IndexedTensor]:
        """Each tensor once: of several keys of the same bytes the first, as capture names them."""
        first: dict[object, str] = {}
        for key, tensor in self.index.items():
            # Tensors without elements take no place that they could share.
            has_bytes = any(place.byte_range.num_bytes for place in tensor.placements)
            first.setdefault(tensor.placements if has_bytes else key, key)
        return {key: self.index[key] for key in first.values()}

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
        """Return fresh CPU tensors read from a rank's ``.state`` file."""
        wanted = list(tensors)
        fresh = [torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in wanted]
        plan = _File()
        for own, tensor in zip(wanted, fresh, strict=True):
            plan.add(own.byte_range.start, _view(tensor))
        self._read({state_name(rank): plan})
        return fresh

    def into(
        self, live: Mapping[str, torch.Tensor], *, buffers: Mapping[str, OwnTensor], rank: int
    ) -> int:
        """Fill live tensors; return the bytes read.

        Args:
            live: key → tensor of the whole global shape, on any device, in any memory format.
            buffers: Places in ``rank``'s own ``.state`` that count before the index's.
            rank: Whose ``.state`` that is.

        Raises:
            MismatchError: It holds no such tensor, or one of another dtype or shape.
            CorruptFileError: A piece isn't what was written, or places overlap; what was filled
                until then stays.
        """
        direct: dict[str, _File] = {}
        bounced: list[tuple[torch.Tensor, IndexedTensor | OwnTensor]] = []
        total = 0
        for key, tensor in live.items():
            source = self._source(key, tensor, buffers)
            total += tensor.nbytes
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                _add(direct, source, tensor, rank)
            else:
                bounced.append((tensor, source))
        self._read(direct)
        for batch in _batches(bounced):
            plan: dict[str, _File] = {}
            fresh = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor, _ in batch]
            for (_, source), target in zip(batch, fresh, strict=True):
                _add(plan, source, target, rank)
            self._read(plan)
            with torch.no_grad():
                for (tensor, _), target in zip(batch, fresh, strict=True):
                    tensor.copy_(target)
        return total

    def _source(
        self, key: str, tensor: torch.Tensor, buffers: Mapping[str, OwnTensor]
    ) -> IndexedTensor | OwnTensor:
        source: IndexedTensor | OwnTensor | None = buffers.get(key) or self.index.get(key)
        here = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if source is None or (source.dtype, source.shape) != here:
            there = "nothing" if source is None else f"{source.dtype} {list(source.shape)}"
            raise MismatchError(
                f"Step {self._point.step} holds {there} as {key}, not {here[0]} {list(here[1])}.",
                next_step="Build the model and optimizer of the saved run.",
                key=key,
            )
        return source

    def _read(self, plan: Mapping[str, _File]) -> None:
        for name, file in plan.items():
            digest: FileDigest = self._digests[name]
            path = self._directory / name
            segments = sorted(file.segments, key=lambda segment: segment.offset)
            try:
                storage.read_segments(path, segments, digest)
            except UsageError as error:
                raise CorruptFileError(
                    f"Tensors overlap in {path}: {error.message}",
                    next_step="Use another generation.",
                    path=str(path),
                ) from error


def _add(
    plan: dict[str, _File], source: IndexedTensor | OwnTensor, tensor: torch.Tensor, rank: int
) -> None:
    target = _view(tensor)
    if isinstance(source, OwnTensor):
        plan.setdefault(state_name(rank), _File()).add(source.byte_range.start, target)
        return
    whole = Box.whole(tuple(tensor.shape))
    for place in source.placements:
        _add_place(plan.setdefault(place.location, _File()), place, whole, target, source.dtype)


def _add_place(file: _File, place: Placement, box: Box, target: memoryview, dtype: str) -> None:
    element_bytes = dtype_size(dtype)
    for run in plan_runs(place.box, box):
        start = run.target * element_bytes
        stop = start + run.count * element_bytes
        file.add(place.byte_range.start + run.source * element_bytes, target[start:stop])


def _view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, of any dtype and number of dims."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.data


def _batches(
    items: list[tuple[torch.Tensor, IndexedTensor | OwnTensor]],
) -> Iterable[list[tuple[torch.Tensor, IndexedTensor | OwnTensor]]]:
    batch: list[tuple[torch.Tensor, IndexedTensor | OwnTensor]] = []
    num_bytes = 0
    for item in items:
        if batch and num_bytes + item[0].nbytes > _BOUNCE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item[0].nbytes
    if batch:
        yield batch
