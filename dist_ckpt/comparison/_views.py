"""A resume point, a canonical file or live training objects, as trees to walk. Reads files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from dist_ckpt.canonical import CanonicalState
from dist_ckpt.capture import Captured
from dist_ckpt.comparison._leaves import Leaf, LiveArray, LiveTensor, RankFiles, StoredTensor, Zeros
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import SingleGeneration, StoredGenerations
from dist_ckpt.resume import Reader
from dist_ckpt.resume_point import ResumePoint, state_name
from dist_ckpt.slices import Box, Placement
from dist_ckpt.snapshot_index import IndexedTensor, encode_name
from dist_ckpt.staging import OwnTensor
from dist_ckpt.tree import JSON, decode_tree

__all__ = [
    "BinView",
    "GenerationView",
    "LiveView",
    "StateView",
    "count_params",
    "open_generation",
]


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for a tensor that is compared elsewhere, by its own key."""

    text: str

    def numpy(self) -> _Reference:
        return self


class GenerationView:
    """A resume point on disk; of its tensors only places are held."""

    def __init__(self, store: StoredGenerations, point: ResumePoint, label: str) -> None:
        self.label = label
        self.step: int | None = point.step
        self.world_size = point.world_size
        self.point = point
        self._reader = Reader(store, point)
        self._files = RankFiles(store.path(point.step), store.digests(point))
        self.tensors, self.ties = _split_ties(self._files, self._reader.index)
        self.num_bytes = 2 * point.num_bytes  # each file is checked whole, then its values are read

    def watch(self, progress: Callable[[int], None]) -> None:
        """Tell of the bytes that are checked before their first use."""
        self._files.progress = progress

    def shared(self) -> dict[str, Any]:
        """Return the values that are the same on every rank."""
        return decode_shared(self.point.shared)

    def rank(self, rank: int) -> dict[str, Any]:
        """Return one rank's own values: buffers, random state, data, the user's state."""
        tail = self._reader.tail(rank)

        def get_tensor(reference: JSON) -> torch.Tensor:
            return cast("torch.Tensor", self._own(rank, tail.tensors[reference["at"]]))

        values: dict[str, Any] = decode_tree(tail.values, get_tensor=get_tensor)
        if rank == 0:  # the index has its buffers, the resume point its shared values
            return values
        buffers = {key: self._own(rank, place) for key, place in tail.buffers.items()}
        return {**values, "buffers": buffers, "shared": decode_shared(tail.shared)}

    def _own(self, rank: int, own: OwnTensor) -> StoredTensor:
        place = Placement(state_name(rank), Box.whole(own.shape), own.byte_range)
        return StoredTensor(self._files, own.dtype, own.shape, (place,))

    def canonical(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return the parameters in the canonical order, and those without moments.

        Raises:
            UsageError: This generation has no canonical form.
        """
        canonical = self.point.canonical
        if canonical.refused is not None:
            raise UsageError(
                f"{self.label} has no canonical form: {canonical.refused}.",
                next_step="Compare it with another generation.",
                step=self.step,
            )
        return canonical.names, frozenset(canonical.stateless)


class LiveView:
    """Live training objects as a generation of one rank would hold them.

    Raises:
        UsageError: Not a mapping of what ``Checkpointer`` takes; or sharded.
    """

    def __init__(self, objects: Any, label: str) -> None:
        known = {"model", "optimizer", "scheduler", "scaler", "data", "policy", "extra"}
        is_known = isinstance(objects, Mapping) and {"model", "optimizer"} <= set(objects) <= known
        if not is_known:
            raise UsageError(
                f"A {type(objects).__name__} can't be compared with a generation or a .bin.",
                next_step='Give {"model": …, "optimizer": …} and what else Checkpointer was given: '
                f"{', '.join(sorted(known - {'model', 'optimizer'}))}.",
            )
        self.label = label
        self.step: int | None = None
        self.world_size = 1
        self._captured = Captured(**objects)
        live = self._captured.tensors()
        parts = [i.spec.key for i in live if i.spec.boxes != (Box.whole(i.spec.shape),)]
        if parts:
            raise UsageError(
                f"Of {parts[0]} this rank holds a part only, as of {len(parts) - 1} more tensors.",
                next_step="Save both trainings and compare the generations.",
            )
        self.tensors: Mapping[str, Leaf] = {
            item.spec.key: LiveTensor(item.tensor, item.spec.key) for item in live
        }
        self.ties = {
            f"model/{encode_name(other)}": f"model/{encode_name(name)}"
            for other, name in self._captured.aliases().items()
        }

    def shared(self) -> dict[str, Any]:
        """Return the values that are the same on every rank."""
        return decode_shared(self._captured.shared_values())

    def rank(self, rank: int) -> dict[str, Any]:  # noqa: ARG002 - there is one only
        """Return the data's and the user's state; random state goes on being drawn from."""
        tensors: list[LiveTensor] = []

        def put_tensor(path: str, tensor: torch.Tensor) -> int:
            tensors.append(LiveTensor(tensor, path))
            return len(tensors) - 1

        values = self._captured.rank_values(put_tensor)["values"]

        def get_tensor(reference: JSON) -> torch.Tensor:
            return cast("torch.Tensor", tensors[reference["at"]])

        return {"values": decode_tree(values, get_tensor=get_tensor)}

    def canonical(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return the parameters in the canonical order, and those without moments."""
        return tuple(self._captured.parameters()), frozenset(self._captured.stateless())


class BinView:
    """A canonical file, mapped, or one in memory."""

    def __init__(self, state: CanonicalState, label: str) -> None:
        self.label = label
        self.step = state.step
        self._state = state

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return self._state.num_params

    @property
    def num_bytes(self) -> int:
        """Bytes of the three arrays."""
        return sum(array.nbytes for array in (self._state.weights, self._state.m, self._state.v))

    def whole(self) -> dict[str, Leaf]:
        """Return the three arrays."""
        state = self._state
        return {
            name: LiveArray(array, kind="tensor")
            for name, array in (("weights", state.weights), ("m", state.m), ("v", state.v))
        }

    def cut(self, view: StateView) -> Iterator[tuple[str, Leaf, Leaf]]:
        """Yield ``(key, part of this file, the same of a state)``, as the state's names cut it."""
        names, stateless = view.canonical()
        state = self._state
        arrays = (("model", "", state.weights), ("optimizer", "/exp_avg", state.m))
        for kind, suffix, array in (*arrays, ("optimizer", "/exp_avg_sq", state.v)):
            start = 0
            for name in names:
                weight = view.tensors[f"model/{encode_name(name)}"]
                stop = start + math.prod(weight.shape)
                mine = LiveArray(array[start:stop].reshape(weight.shape), kind="tensor")
                key = f"{kind}/{encode_name(name)}{suffix}"
                theirs = Zeros(weight.shape) if suffix and name in stateless else view.tensors[key]
                yield key, mine, _as_float32(theirs)
                start = stop


StateView: TypeAlias = GenerationView | LiveView
"""One whole training state."""


def count_params(view: StateView) -> int:
    """Return how many parameters a state's canonical file would have."""
    names, _ = view.canonical()
    shapes = (view.tensors[f"model/{encode_name(name)}"].shape for name in names)
    return sum(math.prod(shape) for shape in shapes)


def open_generation(directory: Path, label: str) -> GenerationView:
    """Return the resume point in a directory; its manifest, index and lengths are checked.

    Raises:
        CorruptFileError: It isn't whole; the rank files' bytes are checked when they are read.
    """
    store = SingleGeneration(directory)
    (step,) = store.steps()
    point = store.manifest(step)
    store.check_files(point)
    return GenerationView(store, point, label)


def decode_shared(shared: JSON) -> dict[str, Any]:
    """Return shared values decoded; on which device state lies, and in which order, isn't state."""

    def get_tensor(payload: JSON) -> torch.Tensor:
        if isinstance(payload, dict) and "data" in payload:
            inline: torch.Tensor = decode_tree({"$tensor": payload})
            return inline
        return cast("torch.Tensor", _Reference(str(payload)))

    decoded: dict[str, Any] = decode_tree(shared, get_tensor=get_tensor)
    for optimizer in decoded["optimizers"].values():
        optimizer.pop("homes", None)
        optimizer.pop("orders", None)
    if set(decoded["optimizers"]) == {""}:  # the only one, which has no name
        decoded["optimizers"] = decoded["optimizers"][""]
    return decoded


def _split_ties(
    files: RankFiles, index: Mapping[str, IndexedTensor]
) -> tuple[dict[str, Leaf], dict[str, str]]:
    tensors: dict[str, Leaf] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[Placement, ...], str] = {}
    for key, tensor in index.items():
        first = seen.setdefault(tensor.placements, key) if math.prod(tensor.shape) else key
        if first == key:
            tensors[key] = StoredTensor(files, tensor.dtype, tensor.shape, tensor.placements)
        else:
            ties[key] = first
    return tensors, ties


def _as_float32(leaf: Leaf) -> Leaf:
    if leaf.dtype == "float32":
        return leaf
    if isinstance(leaf, StoredTensor):
        return StoredTensor(leaf.files, leaf.dtype, leaf.shape, leaf.placements, "float32")
    if isinstance(leaf, LiveTensor):
        return LiveTensor(leaf.tensor.detach().to(torch.float32), leaf.path)
    return leaf
