"""The new ranks' files, written and read back. I/O through ``storage`` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dist_ckpt import storage
from dist_ckpt.canonical import encode_header
from dist_ckpt.errors import CorruptFileError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.reshard._fetch import Fetch
from dist_ckpt.reshard._prepare import Prepared
from dist_ckpt.resume import Reader
from dist_ckpt.resume_point import ResumePoint, shard_name, state_name
from dist_ckpt.slices import Box, Role
from dist_ckpt.snapshot_index import IndexedTensor
from dist_ckpt.staging import OwnTensor, StateTail, encode_tail
from dist_ckpt.storage import Buffers, FileDigest, ForwardWriter

__all__ = ["Contained", "Machinery", "machinery", "try_loading", "write_files"]

#: Chunks that may be on their way to the disk at a time.
_WRITES = 4
_READ_THREADS = 2

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Machinery:
    """Memory and threads of one rewriting."""

    buffers: Buffers
    read_pool: Executor
    write_pool: Executor


@contextmanager
def machinery(old: int, new: int, memory_bytes: int) -> Iterator[Machinery]:
    """Give buffers for so many old and new ranks' files at a time, and threads.

    Raises:
        SettingError: The memory is too small for so many ranks.
    """
    # A reader holds two, a writer one, assembling two more.
    buffers = Buffers(max(2 * old + new, 2 * new) + 2 + _WRITES, memory_bytes)
    try:
        with (
            ThreadPoolExecutor(_READ_THREADS, "dist-ckpt-read") as read_pool,
            ThreadPoolExecutor(_WRITES, "dist-ckpt-write") as write_pool,
        ):
            yield Machinery(buffers, read_pool, write_pool)
    finally:
        buffers.close()


@dataclass
class Contained:
    """Digests of what a generation holds, whoever keeps which part of it.

    Attributes:
        everywhere: Of weights and optimizer state, in canonical order.
        own: Rank → digest of its buffers and of the tensors inside its values.
    """

    everywhere: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    own: dict[int, xxhash.xxh3_128] = field(default_factory=dict)

    def of(self, rank: int) -> xxhash.xxh3_128:
        """Return the digest that a rank's own tensors go into."""
        return self.own.setdefault(rank, xxhash.xxh3_128())


def write_files(
    job: Prepared, directory: Path, parts: Machinery, progress: Progress
) -> tuple[dict[str, FileDigest], Contained]:
    """Return the digests of all new files, durable but for their names, and what they hold.

    Raises:
        CorruptFileError: Bytes of the generation aren't what was written.
        StorageError: The system refused.
    """
    contained = Contained()
    files: dict[str, FileDigest] = {}
    # Past the page cache, as a generation was written: it needs less of the processor, too.
    with Fetch(job.directory, job.digests, parts.buffers, parts.read_pool, direct=True) as fetch:
        copy = _Copy(job, fetch, contained, progress)
        sizes = [layout.shard_bytes for layout in job.plan.layout.ranks]
        with _writers(directory, shard_name, sizes, parts) as writers:
            copy.shards(writers)
            fetch.finish()
        files.update(_digests(writers))
        with _writers(directory, state_name, [s.state_bytes for s in job.states], parts) as writers:
            copy.states(writers)
            fetch.finish()
        files.update(_digests(writers))
    # What isn't carried (other ranks' values) is compared, too: a faulty source is no source.
    _verify_rest(job.directory, job.digests, fetch.compared)
    return files, contained


@contextmanager
def _writers(
    directory: Path, name: Callable[[int], str], sizes: Sequence[int], parts: Machinery
) -> Iterator[list[ForwardWriter]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ForwardWriter(directory / name(rank), size, parts.buffers, parts.write_pool)
            )
            for rank, size in enumerate(sizes)
        ]


def _digests(writers: Sequence[ForwardWriter]) -> dict[str, FileDigest]:
    return {Path(w.path).name: w.digest for w in writers if w.digest is not None}


