"""A run's life recorded operation by operation, and what must be true of it after a power cut.

A life is trained with the recorder in the seam of storage. Of each state that a power cut may
leave, ``judge`` makes files, resumes there as a user does, and compares with what was true.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dist_ckpt
from dist_ckpt.identity import _code
from dist_ckpt.storage import use_ops
from helpers.power_cuts import Disk, Event, Recorder, cuts, merge
from helpers.ranks import RankContext, run_ranks

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
    """

    start: Disk
    saved: int = 0
    events: list[Event] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)


def train(
    root: Path, until: int, branch: Branch | None = None, *, lr: float = 0.1, **settings: Any
) -> dist_ckpt.Checkpointer:
    """Train below ``root`` until a step, and write down in ``branch`` what is true at each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    data = Counter()
    given = {"every": EVERY, "keep_last": 1, "signals": (), **settings}
    with dist_ckpt.Checkpointer(
        root / NAME, model=model, optimizer=optimizer, scheduler=scheduler, data=data, **given
    ) as ckpt:
        resumed = ckpt.resumed.step if ckpt.resumed else 0
        if branch is not None:
            branch.states.setdefault(resumed, snapshot(model, optimizer, data))
        for step in ckpt.steps(until=until):
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
    again = Life(Disk.read(root), saved, branches=list(life.branches))
    recorder = Recorder(root)
    with use_ops(recorder), quiet():
        resumed = train(root, 0).resumed
        step = resumed.step if resumed else 0
        again.branches.append(_course(again, step).grow_from(step))
        train(root, step + 1, again.branches[-1])
    again.events = recorder.events
    return again


def _course(life: Life, step: int) -> Branch:
    return next(branch for branch in reversed(life.branches) if step in branch.states)


def attempt(until: int, **settings: Any) -> Callable[[Life, Path], None]:
    """Return a chapter: one attempt that trains on until a step."""

    def live(life: Life, root: Path) -> None:
        train(root, until, life.branches[-1], **settings)

    return live


def ranks(until: int, world_size: int, **settings: Any) -> Callable[[Life, Path], None]:
    """Return a chapter: one attempt of several ranks, their operations in the order of time."""

    def live(life: Life, root: Path) -> None:
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


# Judging -----------------------------------------------------------------------------------------


@dataclass
class Promise:
    """What had been told by an instant: that these steps are saved; that it went back."""

    steps: list[int] = field(default_factory=list)
    rewinding: int | None = None

    def take(self, event: Event) -> None:
        """Take in what an operation told: a line of the journal."""
        if event.op != "write" or not event.text.endswith(".journal.jsonl"):
            return
        for line in event.data.splitlines():
            told = json.loads(line)
            if told["event"] == "saved":
                self.steps.append(told["step"])
            elif told["event"] == "rewind_started":
                self.rewinding = told["step"]
            elif told["event"] == "rewound":
                self.steps = [step for step in self.steps if step <= told["step"]]
                self.rewinding = None

    @property
    def least(self) -> int:
        """The step below which nothing may be lost."""
        kept = max(self.steps, default=0)
        return kept if self.rewinding is None else min(kept, self.rewinding)


@dataclass
class Tally:
    """How many states were tried, and those that weren't recovered."""

    seed: int
    states: int = 0
    faults: list[str] = field(default_factory=list)


def try_cuts(
    life: Life,
    scratch: Path,
    *,
    seed: int,
    at_most: int,
    share: tuple[int, int] = (0, 1),
    stop_at_first: bool = False,
    points: Sequence[int] | None = None,
) -> Tally:
    """Return the tally over all instants of a life; ``share`` (k, n): every n-th state, from k on.

    Args:
        life: What was recorded.
        scratch: An empty directory, best in memory.
        seed: For the samples.
        at_most: States an instant, and the two plain ones.
        share: Which part of the states is this caller's.
        stop_at_first: Return at the first fault.
        points: Instants to cut at, numbers of events; None: all.
    """
    tally = Tally(seed)
    disk, promise, seen = life.start.copy(), Promise([life.saved]), set[bytes]()
    chosen = None if points is None else set(points)
    for number, event in enumerate(life.events):
        disk.do(event)
        promise.take(event)
        if event.op == "mark" or (chosen is not None and number not in chosen):
            continue
        generator = random.Random(f"{seed} {number}")
        for state in cuts(disk, generator, at_most=at_most):
            fingerprint = state.fingerprint()
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            if int.from_bytes(fingerprint[:4], "big") % share[1] != share[0]:
                continue
            tally.states += 1
            fault = judge(state, life, promise.least, scratch, go_on=fingerprint[5] % 16 == 0)
            if fault is not None:
                where = f"cut after operation {number}, {event.op} {event.text}"
                tally.faults.append(f"{where}: {fault}")
                if stop_at_first or len(tally.faults) > 20:
                    return tally
    return tally


def judge(state: Disk, life: Life, least: int, scratch: Path, *, go_on: bool) -> str | None:
    """Return what is wrong with a resume from this state; None: nothing."""
    root = scratch / "state"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    state.lay(root)
    with quiet() as said:
        try:
            ckpt = train(root, 0)
            step = ckpt.resumed.step if ckpt.resumed else 0
            fault = _check(root, life, ckpt, step, least)
            if fault is None and go_on:
                train(root, step + 1)
                fault = None if latest(root) == step + 1 else "it doesn't go on"
        except Exception as error:  # noqa: BLE001 - a finding
            fault = f"{type(error).__name__}: {error}"
    return fault if fault is None else f"{fault}\n{said.getvalue()}"


def _check(
    root: Path, life: Life, ckpt: dist_ckpt.Checkpointer, step: int, least: int
) -> str | None:
    if step < least:
        return f"resumed from {step} although {least} had been told as saved"
    final: bytes = ckpt.final  # type: ignore[attr-defined]
    run = dist_ckpt.open_run(root / NAME)
    told = dict(run.loss())
    fitting = [
        branch
        for branch in life.branches
        if branch.states.get(step) == final
        and all(told.get(k) == loss for k, loss in branch.losses.items() if k <= step)
    ]
    if not fitting:
        return f"state or losses at step {step} are a mixture: {told}"
    if any(all(b.losses.get(k) != loss for b in life.branches) for k, loss in told.items()):
        return f"the history has losses that never were: {told}"
    if skipped := [event for event in run.journal() if event["event"] in {"skipped", "faulty"}]:
        return f"a generation with its name wasn't whole: {skipped}"
    for name in ("run.samples.json", "run.loss.json"):
        path = root / NAME / name
        if path.exists():
            json.loads(path.read_bytes())
    if left := [path.name for path in (root / NAME).rglob(".tmp-*")]:
        return f"{left} were left"
    return None


def latest(root: Path) -> int:
    """Return the newest committed step."""
    found = dist_ckpt.open_run(root / NAME).latest()
    return found.step if found else 0
