"""One generation, looked at and loaded from outside. Layer 6, reads only; torch on demand."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import NotFoundError, SettingError
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.policy import WithoutZombies
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.snapshot_index import IndexedTensor, encode_name
from dist_ckpt.wording import counted, dist_ckpt_command

if TYPE_CHECKING:
    import torch

    from dist_ckpt.resume import Reader

__all__ = ["Generation"]

#: Parts of a training that `Generation.load_into` may be given beside the model.
_PARTS = ("optimizer", "scheduler", "scaler", "data", "policy", "extra")


class Generation:
    """A committed resume point and its files.

    Attributes:
        step: Finished updates.
        store: Where it lies, for the commands of this package.
    """

    def __init__(self, store: StoredGenerations, step: int) -> None:
        self.step = step
        self.store = store

    def __repr__(self) -> str:
        return f"Generation(step={self.step}, path={str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.store.path(self.step)

    @cached_property
    def manifest(self) -> ResumePoint:
        """What ``resume_point.json`` says, checked; read when first asked for.

        Raises:
            NotFoundError: It isn't there (any more).
            CorruptFileError: It isn't whole.
        """
        return self.store.manifest(self.step)

    @property
    def verified_at(self) -> float | None:
        """When it was read back and found whole (seconds since the epoch); None: not yet."""
        return self.store.verified_at(self.step)

    @cached_property
    def tensors(self) -> Mapping[str, IndexedTensor]:
        """Every tensor by key, with dtype, shape and places.

        Keys are ``model/<name>`` and ``optimizer/<name>/<state>``, with ``/`` in a name escaped.

        Raises:
            CorruptFileError: The index isn't whole, or isn't the one that was saved.
        """
        return self.store.index(self.manifest)

    def verify(self, *, progress: Callable[[int], None] | None = None) -> int:
        """Return the bytes read after every byte was compared with its digest, past the page cache.

        Writes nothing. `dist_ckpt.runs.check_generation` collects all faults instead.

        Args:
            progress: Called with the bytes read since the last call.

        Raises:
            CorruptFileError, NotFoundError: The first fault found.
        """
        return self.store.verify(self.manifest, progress=progress)

    def key(self, name: str) -> str:
        """Return the key of a tensor given by its key, or by a parameter's or buffer's name.

        Raises:
            NotFoundError: There is none; similar names are suggested.
        """
        for key in (name, f"model/{encode_name(name)}"):
            if key in self.tensors:
                return key
        names = [key.removeprefix("model/") for key in self.tensors]
        close = difflib.get_close_matches(name, names, n=3)
        raise NotFoundError(
            f"Step {self.step} holds no tensor {name!r}.",
            next_step=f"Did you mean {', '.join(close)}?"
            if close
            else f"`{dist_ckpt_command('show', self.path, '--tensors')}` lists all {len(names)}.",
            path=str(self.path),
            tensor=name,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a fresh CPU tensor of the whole global shape, its bytes checked by their digests.

        Of a buffer, which may differ by rank, it is rank 0's.

        Args:
            name: A key of `tensors`, or the name of a parameter or buffer.

        Raises:
            NotFoundError: No such tensor.
            CorruptFileError: Its bytes aren't what was saved.
        """
        import torch  # noqa: PLC0415 - looking at a run must not cost its import

        from dist_ckpt.staging import torch_dtype  # noqa: PLC0415 - as above

        key = self.key(name)
        found = self.tensors[key]
        fresh = torch.empty(found.shape, dtype=torch_dtype(found.dtype))
        self._reader().into({key: fresh}, buffers={}, rank=0)
        return fresh

    def load_into(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        policy: Any = None,
        extra: Mapping[str, Any] | None = None,
        accept: Collection[str] = (),
        rank: int = 0,
    ) -> None:
        """The live objects hold what was saved; those that aren't given aren't looked at.

        Strict: names, shapes, dtypes and groups must fit. Random state is left alone. Nothing of
        the run is written or locked: this works beside a running job and on a copy. Not collective.

        Args:
            model: A module, or a dict of named ones, as the run's Checkpointer was given.
            optimizer: Likewise; None loads weights and buffers only.
            scheduler: Likewise.
            scaler: Likewise.
            data: An object with ``state_dict`` and ``load_state_dict``.
            policy: Likewise; arms without a source are left out, with a warning that names them.
            extra: Such objects by name; names that were saved and aren't here are left out.
            accept: Parts whose difference is accepted (``"scaler"``, ``"extra.ema"``).
            rank: Whose buffers and own values are loaded.

        Raises:
            MismatchError: Something doesn't fit; nothing was changed then.
            CorruptFileError: Bytes aren't what was saved; weights may be partly loaded.
            SettingError: No such rank.
        """
        import torch  # noqa: PLC0415 - looking at a run must not cost its import

        from dist_ckpt.capture import Captured  # noqa: PLC0415 - as above
        from dist_ckpt.comm import place_in_job  # noqa: PLC0415 - as above
        from dist_ckpt.resume import inherit  # noqa: PLC0415 - as above

        if not 0 <= rank < self.manifest.world_size:
            raise SettingError(
                f"Step {self.step} was saved by {counted(self.manifest.world_size, 'rank')}, none "
                f"is {rank}.",
                next_step=f"Give a rank below {self.manifest.world_size}.",
                found=rank,
            )
        policy = None if policy is None else WithoutZombies(policy)
        given = dict(zip(_PARTS, (optimizer, scheduler, scaler, data, policy, extra), strict=True))
        omit = {part for part, value in given.items() if value is None} | {"generators"}
        if optimizer is None:
            # Capture wants one; it owns no parameter, and is left out of the restore.
            given["optimizer"] = torch.optim.SGD([{"params": []}], lr=0.0)
        # Ranks of a job mostly load at the same time.
        reader = self._reader(place_in_job() or (0, 1))
        captured = Captured(model, given.pop("optimizer"), **given)
        told = inherit(reader, self.manifest, rank=rank, wanted=captured.parts())
        if extra is not None:
            saved = {part for part in told.shared["parts"] if part.startswith("extra.")}
            omit |= saved - {f"extra.{name}" for name in extra}
        live = captured.prepare(
            reader.untied,
            self.manifest.canonical.stateless,
            told.shared,
            accept=accept,
            omit=omit,
            tied=reader.tied,
        )
        reader.into(live, buffers=told.buffers, rank=rank)
        captured.load_shared(told.shared, accept=accept, omit=omit)
        own = told.read(reader)
        captured.load_rank(told.values, lambda number: own[number], accept=accept, omit=omit)

    def _reader(self, place: tuple[int, int] = (0, 1)) -> Reader:
        from dist_ckpt.resume import Reader  # noqa: PLC0415 - it imports torch

        self.store.check_files(self.manifest)
        return Reader(self.store, self.manifest, place=place)
