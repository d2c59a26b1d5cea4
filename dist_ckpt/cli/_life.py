"""``fork``, ``rewind``, ``undelete``: branches of a run, and its archive. Layer 8."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import lifecycle
from dist_ckpt.cli._address import AddressArgument, RunArgument, find, find_generation, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._settings_file import DryRunOption, read_settings
from dist_ckpt.cli._text import plain, table
from dist_ckpt.errors import NotFoundError, UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History
from dist_ckpt.lifecycle import Archived, Forked, Rewound
from dist_ckpt.runs import Run
from dist_ckpt.wording import counted, dist_ckpt_command

__all__ = ["COMMANDS", "run_dir_of"]

_FOLLOWS = "  its policy starts fresh, with the settings of the pivot that no save has followed yet"


def fork(
    address: AddressArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new run directory.")],
    *,
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON settings; the branch's policy starts fresh."),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Begin a new run where this one was at some step, with the history up to there.

    No bytes are copied where the file system can share them. Nothing of the parent changes.
    """
    _, generation = find_generation(address)
    settings = read_settings(policy)
    origin = lifecycle.find_origin(generation.store, generation.step)
    if dry_run:
        lifecycle.check_fork(origin, Path(new))
        due = lifecycle.pivot_due(origin, generation.manifest) if settings is None else None
        document = {
            "from": str(generation.path),
            "step": generation.step,
            "path": new,
            "pivot": None if due is None else due.id,
            "dry_run": True,
        }
        head = f"would fork step {generation.step} of {generation.path} to {new}"
        lines = [head] if due is None else [head, _FOLLOWS]
        return Answer(document, lambda: "".join(f"{plain(line)}\n" for line in lines))
    num_bytes = 0 if generation.verified_at is not None else generation.manifest.num_bytes
    with byte_bar("verifying", num_bytes, quiet=as_json) as progress:
        forked = lifecycle.fork(origin, Path(new), policy=settings, progress=progress)
    document = {
        "run": forked.path.name,
        "path": str(forked.path),
        "step": forked.step,
        "id": forked.id,
        "files": dict(forked.how),
        "num_losses": forked.num_losses,
        "pivot": forked.pivot,
        "was_there": forked.was_there,
        "dry_run": False,
    }
    return Answer(document, lambda: _tell_fork(forked))


def _tell_fork(forked: Forked) -> str:
    words = {"reflink": "shared (reflink)", "link": "shared (hard link)", "copy": "copied"}
    files = ", ".join(f"{forked.how[key]} {words[key]}" for key in words if forked.how.get(key))
    what = "was there already" if forked.was_there else "is ready"
    lines = [
        f"{forked.path} {what}: it goes on from step {forked.step}",
        f"  {counted(forked.num_losses, 'loss', 'losses')} carried over; files: {files}",
        *([_FOLLOWS] if forked.pivot is not None else []),
    ]
    return "".join(f"{plain(line)}\n" for line in lines)


