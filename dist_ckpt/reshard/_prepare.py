"""What is to be rewritten, read and planned before anything is written. Reads only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dist_ckpt.errors import CorruptFileError, NotFoundError, SettingError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.reshard._plan import Contents, Plan, plan_reshard, sort_tensors
from dist_ckpt.reshard._values import RankState, plan_states
from dist_ckpt.resume import Reader
from dist_ckpt.resume_point import ResumePoint, state_name
from dist_ckpt.slices import Role, TensorSpec
from dist_ckpt.snapshot_index import IndexedTensor, encode_index
from dist_ckpt.staging import StateTail
from dist_ckpt.storage import FileDigest

__all__ = ["Prepared", "prepare"]

#: A plan holds each rank's files and tensors: a slip in the number must not fill the memory.
_MOST_RANKS = 100_000


@dataclass(frozen=True)
class Prepared:
    """A generation and its plan for other ranks.

    Attributes:
        store: Where the generation lies.
        point: Its resume point.
        id: Name of the new resume point.
        digests: What the generation's files must be.
        index: Its tensors.
        contents: The same by what they are.
        tails: Of its ranks, as far as they are wanted.
        plan: Where the tensors go.
        states: What ends the new ranks' ``.state`` files.
        new_index: Bytes of the new ``.snapshot_metadata``.
    """

    store: StoredGenerations
    point: ResumePoint
    id: str
    digests: Mapping[str, FileDigest]
    index: Mapping[str, IndexedTensor]
    contents: Contents
    tails: Sequence[StateTail]
    plan: Plan
    states: Sequence[RankState]
    new_index: bytes

    @property
    def directory(self) -> Path:
        """Of the generation that is read."""
        return self.store.path(self.point.step)

    @property
    def world_size(self) -> int:
        """How many ranks it will have."""
        return len(self.states)

    @property
    def num_bytes(self) -> int:
        """Of the new ranks' files."""
        shards = sum(layout.shard_bytes for layout in self.plan.layout.ranks)
        return shards + sum(state.state_bytes for state in self.states)


def prepare(store: StoredGenerations, point: ResumePoint, world_size: int) -> Prepared:
    """Return the plan of rewriting a generation for ``world_size`` ranks; manifests were checked.

    Raises:
        SettingError: No such number of ranks.
        CorruptFileError: A file is missing or short, or the manifests contradict each other.
        UsageError: Random state of a new rank can't be derived.
    """
    if type(world_size) is not int or world_size < 1:
        raise SettingError(
            f"world_size={world_size!r} isn't a number of ranks.",
            next_step="Give a whole number from 1 up.",
            found=world_size,
        )
    if world_size > _MOST_RANKS:
        raise SettingError(
            f"world_size={world_size} is more than a generation is rewritten for ({_MOST_RANKS}).",
            next_step="Give the number of processes of the next job.",
            expected=f"1 … {_MOST_RANKS}",
            found=world_size,
        )
    _check_files(store, point)
    reader = Reader(store, point)
    contents = sort_tensors(reader.index, point, path=store.path(point.step))
    tails = _read_tails(reader, point, world_size)
    plan = plan_reshard(_specs(contents, reader.index, tails, point, world_size), point.step)
    new_id = secrets.token_hex(16)
    return Prepared(
        store=store,
        point=point,
        id=new_id,
        digests=store.digests(point),
        index=reader.index,
        contents=contents,
        tails=tails,
        plan=plan,
        states=plan_states(plan.layout.ranks, tails, old=point.world_size, id_=new_id),
        new_index=encode_index(plan.layout.tensors, contents.aliases),
    )


def _check_files(store: StoredGenerations, point: ResumePoint) -> None:
    try:
        store.check_files(point)
    except NotFoundError as error:
        # Of a generation that is there, a file that isn't is a fault.
        raise CorruptFileError(error.message, next_step=error.next_step, **error.values) from error


def _read_tails(reader: Reader, point: ResumePoint, world_size: int) -> list[StateTail]:
    """Return the tails that are wanted; of ranks that give their random state alone, that alone."""
    if world_size == point.world_size:
        return [reader.tail(rank) for rank in range(world_size)]
    tails = [reader.tail(0)]
    for rank in range(1, min(world_size, point.world_size)):
        tail = reader.tail(rank)
        tails.append(replace(tail, values={"rng": tail.values["rng"]}, shared=None))
    return tails


def _specs(
    contents: Contents,
    index: Mapping[str, IndexedTensor],
    tails: Sequence[StateTail],
    point: ResumePoint,
    world_size: int,
) -> list[list[TensorSpec]]:
    """Return each new rank's specs: replicas of all but the buffers, of which each has its own."""
    if world_size != point.world_size:
        return [list(contents.specs)] * world_size

    def has(rank: int, spec: TensorSpec) -> bool:
        if spec.role is not Role.BUFFER or spec.key in tails[rank].buffers:
            return True
        return index[spec.key].placements[0].location == state_name(rank)

    return [[spec for spec in contents.specs if has(rank, spec)] for rank in range(world_size)]
