"""What all ranks together hold, told to each of them at the start of an attempt. Layer 6."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dist_ckpt.capture import Captured, Structure, merge_structures
from dist_ckpt.comm import Comm
from dist_ckpt.errors import MismatchError
from dist_ckpt.resume import Elsewhere
from dist_ckpt.service._told import named_after

__all__ = ["Whole", "look_around"]


@dataclass(frozen=True)
class Whole:
    """The whole model and, as seen from this rank, the rest of it.

    Attributes:
        structure: Of all ranks together: the same whatever way it is divided.
        elsewhere: What other ranks have and this one hasn't.
    """

    structure: Structure
    elsewhere: Elsewhere


def look_around(comm: Comm, captured: Captured) -> Whole:
    """Return what there is on all ranks. Collective.

    Raises:
        MismatchError: Two ranks have different tensors of one name; on every rank.
    """
    mine = captured.structure()
    parts = list(captured.parts())
    if comm.world_size == 1:
        return Whole(mine, Elsewhere())
    report = json.dumps({"structure": mine.to_json(), "parts": parts}).encode()
    phase = "looking around"
    told = [json.loads(data) for data in comm.gather(report, phase=phase)]
    try:
        whole = merge_structures([Structure.from_json(item["structure"]) for item in told])
    except MismatchError as error:
        raise named_after(phase, error) from error
    others = {word for item in told for word in item["parts"]} - set(parts)
    names = _names(whole) - _names(mine)
    return Whole(whole, Elsewhere(frozenset(names), frozenset(others)))


def _names(structure: Structure) -> set[str]:
    tensors = (*structure.parameters, *structure.buffers)
    return {*(name for name, _, _ in tensors), *(other for other, _ in structure.aliases)}
