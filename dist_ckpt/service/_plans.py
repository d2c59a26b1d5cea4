"""The layout that all ranks share, planned anew when what is saved changes. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence

from dist_ckpt.capture import Captured
from dist_ckpt.comm import Comm
from dist_ckpt.layout import Layout, decode_specs, encode_specs, plan_layout
from dist_ckpt.slices import TensorSpec
from dist_ckpt.snapshot_index import encode_index, encode_name

__all__ = ["Plan", "Planner"]


class Plan:
    """A layout and the index that follows from it.

    Attributes:
        layout: Who writes what.
        index: Bytes of ``.snapshot_metadata``.
    """

    def __init__(self, layout: Layout, aliases: dict[str, str]) -> None:
        self.layout = layout
        present = {tensor.key for tensor in layout.tensors}
        keys = {
            f"model/{encode_name(alias)}": f"model/{encode_name(name)}"
            for alias, name in aliases.items()
        }
        self.index = encode_index(
            layout.tensors, {alias: key for alias, key in keys.items() if key in present}
        )


class Planner:
    """Keeps the plan of the last save; a stale one is impossible, since specs are compared.

    Args:
        captured: The live objects, for their tied names.
        comm: The job's ranks.
    """

    def __init__(self, captured: Captured, comm: Comm) -> None:
        self._captured = captured
        self._comm = comm
        self._specs: list[TensorSpec] | None = None
        self._plan: Plan | None = None

    def plan(self, specs: list[TensorSpec]) -> Plan:
        """Return the plan of these specs. Collective: it is made anew if they changed anywhere."""
        changed = specs != self._specs or self._plan is None
        if self._comm.world_size > 1:
            changed = bool(self._comm.agree([changed])[0])
        if changed or self._plan is None:
            self._specs = specs
            self._plan = Plan(self._layout(specs), self._captured.aliases())
        return self._plan

    def predict(self) -> Layout | None:
        """Return the layout after the first update, None where that can't be told. Collective."""
        specs = self._captured.predicted_tensors()
        if self._comm.agree([specs is None])[0] or specs is None:
            return None
        return self._layout(specs)

    def _layout(self, specs: Sequence[TensorSpec]) -> Layout:
        if self._comm.world_size == 1:
            return plan_layout([specs])
        return plan_layout([decode_specs(data) for data in self._comm.gather(encode_specs(specs))])
