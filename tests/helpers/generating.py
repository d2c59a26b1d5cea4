"""Generations made without a training loop: any number of ranks, staged and written by one process.

The bytes go through the real staging, storage and generations; only the ranks' meeting is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dist_ckpt.capture import Captured, LiveTensor
from dist_ckpt.generations import GenerationStore
from dist_ckpt.layout import Layout, plan_layout
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.slices import Box, Role, TensorSpec
from dist_ckpt.snapshot_index import encode_index, encode_name
from dist_ckpt.staging import RankValues, Staged, Staging
from dist_ckpt.storage import digest_bytes, sync_dir

SAVE_ID = "0123456789abcdef" * 2


_SHARED = ("parts", "optimizers", "ties", "schedulers", "scalers")


def _values() -> dict[str, Any]:
    rng = dict.fromkeys(("python", "numpy", "torch", "cuda"))
    return {"rng": {**rng, "named": {}}, "values": {}}


@dataclass
class Part:
    """What one rank of an imagined job holds."""

    tensors: Sequence[LiveTensor]
    encode: Callable[[Callable[[str, Any], Any]], Any] = lambda _put: _values()
    shared: Any = field(default_factory=lambda: {kind: {} for kind in _SHARED})
    aliases: Mapping[str, str] = field(default_factory=dict)


def part_of(captured: Captured) -> Part:
    """Return what a capture holds now."""
    return Part(
        captured.tensors(), captured.rank_values, captured.shared_values(), captured.aliases()
    )


def live(key: str, role: Role, tensor: torch.Tensor, param: str | None = None) -> LiveTensor:
    """Return a tensor as capture gives it."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LiveTensor(TensorSpec(key, role, dtype, shape, (Box.whole(shape),), param), tensor)


def adam_part(
    weights: Mapping[str, torch.Tensor],
    *,
    stateless: Sequence[str] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
    moment_dtype: torch.dtype = torch.float32,
) -> Part:
    """Return weights with Adam's moments (numbers made from the weights') and step counts."""
    stateful = {name: w for name, w in weights.items() if name not in stateless}
    tensors = [live(f"model/{encode_name(n)}", Role.WEIGHT, w, n) for n, w in weights.items()]
    for role, shift in ((Role.EXP_AVG, 0.25), (Role.EXP_AVG_SQ, 0.5)):
        for name, weight in stateful.items():
            key = f"optimizer/{encode_name(name)}/{role}"
            tensors.append(live(key, role, (weight.to(moment_dtype) + shift), name))
    for name in stateful:
        key = f"optimizer/{encode_name(name)}/step"
        tensors.append(live(key, Role.OPTIMIZER, torch.tensor(7.0), name))
    for name, buffer in (buffers or {}).items():
        tensors.append(live(f"model/{encode_name(name)}", Role.BUFFER, buffer))
    return Part(tensors)


def stage(layout: Layout, part: Part, rank: int, *, step: int = 100, id_: str = SAVE_ID) -> Staged:
    """Return one rank's bytes, in an arena of their own."""
    values = RankValues(part.encode, part.shared, rank, step, id_)
    staged = Staging().stage(layout, part.tensors, values)
    assert isinstance(staged, Staged)  # there is memory for a test's arena
    return staged


def write_generation(
    run_dir: Path,
    parts: Sequence[Part],
    *,
    step: int = 100,
    id_: str = SAVE_ID,
    layout: Layout | None = None,
    **changes: Any,
) -> ResumePoint:
    """Have a committed generation of as many ranks as there are parts; return its resume point.

    Its layout is that of a training, unless another is given.
    """
    store = GenerationStore(run_dir)
    if layout is None:
        layout = plan_layout([[item.spec for item in part.tensors] for part in parts], step=step)
    temporary = store.prepare(step, id_[:8])
    files = write_rank_files(temporary, layout, parts, step=step, id_=id_)
    aliases = {
        f"model/{encode_name(other)}": f"model/{encode_name(name)}"
        for other, name in parts[0].aliases.items()
    }
    index = encode_index(layout.tensors, aliases)
    facts: dict[str, Any] = {
        "run": run_dir.name,
        "step": step,
        "id": id_,
        "parent": None,
        "attempt": 1,
        "time": 1.5,
        "reasons": ("cadence",),
        "world_size": len(parts),
        "files": files,
        "index": {"size_bytes": len(index), "digest": digest_bytes(index)},
        "canonical": layout.canonical,
        "identity": {},
        "shared": parts[0].shared,
        "notes": {},
    }
    point = ResumePoint(**{**facts, **changes})
    store.commit(temporary, point, index)
    return point


def write_rank_files(
    directory: Path, layout: Layout, parts: Sequence[Part], *, step: int, id_: str
) -> dict[str, Any]:
    """Have every rank's two files, synced; return their digests as JSON."""
    files = {}
    for rank, part in enumerate(parts):
        written = stage(layout, part, rank, step=step, id_=id_).write(directory, rank)
        for name, digest in written.files.items():
            files[name] = json.loads(json.dumps(digest.to_json()))
    sync_dir(directory)
    return files


def change_byte(path: Path, at: int) -> None:
    """Have one other byte in a read-only file; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)
