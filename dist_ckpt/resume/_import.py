"""A canonical .bin alone into live objects: weights, both moments, step counts. Collective.

Layer 5. A .bin holds no more than that (requirement A5): groups, schedulers, scalers, buffers,
data, the user's state and random state stay as the program built them, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt.canonical import HEADER_BYTES
from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.errors import CorruptFileError, MismatchError
from dist_ckpt.export import check_sum, read_bin
from dist_ckpt.resume._read import Reader
from dist_ckpt.slices import Box, ByteRange, Placement, Role, TensorSpec
from dist_ckpt.snapshot_index import IndexedTensor
from dist_ckpt.storage import FileDigest

__all__ = ["Imported", "import_bin"]

_FLOAT_BYTES = 4
#: What isn't float32 here is read through this much memory at a time, or one tensor.
_BATCH_BYTES = 256 << 20
#: How much of a moment is looked at in one go.
_BLOCK = 1 << 20
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Imported:
    """What was taken over from a .bin.

    Attributes:
        path: The file.
        step: Its header's; training goes on with the next.
        num_params: Of the file and of the model.
        stateless: Parameters whose moments are all zero in the file: they have no optimizer state.
        notes: What isn't as it was, for people and the journal.
    """

    path: str
    step: int
    num_params: int
    stateless: tuple[str, ...]
    notes: tuple[str, ...]


def import_bin(path: Path, comm: Comm, captured: Captured) -> Imported:
    """The live model and optimizer hold a .bin's weights and moments; every rank reads its own.

    Args:
        path: The file, which all ranks see.
        comm: The job's ranks; every rank calls this.
        captured: The live objects.

    Raises:
        NotFoundError, CorruptFileError: There is no such file, or it isn't one, or it isn't that of
            the ``.sha256`` beside it.
        MismatchError: It isn't this model's, or the optimizer isn't of Adam's kind. Nothing has
            changed then.
        RankFailedError: Another rank failed.
    """
    plan = comm.together("fitting the .bin to the model", lambda: _Fit(path, captured))
    # Rank 0 alone: the sum takes a reading of the whole file.
    comm.together("checking the .bin's sum", lambda: comm.rank == 0 and check_sum(path))
    told = comm.together("looking at the .bin", lambda: plan.look() if comm.rank == 0 else [])
    stateless = json.loads(comm.broadcast(json.dumps(told).encode() if comm.rank == 0 else None))
    notes = comm.together("reading the .bin", lambda: plan.load(stateless))
    return Imported(str(path), plan.step, plan.num_params, tuple(stateless), tuple(notes))


class _Fit:
    """Where each live tensor lies in the file; made only if everything fits."""

    def __init__(self, path: Path, captured: Captured) -> None:
        self._path = path
        self._captured = captured
        self._state = read_bin(path)
        self.step = self._state.step
        self.num_params = self._state.num_params
        self._parameters = captured.parameters()
        sizes = {name: int(parameter.numel()) for name, parameter in self._parameters.items()}
        _check_count(path, self.num_params, sizes)
        self._ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self._ranges[name] = (end, end + size)
            end += size
        self._specs = _adam_specs(captured)
        self._stateful = {s.param for s in self._specs if s.role is Role.EXP_AVG}

    def look(self) -> list[str]:
        """Return the parameters without state: those whose moments are all zero.

        Raises:
            CorruptFileError: A second moment is negative, or not a number.
            MismatchError: A parameter that no optimizer updates has moments.
        """
        stateless = []
        for name, (start, stop) in self._ranges.items():
            m, v = self._state.m[start:stop], self._state.v[start:stop]
            for at in range(0, stop - start, _BLOCK):
                if not (v[at : at + _BLOCK] >= 0).all():
                    raise CorruptFileError(
                        f"{self._path} holds second moments of {name!r} that are negative or not a "
                        "number, which Adam's never are.",
                        next_step="Is it another format, or are the model's parameters in another "
                        "order? `dist-ckpt verify` checks the file itself.",
                        path=str(self._path),
                        parameter=name,
                    )
            if not (_any(v) or _any(m)):
                stateless.append(name)
            elif name not in self._stateful:
                raise MismatchError(
                    f"{self._path} holds moments of {name!r}, which no optimizer updates here.",
                    next_step="Give the optimizer the parameters that it had, in a model of the "
                    "same order.",
                    missing=[],
                    unexpected=[name],
                    different=[],
                )
        return stateless

    def load(self, stateless: Sequence[str]) -> list[str]:
        """Fill the live tensors; return what isn't as it was."""
        without = set(stateless)
        specs = [
            spec
            for spec in self._specs
            if spec.param not in without or spec.role in (Role.WEIGHT, Role.BUFFER)
        ]
        shared = self._captured.shared_values()
        for optimizer in shared["optimizers"].values():
            optimizer |= {"layouts": [["step", *_MOMENTS]], "trees": {}}
        shared["ties"] = {}
        lacking = [name for name in self._parameters if name in without or self._is_frozen(name)]
        live = self._captured.prepare({s.key: s for s in specs}, lacking, shared)
        exact: dict[str, torch.Tensor] = {}
        other: dict[str, torch.Tensor] = {}
        for spec in specs:
            tensor = live[spec.key]
            if spec.role is Role.OPTIMIZER:
                with torch.no_grad():
                    tensor.fill_(self.step)
            elif spec.role is not Role.BUFFER:
                (exact if spec.dtype == "float32" else other)[spec.key] = tensor
        reader = _BinReader(self._path, self._index(specs))
        reader.into(exact, buffers={}, rank=0)
        rounded = _convert(reader, other)
        return [*self._notes(shared["parts"], without), *rounded]

    def _is_frozen(self, name: str) -> bool:
        return name not in self._stateful

    def _index(self, specs: Sequence[TensorSpec]) -> dict[str, IndexedTensor]:
        """Return where each float32 tensor lies in the file."""
        regions = {Role.WEIGHT: 0, Role.EXP_AVG: 1, Role.EXP_AVG_SQ: 2}
        index = {}
        for spec in specs:
            if spec.role in regions and spec.param is not None:
                start, stop = (
                    HEADER_BYTES + _FLOAT_BYTES * (regions[spec.role] * self.num_params + at)
                    for at in self._ranges[spec.param]
                )
                place = Placement(self._path.name, Box.whole(spec.shape), ByteRange(start, stop))
                index[spec.key] = IndexedTensor(spec.key, "float32", spec.shape, (place,))
        return index

    def _notes(self, parts: Mapping[str, Any], without: set[str]) -> list[str]:
        left = [part for part in parts if part.partition(".")[0] != "optimizer"]
        if self._captured.structure().buffers:
            left.append("the model's buffers")
        notes = ["learning rates, betas, random state and place in the data are not in a .bin"]
        if left:
            notes.append(f"as the script built them: {', '.join(left)}")
        if lost := sorted(without & {name for name in self._stateful if name is not None}):
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            notes.append(f"without optimizer state, all zero there: {', '.join(lost[:5])}{more}")
        return notes


