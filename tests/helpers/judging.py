"""What must be true of a run after a power cut, whatever state it left.

Of each state `judge` makes files, resumes there as a user does, and compares with what was true.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dist_ckpt
from dist_ckpt.errors import DistCkptError
from dist_ckpt.export import check_sum
from dist_ckpt.generations import GenerationStore, StoredGenerations
from dist_ckpt.history import read_journal, read_loss, read_metrics
from dist_ckpt.runs import Depth, check_bin, find_origin
from helpers.cut_plans import Coverage
from helpers.lives import NAME, Life, quiet, train
from helpers.memory import rarely_collected
from helpers.power_cuts import Cut, Disk, Search, each_cut
from helpers.recording import Event


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
    """How many states were tried, those that weren't recovered, and of which instants they are."""

    states: int = 0
    faults: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)


def try_cuts(
    life: Life,
    scratch: Path,
    search: Search,
    *,
    share: tuple[int, int] = (0, 1),
    stop_at_first: bool = False,
) -> Tally:
    """Return the tally over all instants of a life.

    Args:
        life: What was recorded.
        scratch: An empty directory, best in memory.
        search: Which states are tried.
        share: Which part of the states is this caller's: (k, n), every n-th, from k on.
        stop_at_first: Return at the first fault.
    """
    tally = Tally()
    for cut in rarely_collected(life_cuts(life, search, coverage=tally.coverage)):
        if int.from_bytes(cut.fingerprint[:4], "big") % share[1] != share[0]:
            continue
        tally.states += 1
        go_on = cut.fingerprint[5] % 16 == 0
        fault = judge(cut.state, life, cut.told, scratch, go_on=go_on)
        if fault is not None:
            tally.faults.append(f"{cut}: {fault}")
            if stop_at_first or len(tally.faults) > 20:
                break
    return tally


def life_cuts(life: Life, search: Search, *, coverage: Coverage | None = None) -> Iterator[Cut]:
    """Yield each state of a life; what was ``told`` is the step below which nothing may be lost."""
    promise = Promise([life.saved])

    def told(event: Event) -> int:
        promise.take(event)
        return promise.least

    return each_cut(life.start, life.events, search, told, coverage=coverage)


def lay_out(state: Disk, scratch: Path) -> Path:
    """Return a directory below ``scratch`` that holds this state and nothing else."""
    root = scratch / "state"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    state.lay(root)
    return root


def judge(state: Disk, life: Life, least: int, scratch: Path, *, go_on: bool) -> str | None:
    """Return what is wrong with a resume from this state; None: nothing."""
    root = lay_out(state, scratch)
    if (fault := _check_left(root / NAME)) is not None:
        return f"before anything was started: {fault}"
    with quiet() as said:
        try:
            ckpt = train(root, 0, **life.settings)
            step = ckpt.resumed.step if ckpt.resumed else 0
            fault = _check(root, life, ckpt, step, least)
            if fault is None and go_on:
                train(root, step + 1, **life.settings)
                fault = "it doesn't go on" if latest(root) != step + 1 else _check_bins(root / NAME)
        except Exception as error:  # noqa: BLE001 - a finding
            fault = f"{type(error).__name__}: {error}"
    return fault if fault is None else f"{fault}\n{said.getvalue()}"


def _check_left(run_dir: Path) -> str | None:
    """Return what is wrong with what a cut left, before a start mends it: for who only reads it."""
    for path in (run_dir / "run.json", *run_dir.glob("checkpoints/step_*/verified.json")):
        if path.exists() and not _is_json(path):
            return f"{path} is torn: {path.read_bytes()!r}"
    for path in run_dir.glob("step_*.bin"):
        try:
            check_sum(path)
        except DistCkptError as error:
            return f"{path.name} has a sum that isn't its own: {error}"
    marked = {_step_of(path.parent) for path in run_dir.glob("checkpoints/step_*/verified.json")}
    if not marked:
        return None
    # An attempt that was killed right after a commit has told nothing: the one that resumed has.
    # Where only the commit's last sync failed, the save is told as failed, and the point is there.
    words = ("saved", "resumed", "save_failed")
    events = read_journal(run_dir, naming=words)
    told = {event["step"] for event in events if event["event"] in words}
    if marked - told:
        return f"steps {sorted(marked - told)} are marked as read back, and weren't told of"
    return None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _step_of(path: Path) -> int:
    return int(path.name.partition("_")[2])


def _check(
    root: Path, life: Life, ckpt: dist_ckpt.Checkpointer, step: int, least: int
) -> str | None:
    if step < least:
        return f"resumed from {step} although {least} had been told as saved"
    final: bytes = ckpt.final  # type: ignore[attr-defined]
    told = dict(read_loss(root / NAME))
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
    noted = {line["step"] for line in read_metrics(root / NAME)}
    if lost := {k for k in fitting[0].losses if k <= step} - noted:
        return f"the metrics of steps {sorted(lost)} are lost"
    return _look_around(root / NAME)


def _look_around(run_dir: Path) -> str | None:
    journal = (run_dir / f"{NAME}.journal.jsonl").read_bytes()
    for line in journal.splitlines():
        if b'"event": "skipped"' in line or b'"event": "faulty"' in line:
            return f"a generation with its name wasn't whole: {line!r}"
    for name in ("run.samples.json", "run.loss.json"):
        path = run_dir / name
        if path.exists():
            json.loads(path.read_bytes())
    for folder, folders, files in os.walk(run_dir):
        if left := [name for name in [*folders, *files] if name.startswith(".tmp-")]:
            return f"{left} were left in {folder}"
    return _check_bins(run_dir) or _check_archive(run_dir)


def _check_bins(run_dir: Path) -> str | None:
    """Return what is wrong with the canonical files after a start: each generation's, no others."""
    store = GenerationStore(run_dir)
    wanted = {store.bin_path(step).name for step in store.steps()}
    paths = sorted(run_dir.glob("step_*.bin"))
    if wanted != (found := {path.name for path in paths}):
        return f"generations {sorted(wanted)} have the files {sorted(found)}"
    for step, path in zip(store.steps(), paths, strict=True):
        if path.samefile(store.path(step) / "rank_00000.shard") and check_sum(path):
            continue  # a link of what is judged already
        finding = check_bin(path, Depth(), origin=find_origin(path))
        if not finding.is_whole or finding.notes:  # no sum beside it is but a note
            return f"{path.name} isn't right: {finding.faults} {finding.notes}"
    return None


def _check_archive(run_dir: Path) -> str | None:
    """Return what is lost of what a rewind set aside; samples were taken at each of its steps."""
    store = GenerationStore(run_dir)
    for event in read_journal(run_dir, naming=("rewound",)):
        if event["event"] != "rewound":
            continue
        home = store.archive / event["home"]
        for step in event["set_aside"]:
            if (home.name, step) not in store.archived():
                return f"step {step} isn't in {home} any more"
            there = StoredGenerations(run_dir)
            there.directory = home
            there.verify(there.manifest(step))
        if event["set_aside"] and not _is_json(home / f"{NAME}.samples.json"):
            return f"the samples in {home} are torn"
    return None


def latest(root: Path) -> int:
    """Return the newest committed step."""
    found = dist_ckpt.open_run(root / NAME).latest()
    return found.step if found else 0
