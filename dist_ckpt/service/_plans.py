"""The layout that all ranks share, planned anew when what is saved changes. Layer 6."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt.canonical import MAX_STEP
from dist_ckpt.capture import Captured, frame_of, merge_frames, with_frame
from dist_ckpt.collecting import without_collection
from dist_ckpt.comm import Comm
from dist_ckpt.errors import MismatchError
from dist_ckpt.layout import Layout, decode_all, encode_specs, plan_layout
from dist_ckpt.service._told import named_after
from dist_ckpt.slices import TensorSpec
from dist_ckpt.snapshot_index import encode_index, encode_name

__all__ = ["Plan", "Planner"]


class Plan:
    """A layout and the index that follows from it.

    Attributes:
        layout: Who writes what.
        index: Bytes of ``.snapshot_metadata``.
        frame: What all ranks together call their parts, groups and tied tensors.
        parallelism: How this rank's tensors are divided, for people.
    """

    @without_collection()
    def __init__(
        self, layout: Layout, frame: Mapping[str, Any], parallelism: Sequence[str]
    ) -> None:
        self.layout = layout
        self.frame = frame
        self.parallelism = list(parallelism)
        present = {tensor.key for tensor in layout.tensors}
        keys = {
            f"model/{encode_name(alias)}": f"model/{encode_name(name)}"
            for alias, name in frame["aliases"].items()
        }
        self.index = encode_index(
            layout.tensors, {alias: key for alias, key in keys.items() if key in present}
        )

    def shared(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rank's shared values under the names of all ranks."""
        return with_frame(own, self.frame)


class Planner:
    """Keeps the plan of the last save; a stale one is impossible, since specs are compared.

    Args:
        captured: The live objects, for their tied names.
        comm: The job's ranks.
        order: Names of all parameters in the order of the canonical file, None for the ranks' own.
    """

    def __init__(self, captured: Captured, comm: Comm, order: Sequence[str] | None = None) -> None:
        self._captured = captured
        self._comm = comm
        self._order = order
        self._specs: list[TensorSpec] | None = None
        self._frame: dict[str, Any] | None = None
        self._plan: Plan | None = None
        self._step = 0

    def plan(
        self,
        specs: list[TensorSpec] | None,
        shared: Mapping[str, Any] | None,
        *,
        step: int,
        phase: str,
    ) -> Plan | None:
        """Return the plan of these specs; None where a rank has none, since its capture failed.

        Collective: it is made anew if anything changed anywhere.

        Args:
            specs: This rank's tensors, None where they couldn't be told.
            shared: This rank's shared values.
            step: What is saved.
            phase: Names the moment in errors.

        Raises:
            MismatchError: The ranks' tensors don't fit together; raised on every rank.
        """
        frame = None
        if specs is not None and shared is not None:
            frame = frame_of(shared, self._captured.aliases())
        failed = frame is None
        # Beyond the steps that the canonical file counts there is none: another plan.
        is_beyond = (step > MAX_STEP) != (self._step > MAX_STEP)
        new_specs = self._plan is None or specs != self._specs or is_beyond
        flags = [failed, new_specs, new_specs or frame != self._frame]
        agreed = self._comm.agree([int(flag) for flag in flags], phase=phase)
        failed, new_specs, new_frame = map(bool, agreed)
        if failed or specs is None or frame is None:
            return None
        if new_frame:
            last = self._plan.layout if self._plan is not None else None
            self._plan = None  # none is left if what follows fails
            merged = self._merge(frame, phase)
            layout = None if new_specs else last
            layout = layout or self._layout(specs, phase, step)
            self._plan = Plan(layout, merged, self._captured.parallelism())
            self._specs, self._frame, self._step = specs, frame, step
        return self._plan

    def predict(self, step: int) -> Layout | None:
        """Return the layout after the first update, None where that can't be told. Collective.

        Args:
            step: Of that update.

        Raises:
            MismatchError: The ranks' tensors don't fit together; raised on every rank.
        """
        specs = self._captured.predicted_tensors()
        phase = "planning the arena"
        if self._comm.agree([specs is None], phase=phase)[0] or specs is None:
            return None
        try:
            return self._layout(specs, phase, step)
        except MismatchError as error:
            raise named_after(phase, error) from error

    def _merge(self, frame: dict[str, Any], phase: str) -> dict[str, Any]:
        if self._comm.world_size == 1:
            return merge_frames([frame])
        payload = json.dumps(frame, allow_nan=False).encode()
        told = self._comm.gather(payload, phase=phase)
        return merge_frames([json.loads(data) for data in told])

    @without_collection()
    def _layout(self, specs: Sequence[TensorSpec], phase: str, step: int) -> Layout:
        if self._comm.world_size == 1:
            return plan_layout([specs], self._order, step=step)
        told = self._comm.gather(encode_specs(specs), phase=phase)
        return plan_layout(decode_all(told), self._order, step=step)
