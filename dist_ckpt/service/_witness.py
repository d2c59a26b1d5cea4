"""What a proof is told by the library inside a scenario's process. Layer 6; one file a rank.

A line of JSON for the opening, the start of the loop, each step and its end. Nothing that is seen
is changed: generators are drawn from and put back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from dist_ckpt.comm import Comm
from dist_ckpt.resume import Resumed
from dist_ckpt.service._strays import find_strays
from dist_ckpt.service._sums import reorders_sums
from dist_ckpt.slices import Role
from dist_ckpt.storage import AppendFile

if TYPE_CHECKING:
    from dist_ckpt.service._trainer import Trainer

__all__ = ["Witness", "call_witness", "witness_file"]

#: A longer state of the data is told by its digest.
_DATA_CHARS = 4096
_GROUPS = {Role.WEIGHT: "model", Role.BUFFER: "buffers"}
_OWN_PACKAGE = __name__.partition(".")[0]


def witness_file(directory: Path, rank: int) -> Path:
    """Return where the witness of ``rank`` writes."""
    return directory / f"rank_{rank:05d}.jsonl"


def call_witness(trainer: Trainer, comm: Comm, resumed: Resumed | None) -> Witness | None:
    """Return a witness where a proof has asked for one, else None."""
    directory = trainer.settings.witness_dir
    if directory is None:
        return None
    witness = Witness(witness_file(directory, comm.rank), trainer)
    try:
        witness.open(
            rank=comm.rank,
            world_size=comm.world_size,
            step=resumed.step if resumed else 0,
            omitted=sorted(trainer.settings.omitted),
        )
    except BaseException:
        witness.close()
        raise
    return witness


class Witness:
    """Writes what one rank's steps consumed and left. Main thread, not collective.

    Args:
        path: Its file; the directory exists.
        trainer: The live objects.
    """

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self._captured = trainer.captured
        self._optimizers = trainer.optimizers
        self._data = trainer.data
        self._given = trainer.given
        self._has_started = self._has_looked = False
        self._file = AppendFile(path)

    def open(self, **facts: Any) -> None:
        """Tell who this is and what it keeps."""
        self._write("open", parts=self._captured.shared_values()["parts"], **facts)

    def start(self, step: int) -> None:
        """Tell what the loop begins with, random state included; once."""
        if not self._has_started:
            self._has_started = True
            reordered = reorders_sums(self._given[0])
            self._write("start", step=step, reordered=reordered, **self._look(), **self._ends())

    def step(self, step: int, loss: float | None) -> None:
        """Tell what ``step`` consumed and left, at its boundary."""
        if not self._has_looked:
            # After the first body: what a program makes on the way is there by then.
            self._has_looked = True
            self._write("strays", strays=find_strays(self._given, _frame_of_user()))
        indices = getattr(self._data, "last_indices", None)
        self._write(
            "step",
            step=step,
            loss=None if loss is None else loss.hex(),
            indices=None if indices is None else [int(index) for index in indices],
            **self._look(),
        )

    def end(self, step: int, stopped: str | None) -> None:
        """Tell what the loop leaves, and what each generator would draw next."""
        self._write("end", step=step, stopped=stopped, **self._ends())

    def close(self) -> None:
        """The file is complete."""
        self._file.close()

    def _look(self) -> dict[str, Any]:
        shared = self._captured.shared_values()
        own = self._captured.rank_values(lambda _path, tensor: _digest_tensor(tensor))
        groups: dict[str, list[str]] = {"model": [], "buffers": [], "optimizer": []}
        for live in self._captured.tensors():
            group = _GROUPS.get(live.spec.role, "optimizer")
            groups[group] += [live.spec.key, _digest_tensor(live.tensor)]
        groups["optimizer"].append(_digest(shared["optimizers"]))
        state = {name: _digest(parts) for name, parts in groups.items()}
        for word, value in {**shared["schedulers"], **shared["scalers"], **own["values"]}.items():
            if word != "data":
                state[word] = _digest(value)
        rng = {
            name: _digest(value)
            for name, value in own["rng"].items()
            if name != "named" and value is not None
        }
        for name, value in own["rng"]["named"].items():
            rng[f"generators.{name}"] = _digest(value)
        return {
            "lr": [
                [float(group["lr"]).hex() for group in optimizer.param_groups]
                for optimizer in self._optimizers
            ],
            "data": _short(own["values"].get("data")),
            "rng": rng,
            "state": state,
        }

    def _ends(self) -> dict[str, Any]:
        return {
            "draws": self._captured.rng_draws(),
            "tensors": {
                live.spec.key: _digest_tensor(live.tensor) for live in self._captured.tensors()
            },
        }

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.append(json.dumps({"kind": kind, **fields}, allow_nan=False).encode() + b"\n")


def _frame_of_user() -> Any:
    frame = sys._getframe()  # noqa: SLF001 - the only way to see what a program holds
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] != _OWN_PACKAGE:
            break
    return frame


def _digest_tensor(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    content: Any = local.as_strided((local.numel(),), (1,)).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128(content).hexdigest())


def _digest(value: Any) -> str:
    return str(xxhash.xxh3_128(json.dumps(value, allow_nan=False).encode()).hexdigest())


def _short(value: Any) -> Any:
    return value if len(json.dumps(value, allow_nan=False)) <= _DATA_CHARS else _digest(value)