def rewind(
    address: AddressArgument, *, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> Answer:
    """Go back to a step: later generations, .bin files and samples go to archive/.

    Nothing is deleted. The next start goes on from there.
    """
    run, step = _named(address, "rewind")
    run_dir = run_dir_of(run)
    if dry_run:
        planned = lifecycle.plan_rewind(run.store, step)
        lost = [entry for entry in run.loss() if entry[0] > step]
        document = _rewind_document(run, planned, len(lost), dry_run=True)
        return Answer(document, lambda: _tell_rewind(run, planned, len(lost), dry_run=True))
    with lifecycle.hold_open(run_dir, "rewind") as (store, history):
        generation = run.generation(step)
        # Going back to what can't be read would leave a run that can't go on.
        with byte_bar("verifying", generation.manifest.num_bytes, quiet=as_json) as progress:
            generation.verify(progress=progress)
        num_lost = len(history.loss.after(step))
        rewound = lifecycle.rewind(store, history, step)
    document = _rewind_document(run, rewound, num_lost, dry_run=False)
    return Answer(document, lambda: _tell_rewind(run, rewound, num_lost, dry_run=False))


def _rewind_document(
    run: Run, rewound: Rewound, num_losses: int, *, dry_run: bool
) -> dict[str, object]:
    return {
        "run": run.name,
        "path": str(run.path),
        "step": rewound.step,
        "set_aside": list(rewound.set_aside),
        "bins": list(rewound.bins),
        "archive": rewound.home,
        "num_losses": num_losses,
        "dry_run": dry_run,
    }


def _tell_rewind(run: Run, rewound: Rewound, num_losses: int, *, dry_run: bool) -> str:
    verb = "would go back" if dry_run else "went back"
    lines = [f"{run.name}: {verb} to step {rewound.step}"]
    if rewound.set_aside:
        where = f"archive/{rewound.home}" if rewound.home else "archive/"
        steps = _list(rewound.set_aside)
        lines.append(f"  to {where}: steps {steps}, with what .bin and samples there are")
    if rewound.bins:
        lines.append(f"  likewise .bin files without a generation: {_list(rewound.bins)}")
    losses = counted(num_losses, "loss", "losses")
    lines.append(f"  no longer counted: {losses}; the bytes stay")
    return "".join(f"{plain(line)}\n" for line in lines)


def _list(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def undelete(
    run: RunArgument,
    what: Annotated[
        str | None,
        typer.Argument(metavar="WHAT", help="A step, HOME, or HOME/step_N; none lists them."),
    ] = None,
    *,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Bring generations back from archive/, where nothing stands in their place.

    The losses that led to the newest of them count again.
    """
    found = find_run(run)
    run_dir = run_dir_of(found)
    if what is None:
        return _list_archive(found, GenerationStore(run_dir))
    if dry_run:
        store = GenerationStore(run_dir)
        chosen, was_there = _chosen(store, None, what)
        if not was_there:
            lifecycle.undelete(store, None, chosen)
    else:
        with lifecycle.hold_open(run_dir, "undelete") as (store, history):
            chosen, was_there = _chosen(store, history, what)
            if was_there:
                return _tell_undelete(found, chosen, "is back already", was_there=True)
            num_bytes = sum(_num_bytes(store, one) for one in chosen)
            with byte_bar("verifying", num_bytes, quiet=as_json) as progress:
                lifecycle.undelete(store, history, chosen, progress=progress)
    verb = "is back already" if was_there else "would be back" if dry_run else "is back"
    return _tell_undelete(found, chosen, verb, dry_run=dry_run, was_there=was_there)


def _chosen(
    store: GenerationStore, history: History | None, what: str
) -> tuple[Sequence[Archived], bool]:
    """Return what ``what`` names, and whether an earlier call has brought it back already."""
    try:
        return lifecycle.find_archived(store, what), False
    except NotFoundError:
        back = lifecycle.find_brought_back(store, history, what)
        if not back:
            raise
        return back, True


def _tell_undelete(
    run: Run,
    chosen: Sequence[Archived],
    verb: str,
    *,
    dry_run: bool = False,
    was_there: bool = False,
) -> Answer:
    document = {
        "run": run.name,
        "path": str(run.path),
        "brought_back": [{"home": one.home, "step": one.step} for one in chosen],
        "was_there": was_there,
        "dry_run": dry_run,
    }
    lines = [f"{run.name}: step {one.step} {verb}, from archive/{one.home}" for one in chosen]
    return Answer(document, lambda: "".join(f"{plain(line)}\n" for line in lines))


def _num_bytes(store: GenerationStore, one: Archived) -> int:
    return one.store(store.archive).manifest(one.step).num_bytes


def _list_archive(run: Run, store: GenerationStore) -> Answer:
    there = lifecycle.list_archived(store)
    document = {
        "run": run.name,
        "path": str(run.path),
        "archived": [{"home": one.home, "step": one.step} for one in there],
    }
    rows = [(one.step, one.home) for one in there]
    text = table(("step", "archive/"), rows, right=("step",)) if rows else "archive/ is empty.\n"
    return Answer(document, lambda: text)


def _named(address: str, command: str) -> tuple[Run, int]:
    """Return a run and the step that was named: what moves things doesn't guess."""
    found = find(address)
    step = found.run.store.steps()[0] if found.run.is_single else found.step
    if step is None:
        raise UsageError(
            f"{command} wants a step, and {address} names none.",
            next_step=f"Write {shlex.quote(f'{address}@N')}; "
            f"`{dist_ckpt_command('ls', address)}` lists the steps.",
        )
    return found.run, step


def run_dir_of(run: Run) -> Path:
    """Return the directory of a run that something is about to be changed in.

    Raises:
        UsageError: It is a generation that lies alone.
    """
    if run.is_single:
        origin = lifecycle.find_origin(run.store, run.store.steps()[0])
        if origin.run_dir is None or origin.home is not None:
            raise UsageError(
                f"{run.path} is a generation outside of a run's checkpoints/.",
                next_step="Name the run: RUN@N.",
                path=str(run.path),
            )
        return origin.run_dir
    return run.store.run_dir


COMMANDS = (fork, rewind, undelete)
