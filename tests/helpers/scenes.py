"""One proof of resume: a run that nothing stopped, one cut and resumed, one with a part left out.

    def build() -> Scene: ...                       # builds live objects; never seeds
    prove(tmp_path, build, left_out="scheduler")    # resumed = uninterrupted ≠ with it left out

All in this process: what a new process would lose is lost here too, since each scenario builds its
objects anew and begins with other random state than the run that it resumes.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dist_ckpt

CUT = 5
UNTIL = 9
OMIT = "DIST_CKPT_OMIT_RESTORE"


@dataclass
class Scene:
    """The objects of one process.

    Attributes:
        model: For the Checkpointer, as is ``optimizer``.
        optimizer: See there.
        update: Makes one closed update and returns its loss.
        more: Further arguments of the Checkpointer, as ``scheduler`` or ``extra``.
        before_loop: Called when everything but random state is restored.
        close: Called at the end.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[], torch.Tensor]
    more: dict[str, Any] = field(default_factory=dict)
    before_loop: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """What a scenario left, by bits.

    Attributes:
        losses: Step → loss, exactly, of the steps that this process made.
        rates: Step → the learning rate of each group after it.
        state: Part → digest: model, optimizer, every other part, and the next draws.
    """

    losses: Mapping[int, str]
    rates: Mapping[int, list[str]]
    state: Mapping[str, str]

    def differs_from(self, other: Outcome) -> list[str]:
        """Return where the two are not the same, for steps that both made."""
        both = self.losses.keys() & other.losses.keys()
        assert both, "no step in common"
        found = [
            f"{name} of step {step}"
            for name in ("losses", "rates")
            for step in sorted(both)
            if getattr(self, name)[step] != getattr(other, name)[step]
        ]
        parts = {**self.state, **other.state}
        return found + [part for part in parts if self.state.get(part) != other.state.get(part)]


def play(
    run: Path,
    build: Callable[[], Scene],
    until: int,
    *,
    seed: int = 1,
    spoil: Callable[[Scene], object] = lambda _: None,
    **settings: Any,
) -> Outcome:
    """Return what a start of the script left at ``until``, resumed where there is something.

    Args:
        run: Run directory.
        build: Makes the objects.
        until: Last step.
        seed: Of all global generators, before ``build``.
        spoil: Changes something between the restore and the loop.
        settings: Of the Checkpointer.
    """
    seed_everything(seed)
    scene = build()
    losses, rates = {}, {}
    arguments = {"every": 100, "keep_last": None, **scene.more, **settings}
    try:
        with dist_ckpt.Checkpointer(
            run, model=scene.model, optimizer=scene.optimizer, **arguments
        ) as ckpt:
            spoil(scene)
            scene.before_loop()
            for step in ckpt.steps(until=until):
                loss = scene.update()
                ckpt.record(loss=loss)
                losses[step] = float(loss.detach()).hex()
                rates[step] = [float(g["lr"]).hex() for g in scene.optimizer.param_groups]
            state = fingerprint(scene)
    finally:
        scene.close()
    return Outcome(losses, rates, state)


def prove(
    folder: Path,
    build: Callable[[], Scene],
    *,
    left_out: str = "",
    spoil: Callable[[Scene], object] = lambda _: None,
    resume: Callable[[], Scene] | None = None,
    shows_in: str = "",
) -> None:
    """The resumed run is the uninterrupted one bit for bit, and one with a part left out isn't.

    Args:
        folder: Empty.
        build: Makes the objects of the uninterrupted run and of the one that is cut.
        left_out: A part that the negative control doesn't restore; or…
        spoil: …what the negative control breaks after the restore.
        resume: Makes the objects of the resume, where they differ (other number of workers).
        shows_in: A word that one of the negative's differences has to begin with.
    """
    resume = resume or build
    whole = play(folder / "whole" / "run", build, UNTIL)
    play(folder / "cut" / "run", build, CUT)
    shutil.copytree(folder / "cut", folder / "negative")
    resumed = play(folder / "cut" / "run", resume, UNTIL, seed=2)
    assert sorted(resumed.losses) == list(range(CUT + 1, UNTIL + 1))
    assert resumed.differs_from(whole) == []
    with mock.patch.dict("os.environ", {OMIT: left_out}):
        negative = play(folder / "negative" / "run", resume, UNTIL, seed=2, spoil=spoil)
    found = negative.differs_from(whole)
    assert any(one.startswith(shows_in) for one in found), f"the negative shows nothing: {found}"


def seed_everything(seed: int) -> None:
    """The global generators begin a stream of their own."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def fingerprint(scene: Scene) -> dict[str, str]:
    """Return part → digest of all that a resume must bring back, the next draws last."""
    parts: dict[str, Any] = {
        "model": scene.model.state_dict(),
        "optimizer": scene.optimizer.state_dict(),
    }
    for name, value in scene.more.items():
        inner = value if isinstance(value, dict) else {"": value}
        for key, one in inner.items():
            if hasattr(one, "state_dict"):
                parts[f"{name}.{key}".rstrip(".")] = one.state_dict()
    draws = [random.random(), float(np.random.random()), torch.rand(3)]  # noqa: NPY002
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        draws.append(torch.rand(3, device="cuda"))
    parts["draws"] = draws
    return {name: hashlib.sha256(_spell(value)).hexdigest()[:16] for name, value in parts.items()}


def _spell(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{plain.dtype}{list(plain.shape)}".encode() + raw
    if isinstance(value, Mapping):
        return b"{" + b",".join(_spell(k) + b":" + _spell(v) for k, v in value.items()) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_spell, value)) + b"]"
    return value.hex().encode() if isinstance(value, float) else repr(value).encode()
