"""What a rank takes over besides tensors that it shares: whose values, from which file. Layer 5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt.capture import check_rank, check_shared, with_values
from dist_ckpt.resume._read import Reader
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.staging import OwnTensor, StateTail
from dist_ckpt.tree import JSON

__all__ = ["Inherited", "check_values", "differing_parts", "inherit"]


@dataclass(frozen=True)
class Inherited:
    """What one live rank takes from the saved ranks.

    Attributes:
        rank: The saved rank that it mostly follows.
        shared: Groups, schedulers, scalers, under the names of the whole job.
        values: As `Captured.load_rank` wants them; tensors by number.
        tensors: Where each of those lies: saved rank and place.
        buffers: Places of that rank's own buffers.
    """

    rank: int
    shared: dict[str, JSON]
    values: dict[str, JSON]
    tensors: tuple[tuple[int, OwnTensor], ...]
    buffers: Mapping[str, OwnTensor]

    def read(self, reader: Reader) -> list[torch.Tensor]:
        """Return the tensors inside the values, fresh and on the CPU."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(self.tensors)
        for rank in {rank for rank, _ in self.tensors}:
            numbers = [n for n, (owner, _) in enumerate(self.tensors) if owner == rank]
            fresh = reader.own(rank, [self.tensors[number][1] for number in numbers])
            for number, tensor in zip(numbers, fresh, strict=True):
                found[number] = tensor
        return found


def inherit(
    reader: Reader,
    point: ResumePoint,
    *,
    rank: int,
    wanted: Collection[str],
    elsewhere: Collection[str] = (),
) -> Inherited:
    """Return what a live rank takes over.

    It follows one saved rank. Parts that this one didn't have (it was another stage of a pipeline)
    come from the first rank that had them.

    Args:
        reader: Of the generation.
        point: Its resume point.
        rank: The saved rank to follow.
        wanted: Words of the parts that are live here.
        elsewhere: Words of parts that only other live ranks have.
    """
    check_shared(point.shared)
    tail = _sound_tail(reader, rank)
    part_ranks: Mapping[str, int] = point.shared.get("part_ranks", {})
    tails: dict[int, StateTail] = {rank: tail}
    tensors = [(rank, own) for own in tail.tensors]
    saved = tail.values["values"]
    values: dict[str, JSON] = {word: saved[word] for word in saved if word not in elsewhere}
    for word in wanted:
        if word in tail.shared["parts"] or word not in point.shared["parts"]:
            continue
        owner = part_ranks.get(word, 0)
        if owner not in tails:
            tails[owner] = _sound_tail(reader, owner)
        other = tails[owner]
        if word in other.values["values"]:
            values[word] = _shifted(other.values["values"][word], len(tensors))
            tensors += [(owner, own) for own in other.tensors]
    shared = with_values(point.shared, [item.shared for item in tails.values()])
    shared["parts"] = {w: kind for w, kind in shared["parts"].items() if w not in elsewhere}
    return Inherited(
        rank=rank,
        shared=shared,
        values={**tail.values, "values": values},
        tensors=tuple(tensors),
        buffers=tail.buffers,
    )


def check_values(reader: Reader, point: ResumePoint, rank: int) -> None:
    """Return if what a rank keeps besides tensors is of this very save, and of the known form.

    Raises:
        CorruptFileError: It isn't, though its digest may be right.
    """
    check_shared(point.shared)
    _sound_tail(reader, rank)


def _sound_tail(reader: Reader, rank: int) -> StateTail:
    """Return a rank's tail whose values are of the form that capture gives them."""
    tail = reader.tail(rank)
    check_shared(tail.shared)
    check_rank(tail.values)
    return tail


def _shifted(node: JSON, by: int) -> JSON:
    """Return a tree whose references to tensors are numbers ``by`` higher."""
    if isinstance(node, list):
        return [_shifted(item, by) for item in node]
    if not isinstance(node, dict):
        return node
    for tag in ("$tensor", "$ndarray"):
        reference = node.get(tag)
        if isinstance(reference, dict) and type(reference.get("at")) is int:
            numbers = {name: reference.get(name) for name in ("at", "shares")}
            moved = {name: n + by for name, n in numbers.items() if type(n) is int}
            return {tag: {**reference, **moved}}
    return {key: _shifted(item, by) for key, item in node.items()}


def differing_parts(reader: Reader, point: ResumePoint) -> set[str]:
    """Return the words of parts whose saved values weren't the same on all ranks.

    Numbers and text are compared, tensors inside them aren't read.
    """
    first: dict[str, Any] = {}
    different: set[str] = set()
    for rank in range(point.world_size):
        tail = _sound_tail(reader, rank)
        for word, value in tail.values["values"].items():
            if first.setdefault(word, value) != value:
                different.add(word)
    return different
