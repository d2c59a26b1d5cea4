"""A run's life recorded operation by operation, with what was true at each step.

A life is trained with the recorder in the seam of storage. `helpers.judging` says what must hold
in each state that a power cut may leave of it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dist_ckpt
from dist_ckpt.identity import _code
from dist_ckpt.storage import use_ops
from helpers.power_cuts import Disk
from helpers.ranks import RankContext, run_ranks
from helpers.recording import Event, Recorder, merge

EVERY = 2
NAME = "run"


class Counter:
    """Data whose whole state is a number."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.tensor([self.position / 7, 1.0, -self.position / 5])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@dataclass
class Branch:
    """One course of training that was really gone: step → state and loss at its boundary."""

    states: dict[int, bytes] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def grow_from(self, step: int) -> Branch:
        """Return a new one that shares all up to ``step``."""
        return Branch(
            {key: value for key, value in self.states.items() if key <= step},
            {key: value for key, value in self.losses.items() if key <= step},
        )


@dataclass
class Life:
    """What was done and what was true.

    Attributes:
        start: The disk before.
        saved: The newest step that had been told as saved before; 0: none.
        events: What was done.
        branches: In the order in which they began.
        settings: Of the last attempt; whoever goes on after a cut gives them again.
    """

    start: Disk
    saved: int = 0
    events: list[Event] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def train(
    root: Path,
    until: int,
    branch: Branch | None = None,
    *,
    lr: float = 0.1,
    name: str = NAME,
    **settings: Any,
) -> dist_ckpt.Checkpointer:
    """Train below ``root`` until a step, and write down in ``branch`` what is true at each."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for devices each time
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    data = Counter()
    given = {"every": EVERY, "keep_last": 1, "signals": (), **settings}
    with dist_ckpt.Checkpointer(
        root / name, model=model, optimizer=optimizer, scheduler=scheduler, data=data, **given
    ) as ckpt:
        resumed = ckpt.resumed.step if ckpt.resumed else 0
        if branch is not None:
            branch.states.setdefault(resumed, snapshot(model, optimizer, data))
        # Where nothing is to be trained a fresh start would do nothing but save step 0.
        for step in ckpt.steps(until=until) if until or ckpt.resumed else ():
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = model(next(data)).square().sum() + torch.rand(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.record(loss=loss, lr=lr)
            if ckpt.due:
                ckpt.sample(f"at {step}", loss=loss)
            if branch is not None:
                branch.losses[step] = loss.item()
                branch.states[step] = snapshot(model, optimizer, data)
    ckpt.final = snapshot(model, optimizer, data)  # type: ignore[attr-defined]
    return ckpt


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Counter) -> bytes:
    """Return the bytes of weights, moments and place in the data."""
    parts = []
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors = [parameter, *(state[key] for key in sorted(state))]
        parts += [tensor.detach().numpy().tobytes() for tensor in tensors]
    return b"".join([*parts, str(data.position).encode()])


def record(root: Path, *chapters: Callable[[Life, Path], None]) -> Life:
    """Return a life of these chapters, lived below ``root``, an empty directory in memory."""
    life = Life(Disk.read(root), branches=[Branch()])
    for chapter in chapters:
        recorder = Recorder(root)
        with use_ops(recorder), quiet():
            chapter(life, root)
        life.events += recorder.events
    return life


def record_recovery(root: Path, state: Disk, life: Life, saved: int) -> Life:
    """Return the life that begins with a power cut: a resume from ``state``, and one step more."""
    state.lay(root)
    again = Life(Disk.read(root), saved, branches=list(life.branches), settings=life.settings)
    recorder = Recorder(root)
    with use_ops(recorder), quiet():
        ckpt = train(root, 0, **life.settings)
        step = ckpt.resumed.step if ckpt.resumed else 0
        state_then: bytes = ckpt.final  # type: ignore[attr-defined]
        again.branches.append(_course(again, step, state_then).grow_from(step))
        train(root, step + 1, again.branches[-1], **life.settings)
    again.events = recorder.events
    return again


def record_recovery_by_ranks(
    root: Path, state: Disk, life: Life, saved: int, world_size: int
) -> Life:
    """Return the same of a resume by several ranks, their operations in the order of time."""
    state.lay(root)
    again = Life(Disk.read(root), saved, branches=list(life.branches), settings=life.settings)
    results = run_ranks(world_size, body_recover, str(root), life.settings)
    assert [result.returncode for result in results] == [0] * world_size, results
    told = [pickle.loads(bytes.fromhex(result.value)) for result in results]  # noqa: S301
    _, step, states, losses = told[0]
    branch = _course(again, step, states[step]).grow_from(step)
    branch.states.update(states)
    branch.losses.update(losses)
    again.branches.append(branch)
    again.events = merge(*(events for events, *_ in told))
    return again


def body_recover(ctx: RankContext, root: str, settings: dict[str, Any]) -> str:
    """Be one rank of a recorded recovery."""
    branch, recorder = Branch(), Recorder(Path(root))
    with use_ops(recorder), quiet():
        resumed = train(Path(root), 0, **settings).resumed
        step = resumed.step if resumed else 0
        train(Path(root), step + 1, branch, **settings)
    return pickle.dumps((recorder.events, step, branch.states, branch.losses)).hex()


def _course(life: Life, step: int, state: bytes) -> Branch:
    """Return the course that was resumed: a cut may be before the run went back, or after it."""
    return next(branch for branch in reversed(life.branches) if branch.states.get(step) == state)


def attempt(until: int, **settings: Any) -> Callable[[Life, Path], None]:
    """Return a chapter: one attempt that trains on until a step."""

    def live(life: Life, root: Path) -> None:
        life.settings = settings
        train(root, until, life.branches[-1], **settings)

    return live


def ranks(until: int, world_size: int, **settings: Any) -> Callable[[Life, Path], None]:
    """Return a chapter: one attempt of several ranks, their operations in the order of time."""

    def live(life: Life, root: Path) -> None:
        life.settings = settings
        results = run_ranks(world_size, body_rank, str(root), until, settings)
        assert [result.returncode for result in results] == [0] * world_size, results
        told = [pickle.loads(bytes.fromhex(result.value)) for result in results]  # noqa: S301
        records = [events for events, _, _ in told]
        _, states, losses = told[0]
        life.branches[-1].states.update(states)
        life.branches[-1].losses.update(losses)
        life.events += merge(*records)

    return live


def body_rank(ctx: RankContext, root: str, until: int, settings: dict[str, Any]) -> str:
    """Be one rank of a recorded attempt."""
    branch, recorder = Branch(), Recorder(Path(root))
    with use_ops(recorder), quiet():
        train(Path(root), until, branch, **settings)
    return pickle.dumps((recorder.events, branch.states, branch.losses)).hex()


def rewind(to: int, until: int, **settings: Any) -> Callable[[Life, Path], None]:
    """Return a chapter: an attempt that goes back and then takes another course."""

    def live(life: Life, root: Path) -> None:
        life.settings = settings
        life.branches.append(life.branches[-1].grow_from(to))
        train(root, until, life.branches[-1], resume=to, lr=0.03, **settings)

    return live


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what is said, and don't ask git at each of thousands of starts."""
    asked = _code._git
    said = io.StringIO()
    _code._git = lambda *_: None
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        _code._git = asked