@dataclass(frozen=True)
class _Copy:
    """Moves a generation's bytes into new files, in the order of both."""

    job: Prepared
    fetch: Fetch
    contained: Contained
    progress: Progress

    def shards(self, writers: Sequence[ForwardWriter]) -> None:
        canonical = self.job.plan.layout.canonical
        if canonical.is_shard:
            header = encode_header(self.job.point.step, canonical.num_params)
            writers[0].write(0, np.frombuffer(header, np.uint8))
        self._replicas(writers, (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ))

    def states(self, writers: Sequence[ForwardWriter]) -> None:
        self._replicas(writers, (Role.OPTIMIZER,))
        followers: dict[int, list[int]] = {}
        for rank, state in enumerate(self.job.states):
            followers.setdefault(state.source, []).append(rank)
        for source, ranks in followers.items():
            self._buffers(writers, source, ranks)
            self._values(writers, source, ranks)
        for rank, state in enumerate(self.job.states):
            tail = encode_tail(state.tail)
            writers[rank].write(state.tail_start, np.frombuffer(tail, np.uint8))

    def _replicas(self, writers: Sequence[ForwardWriter], roles: Sequence[Role]) -> None:
        for spec in self.job.contents.specs:
            if spec.role not in roles:
                continue
            places = self.job.index[spec.key].placements
            for piece in self.job.plan.pieces[spec.key]:
                rows = self.fetch.rows(places, spec.dtype, piece.owned.box)
                self._move(rows, [(writers[piece.rank], piece.owned.start)], self.everywhere)

    @property
    def everywhere(self) -> xxhash.xxh3_128:
        return self.contained.everywhere

    def _buffers(self, writers: Sequence[ForwardWriter], source: int, ranks: Sequence[int]) -> None:
        starts = {
            rank: {owned.key: owned.start for owned in self.job.plan.layout.ranks[rank].state}
            for rank in ranks
        }
        for key in self.job.states[ranks[0]].tail.buffers:
            rows = _buffer_rows(self.fetch, self.job.tails[source], self.job.index[key])
            targets = [(writers[rank], starts[rank][key]) for rank in ranks]
            self._move(rows, targets, self.contained.of(source))

    def _values(self, writers: Sequence[ForwardWriter], source: int, ranks: Sequence[int]) -> None:
        for number, own in enumerate(self.job.tails[source].tensors):
            rows = self.fetch.bytes_of(state_name(source), own.byte_range)
            targets = [
                (writers[rank], self.job.states[rank].tail.tensors[number].start) for rank in ranks
            ]
            self._move(rows, targets, self.contained.of(source))

    def _move(
        self,
        rows: Iterator[ByteArray],
        targets: Sequence[tuple[ForwardWriter, int]],
        digest: xxhash.xxh3_128,
    ) -> None:
        done = 0
        for data in rows:
            for writer, start in targets:
                writer.write(start + done, data)
            digest.update(data.data)
            done += data.nbytes
            self.progress(data.nbytes * len(targets))


def _buffer_rows(fetch: Fetch, tail: StateTail, tensor: IndexedTensor) -> Iterator[ByteArray]:
    """Return a buffer as this rank has it; as the first rank has it where this one has none."""
    own: OwnTensor | None = tail.buffers.get(tensor.key)
    if own is None:
        return fetch.rows(tensor.placements, tensor.dtype, Box.whole(tensor.shape))
    if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
        raise CorruptFileError(
            f"{tensor.key} is {own.dtype} {list(own.shape)} in {state_name(tail.rank)} and "
            f"{tensor.dtype} {list(tensor.shape)} in the index.",
            next_step="Use another generation; `dist-ckpt verify RUN` names the whole ones.",
        )
    return fetch.bytes_of(state_name(tail.rank), own.byte_range)


def try_loading(
    job: Prepared,
    store: StoredGenerations,
    point: ResumePoint,
    contained: Contained,
    *,
    parts: Machinery,
    progress: Progress,
) -> None:
    """Return if the new generation was read back past the page cache and holds the same tensors.

    Goes by the new manifests alone, as a resume does; every byte of every file is compared with its
    digest.

    Raises:
        CorruptFileError: It doesn't.
    """
    reader = Reader(store, point)
    digests = store.digests(point)
    found = Contained()
    directory = store.path(point.step)
    with Fetch(directory, digests, parts.buffers, parts.read_pool, direct=True) as fetch:
        for spec in job.contents.specs:
            if spec.role is not Role.BUFFER:
                tensor = reader.index[spec.key]
                rows = fetch.rows(tensor.placements, tensor.dtype, Box.whole(tensor.shape))
                _digest_rows(rows, found.everywhere, progress)
        fetch.finish()
        for rank in range(point.world_size):
            tail = reader.tail(rank)
            for key in tail.buffers:
                rows = _buffer_rows(fetch, tail, reader.index[key])
                _digest_rows(rows, found.of(rank), progress)
            for own in tail.tensors:
                rows = fetch.bytes_of(state_name(rank), own.byte_range)
                _digest_rows(rows, found.of(rank), progress)
            fetch.finish()
    _require_same(job, contained, found, directory)
    _verify_rest(directory, digests, fetch.compared)


def _digest_rows(rows: Iterator[ByteArray], digest: xxhash.xxh3_128, progress: Progress) -> None:
    for data in rows:
        digest.update(data.data)
        progress(data.nbytes)


def _require_same(job: Prepared, wanted: Contained, found: Contained, path: Path) -> None:
    is_same = wanted.everywhere.digest() == found.everywhere.digest()
    for rank, state in enumerate(job.states):
        is_same &= wanted.of(state.source).digest() == found.of(rank).digest()
    if not is_same:
        raise CorruptFileError(
            f"The rewritten step {job.point.step} doesn't hold the same tensors.",
            next_step="Nothing of it was kept. Please report this, with `show --tensors`.",
            path=str(path),
        )


def _verify_rest(
    directory: Path, digests: Mapping[str, FileDigest], compared: Mapping[str, set[int]]
) -> None:
    """Compare the pieces that hold no tensor: values, gaps, zeros."""
    for name, digest in digests.items():
        rest = set(range(len(digest.pieces))) - compared.get(name, set())
        storage.verify_file(directory / name, digest, pieces=rest)