class _BinReader(Reader):
    """Reads a .bin as if it were a generation's only file; it has no digests of pieces."""

    def __init__(self, path: Path, index: Mapping[str, IndexedTensor]) -> None:
        # Not the base's: there is no generation, the file's place and its tensors are all it takes.
        self._directory = path.parent
        self._place = (0, 1)
        self._direct = False  # without digests nothing is read past the page cache
        digests: dict[str, Any] = {path.name: None}
        self._digests: dict[str, FileDigest] = digests
        self.index = dict(index)


def _check_count(path: Path, found: int, sizes: Mapping[str, int]) -> None:
    here = sum(sizes.values())
    if found == here:
        return
    gap = abs(here - found)
    more = "model" if here > found else "file"
    same = [name for name, size in sizes.items() if size == gap]
    hint = f" Exactly that many has {same[0]!r}." if same and here > found else ""
    raise MismatchError(
        f"{path} holds {found:,} parameters, the model has {here:,}: the {more} has {gap:,} more."
        f"{hint}",
        next_step="Look first at the size of the vocabulary (padded?), the number of layers, "
        "biases, and whether embedding and head are tied (tied ones count once).",
        missing=[],
        unexpected=[],
        different=[f"number of parameters (file {found}, here {here})"],
        expected=found,
        found=here,
    )


def _adam_specs(captured: Captured) -> list[TensorSpec]:
    """Return the live tensors as they are after an update, where the optimizers are of Adam's kind.

    Raises:
        MismatchError: One isn't, or keeps more than two moments and a count.
    """
    specs = captured.predicted_tensors()
    if specs is None:
        raise _not_adam("an optimizer here isn't Adam or AdamW")
    kinds: dict[str, set[str]] = {}
    for spec in specs:
        if spec.role in (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.OPTIMIZER) and spec.param is not None:
            kinds.setdefault(spec.param, set()).add(spec.key.rpartition("/")[2])
    wanted = {"step", *_MOMENTS}
    for name, found in kinds.items():
        if found != wanted:
            what = ", ".join(sorted(found ^ wanted))
            raise _not_adam(f"{name!r} has other state ({what})")
    trained = {name for name, p in captured.parameters().items() if p.requires_grad}
    if not kinds and trained:
        raise _not_adam("the optimizer keeps no moments")
    return specs


def _not_adam(why: str) -> MismatchError:
    return MismatchError(
        f"A .bin holds Adam's first and second moment of each parameter; {why}.",
        next_step="Train with torch.optim.Adam or AdamW, without amsgrad.",
        missing=[],
        unexpected=[],
        different=["optimizer"],
    )


def _any(values: np.ndarray[Any, Any]) -> bool:
    return any(values[at : at + _BLOCK].any() for at in range(0, values.size, _BLOCK))


def _convert(reader: _BinReader, targets: Mapping[str, torch.Tensor]) -> list[str]:
    """Fill tensors of other dtypes; return a note if values had to be rounded."""
    rounded = []
    batch: dict[str, torch.Tensor] = {}
    for number, (key, target) in enumerate(targets.items(), start=1):
        batch[key] = torch.empty_like(target, dtype=torch.float32)
        held = sum(tensor.nbytes for tensor in batch.values())
        if held < _BATCH_BYTES and number < len(targets):
            continue
        reader.into(batch, buffers={}, rank=0)
        for name, wide in batch.items():
            with torch.no_grad():
                targets[name].copy_(wide)
            local, exact = (getattr(t, "_local_tensor", t) for t in (targets[name], wide))
            if not torch.equal(local.to(torch.float32), exact):
                rounded.append(name)
        batch = {}
    if not rounded:
        return []
    more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
    return [f"rounded to this model's dtype: {rounded[0]}{more}"]
