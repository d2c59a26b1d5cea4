"""A trial load: every tensor and every rank's values, as a resume reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.runs import open_run

if TYPE_CHECKING:
    import torch

__all__ = ["Trial", "try_loading"]

#: So much is in memory at a time, or one tensor if that is larger.
_BATCH_BYTES = 256 << 20


class _Described(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """What was loaded.

    Attributes:
        step: The step that was found.
        id: Of its resume point.
        num_tensors: Weights, optimizer state, buffers and tensors of the ranks' own values.
        num_bytes: Of all of them.
        num_ranks: Ranks whose own values were read.
    """

    step: int
    id: str
    num_tensors: int
    num_bytes: int
    num_ranks: int


def try_loading(run_dir: Path, progress: Callable[[int], None]) -> Trial:
    """Return what was loaded from a run directory that was never seen before, into real tensors.

    Goes by what lies there alone: the newest generation, its manifest, its index, the values of
    each rank. Every piece that is read is compared with its digest.

    Raises:
        CorruptFileError, NotFoundError: It can't be loaded.
    """
    import torch  # noqa: PLC0415 - only who loads needs it

    from dist_ckpt.resume import Reader, inherit  # noqa: PLC0415 - as above
    from dist_ckpt.staging import torch_dtype  # noqa: PLC0415 - as above

    generation = open_run(run_dir).latest()
    if generation is None:
        raise CorruptFileError(
            f"{run_dir} has no generation to load.",
            next_step="Give the same command again; please report this if it stays.",
            path=str(run_dir),
        )
    point = generation.manifest
    generation.store.check_files(point)
    reader = Reader(generation.store, point)
    num_tensors = num_bytes = 0

    def empty(tensor: _Described) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))

    sized = ((key, empty(tensor)) for key, tensor in reader.untied.items())
    for batch in _batches(sized):
        filled = reader.into(batch, buffers={}, rank=0)
        num_tensors, num_bytes = num_tensors + len(batch), num_bytes + filled
        progress(filled)
    for rank in range(point.world_size):
        told = inherit(reader, point, rank=rank, wanted=())
        buffers = {key: empty(own) for key, own in told.buffers.items()}
        values = told.read(reader)
        filled = reader.into(buffers, buffers=told.buffers, rank=rank)
        filled += sum(tensor.nbytes for tensor in values)
        num_tensors += len(buffers) + len(values)
        num_bytes += filled
        progress(filled)
    return Trial(point.step, point.id, num_tensors, num_bytes, point.world_size)


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    batch: dict[str, torch.Tensor] = {}
    total = 0
    for key, tensor in tensors:
        num_bytes = tensor.nbytes
        if batch and total + num_bytes > _BATCH_BYTES:
            yield batch
            batch, total = {}, 0
        batch[key] = tensor
        total += num_bytes
    if batch:
        yield batch
